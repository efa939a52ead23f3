"""Real NEFFs of public repositories, where they are at hand, and the worked example of one."""

import pytest

from vllm_neuron import _core

from .samples import SAMPLES


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_real_neff_is_sound_without_warnings(path):
    neff = _core.Neff.parse(path.read_bytes(), path=str(path))
    assert neff.warnings == []
    assert neff.digest_order == "word-swapped"
    assert neff.compression == "gzip"
    assert neff.lnc_size == 2
    assert neff.target in {"cayman", "mariana"}
    assert neff.size_bytes == 1024 + neff.data_size == path.stat().st_size
