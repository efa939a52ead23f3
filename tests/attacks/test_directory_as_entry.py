"""A directory in the place of an entry: neither read nor replaced by a rename."""

from __future__ import annotations

import pytest

from tests.attacks.scene import CONTENT, filled, is_refused
from tests.store.places import key_of, path_of


def test_attack(tmp_path):
    store, path = filled(tmp_path / "store"), path_of(tmp_path / "store", 1)
    path.unlink()
    (path / "inner").mkdir(parents=True)
    with pytest.raises(OSError):
        (tmp_path / "file").write_bytes(b""), (tmp_path / "file").rename(path)
    is_refused(store, "expected regular file, found directory")
    assert store.put("neff", key_of(1), {"neff": CONTENT})
