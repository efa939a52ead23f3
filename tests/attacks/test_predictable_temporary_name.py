"""A symbolic link waits at a temporary name that can be guessed: its target is overwritten."""

from __future__ import annotations

import os
import threading

from tests.attacks.scene import CONTENT, filled
from tests.store.places import key_of, path_of


def test_attack(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"precious")
    # The way of torch's `write_atomic`: process and thread id, without O_EXCL.
    folder = tmp_path / "reference"
    folder.mkdir()
    temporary = folder / f".{os.getpid()}.{threading.get_ident()}.tmp"
    temporary.symlink_to(secret)
    temporary.write_bytes(b"content")
    assert secret.read_bytes() == b"content"
    secret.write_bytes(b"precious")
    store = filled(tmp_path / "store")
    for name in (f".{os.getpid()}.{threading.get_ident()}.tmp", key_of(2) + ".tmp"):
        for place in (tmp_path / "store" / "v1", path_of(tmp_path / "store", 1).parent):
            (place / name).symlink_to(secret)
    assert store.put("neff", key_of(2), {"neff": CONTENT})
    assert secret.read_bytes() == b"precious"
