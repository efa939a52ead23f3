"""A header of an unknown version, read by the rules of a known one."""

from __future__ import annotations

import struct

import pytest

from tests.neff.build import container, members, tar, with_field
from vllm_neuron import _core
from vllm_neuron.errors import NeffError


@pytest.mark.parametrize(("field", "value"), [("pkg_version", 3), ("header_size", 2048)])
def test_attack(field, value):
    lying = with_field(container(tar(members())), field, value)
    # Who does not look at it finds the name where it always is.
    assert struct.unpack_from("9s", lying, 220) == (b"test.neff",)
    with pytest.raises(NeffError) as caught:
        _core.Neff.parse(lying)
    assert str(value) in caught.value.found
