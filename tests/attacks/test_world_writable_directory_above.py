"""Somebody puts another directory in the place of the cache directory."""

from __future__ import annotations

from tests.attacks.scene import filled, is_refused
from tests.store.places import key_of
from vllm_neuron import _core


def test_attack(tmp_path):
    above = tmp_path / "above"
    above.mkdir()
    filled(above / "mine")
    filled(tmp_path / "forged")
    above.chmod(0o777)
    # Anybody may rename in a directory without the sticky bit.
    (above / "mine").rename(above / "gone")
    (tmp_path / "forged").rename(above / "mine")
    is_refused(_core.Store(str(above / "mine")), "without the sticky bit")
    above.chmod(0o1777)
    assert _core.Store(str(above / "mine")).get("neff", key_of(1)) is not None
