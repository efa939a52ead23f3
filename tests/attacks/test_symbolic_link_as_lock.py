"""A symbolic link in the place of a lock file: opening the lock empties its target."""

from __future__ import annotations

from tests.attacks.scene import filled
from tests.store.places import key_of, lock_of


def test_attack(tmp_path):
    store, secret = filled(tmp_path / "store"), tmp_path / "secret"
    secret.write_bytes(b"precious")
    reference = tmp_path / "lock"
    reference.symlink_to(secret)
    with reference.open("w"):
        assert secret.read_bytes() == b""
    secret.write_bytes(b"precious")
    path = lock_of(tmp_path / "store", 2)
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.symlink_to(secret)
    lock = store.lock(key_of(2), note="a note")
    assert lock.acquire(5)
    assert secret.read_bytes() == b"precious"
    lock.release()
