"""The cache directory is a symbolic link to a directory of somebody else."""

from __future__ import annotations

from tests.attacks.scene import filled, is_refused
from vllm_neuron import _core


def test_attack(tmp_path):
    filled(tmp_path / "elsewhere")
    (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    assert (tmp_path / "store" / "v1").is_dir()
    is_refused(_core.Store(str(tmp_path / "store")), "is a symbolic link")
