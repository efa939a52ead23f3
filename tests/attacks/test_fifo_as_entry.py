"""A FIFO in the place of an entry makes a reader wait for ever."""

from __future__ import annotations

import os
import threading

from tests.attacks.scene import filled, is_refused
from tests.store.places import path_of


def test_attack(tmp_path):
    store, path = filled(tmp_path / "store"), path_of(tmp_path / "store", 1)
    path.unlink()
    os.mkfifo(path, 0o600)
    reader = threading.Thread(target=path.read_bytes, daemon=True)
    reader.start()
    reader.join(0.3)
    assert reader.is_alive(), "a plain reader waits"
    is_refused(store, "expected regular file, found FIFO")
    (aside,) = (path.parent.parent / "aside").iterdir()
    # The reader waits for somebody to open the FIFO for writing, and then for the end.
    aside.open("wb").close()
    reader.join(60)
    assert not reader.is_alive()
