"""A lock file full of lies about its holder: nobody waits for it, and it is not believed."""

from __future__ import annotations

import json

import pytest

from tests.attacks.scene import filled
from tests.store.places import key_of, lock_of


@pytest.mark.parametrize("text", ["x" * 10_000, json.dumps({"pid": 1}), "[" * 5000, ""])
def test_attack(tmp_path, text):
    store, path = filled(tmp_path / "store"), lock_of(tmp_path / "store", 2)
    path.parent.mkdir(parents=True, mode=0o700)
    path.parent.parent.chmod(0o700)
    path.write_text(text)
    path.chmod(0o600)
    lock = store.lock(key_of(2))
    assert lock.holder() is None
    assert lock.acquire(0)
    lock.release()
