"""A pickled graph names any function of any module; graph bytes name operators only."""

from __future__ import annotations

import os
import pickle

import pytest

from tests.key.test_canonical_graph import OUTPUT, call, stream, text
from vllm_neuron.canonical_graph import decode_graph_module
from vllm_neuron.errors import GraphFormatError


@pytest.mark.parametrize(
    "target",
    [
        b"\x26" + text("system"),
        b"\x26" + text("__loader__"),
        b"\x26" + text("os.system"),
        b"\x24" + text("aten::__loader__") + text("load_module"),
        b"\x24" + text("os::system") + text("default"),
        b"\x25" + text("print"),
    ],
)
def test_attack(target):
    assert pickle.loads(pickle.dumps(os.system)) is os.system
    with pytest.raises(GraphFormatError):
        decode_graph_module(stream(call(target), OUTPUT))
