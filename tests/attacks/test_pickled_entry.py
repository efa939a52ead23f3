"""A pickle in the place of an entry runs code in whoever loads it, as torch and vLLM do."""

from __future__ import annotations

import os
import pickle

from tests.attacks.scene import filled, is_refused
from tests.store.places import key_of, path_of


class Payload:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (self.folder,))


def test_attack(tmp_path):
    store, owned = filled(tmp_path / "store"), tmp_path / "owned"
    payload = pickle.dumps(Payload(str(owned)))
    path = path_of(tmp_path / "store", 1)
    path.unlink()
    path.write_bytes(payload)
    path.chmod(0o600)
    pickle.loads(path.read_bytes())
    assert owned.exists()
    owned.rmdir()
    is_refused(store, "magic" if len(payload) >= 4096 else "length of the file")
    store.put("neff", key_of(2), {"record": payload})
    assert bytes(store.get("neff", key_of(2)).section("record")) == payload
    assert not owned.exists()
