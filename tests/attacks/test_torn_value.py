"""A writer dies half way: a store that writes in place hands out the half, for ever."""

from __future__ import annotations

from tests.attacks.scene import CONTENT, filled, is_refused
from tests.store.places import key_of, path_of


class InPlace:
    """The way of JAX's file cache: written in place, and skipped when it is there already."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()

    def put(self, key, value):
        path = self.folder / key
        if not path.exists():
            path.write_bytes(value)

    def get(self, key):
        return (self.folder / key).read_bytes()


def test_attack(tmp_path):
    reference = InPlace(tmp_path / "reference")
    (tmp_path / "reference" / "key").write_bytes(CONTENT[:5])
    assert reference.get("key") == CONTENT[:5]
    reference.put("key", CONTENT)
    assert reference.get("key") == CONTENT[:5]
    store = filled(tmp_path / "store")
    path = path_of(tmp_path / "store", 1)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:5000])
    is_refused(store, "total length")
    assert store.put("neff", key_of(1), {"neff": CONTENT})
    assert bytes(store.get("neff", key_of(1)).section("neff")) == CONTENT
