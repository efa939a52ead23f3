"""A symbolic link in the place of an entry hands out another file."""

from __future__ import annotations

from tests.attacks.scene import filled, is_refused
from tests.store.places import path_of


def test_attack(tmp_path):
    store, secret = filled(tmp_path / "store"), tmp_path / "secret"
    secret.write_bytes(b"precious")
    path = path_of(tmp_path / "store", 1)
    path.unlink()
    path.symlink_to(secret)
    assert path.read_bytes() == b"precious"
    is_refused(store, "expected regular file, found symbolic link")
    assert secret.read_bytes() == b"precious"
