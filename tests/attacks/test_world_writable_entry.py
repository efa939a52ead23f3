"""A published file is writable by others: changed after it was checked."""

from __future__ import annotations

from tests.attacks.scene import filled, is_refused
from tests.store.places import path_of


def test_attack(tmp_path):
    store, path = filled(tmp_path / "store"), path_of(tmp_path / "store", 1)
    path.chmod(0o646)
    is_refused(store, "writable by group or others (mode 0646)")
