"""The header says another size of the payload than there is."""

from __future__ import annotations

import struct

import pytest

from tests.neff.build import container, members, tar, with_field
from vllm_neuron import _core
from vllm_neuron.errors import NeffError


@pytest.mark.parametrize("change", [-1, 1, 1 << 40, -(1 << 62)])
def test_attack(change):
    sound = container(tar(members()))
    size = len(sound) - 1024
    lying = with_field(sound, "data_size", (size + change) % 2**64)
    # Who trusts the field reads too little or past the end.
    (claimed,) = struct.unpack_from("<Q", lying, 16)
    assert len(lying[1024 : 1024 + claimed]) != claimed or claimed < size
    with pytest.raises(NeffError):
        _core.Neff.parse(lying)
