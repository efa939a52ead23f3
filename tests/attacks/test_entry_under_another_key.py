"""A sound entry is copied to the name of another key: the program of another model runs."""

from __future__ import annotations

import shutil

from tests.attacks.scene import filled, is_refused
from tests.store.places import key_of, path_of
from vllm_neuron import _core


def test_attack(tmp_path):
    store, root = filled(tmp_path / "store"), tmp_path / "store"
    store.put("neff", key_of(2), {"neff": b"another program"})
    path_of(root, 1).unlink()
    shutil.copyfile(path_of(root, 2), path_of(root, 1))
    path_of(root, 1).chmod(0o400)
    # Who goes by the name alone takes it: it is a sound file.
    assert b"another program" in path_of(root, 1).read_bytes()
    is_refused(_core.Store(str(root)), key_of(2))
