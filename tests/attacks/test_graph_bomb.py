"""Graph bytes that claim billions of items, or nest without end."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from tests.key.test_canonical_graph import OUTPUT, stream
from vllm_neuron import _core
from vllm_neuron.errors import GraphFormatError


@pytest.mark.parametrize(
    "nodes",
    [
        stream(OUTPUT, count=2**32 - 1),
        stream(b"\x04\x1a\xff\xff\xff\xff"),
        stream(b"\x04" + b"\x1b\1\0\0\0" * 200_000),
        stream(b"\x02\x32\1\0\0\0" * 200_000),
        stream(b"\x04\x14\xff\xff\xff\x7f"),
    ],
    ids=["nodes", "items", "nested lists", "nested graphs", "digits"],
)
def test_attack(nodes):
    # Who believes the count allocates this many places first.
    assert struct.calcsize("P") * (2**32 - 1) > 1 << 34
    tracemalloc.start()
    try:
        with pytest.raises(GraphFormatError):
            _core.decode_graph(nodes)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
