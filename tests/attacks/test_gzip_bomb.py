"""A payload of some kilobytes inflates to as much as one likes."""

from __future__ import annotations

import zlib

import pytest

from tests.neff.build import block, container, members, tar, without_end
from vllm_neuron import _core
from vllm_neuron.errors import NeffError

INFLATED = 128 << 20


def test_attack():
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    claim = block(b"zeros", b"%011o\0" % ((4 << 30) - 512))
    parts = [packer.compress(without_end(tar(members())) + claim)]
    parts += [packer.compress(bytes(1 << 20)) for _ in range(INFLATED >> 20)]
    bomb = b"".join(parts) + packer.flush()
    # Who inflates it without a bound holds all of it.
    assert len(zlib.decompress(bomb, 31)) > INFLATED > 500 * len(bomb)
    with pytest.raises(NeffError, match="inflate ratio") as caught:
        _core.Neff.parse(container(bomb))
    assert caught.value.inflated_offset < INFLATED
