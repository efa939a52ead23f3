"""The payload is changed, the digest in the header is not: runtimes do not look by default."""

from __future__ import annotations

import pytest

from tests.neff.build import container, members, tar
from vllm_neuron import _core
from vllm_neuron.errors import NeffChecksumError


def test_attack():
    sound = container(tar(members()))
    at = sound.index(b"sg00/PE.bin") + 512
    changed = sound[:at] + b"\x90" + sound[at + 1 :]
    # Accepted by a reader that does not compare, as the vendor's does unless asked to.
    assert _core.Neff.parse(changed, verify_hash=False).name == "test.neff"
    with pytest.raises(NeffChecksumError):
        _core.Neff.parse(changed)
