"""Somebody who may write to a shared cache publishes a sound entry: his program runs."""

from __future__ import annotations

import shutil

import pytest

from tests.attacks.scene import CONTENT, is_refused
from tests.store.places import key_of, path_of
from vllm_neuron import _core

KEY, OTHER = bytes(range(32)), bytes(32)


def test_attack(tmp_path):
    root = str(tmp_path / "store")
    _core.Store(root).put("neff", key_of(1), {"neff": b"forged"})
    # Sound to whoever compares checksums only.
    assert bytes(_core.Store(root).get("neff", key_of(1)).section("neff")) == b"forged"
    store = _core.Store(root, mac_key=KEY)
    is_refused(store, "has no message authentication code")
    assert store.put("neff", key_of(1), {"neff": CONTENT})
    assert bytes(store.get("neff", key_of(1)).section("neff")) == CONTENT


def test_code_of_another_key(tmp_path):
    root = str(tmp_path / "store")
    _core.Store(root, mac_key=OTHER).put("neff", key_of(1), {"neff": b"forged"})
    is_refused(_core.Store(root, mac_key=KEY), "not that of this store's key")


@pytest.mark.parametrize("change", ["content", "order", "key", "kind", "names"])
def test_code_is_replayed_with_other_content(tmp_path, change):
    signed = _core.Store(str(tmp_path / "signed"), mac_key=KEY)
    signed.put("neff", key_of(1), {"a": b"one", "b": b"two"})
    code = signed.get("neff", key_of(1)).section("mac")
    kind, number, sections = {
        "content": ("neff", 1, {"a": b"one", "b": b"two!", "mac": code}),
        "order": ("neff", 1, {"b": b"two", "a": b"one", "mac": code}),
        "key": ("neff", 2, {"a": b"one", "b": b"two", "mac": code}),
        "kind": ("trace", 1, {"a": b"one", "b": b"two", "mac": code}),
        "names": ("neff", 1, {"ao": b"ne", "b": b"two", "mac": code}),
    }[change]
    _core.Store(str(tmp_path / "store")).put(kind, key_of(number), sections)
    store = _core.Store(str(tmp_path / "store"), mac_key=KEY)
    assert store.get(kind, key_of(number)) is None
    (problem,) = store.take_problems()
    assert "not that of this store's key" in problem.reason


def test_sound_entries_are_taken_with_and_without_a_key(tmp_path):
    store = _core.Store(str(tmp_path / "store"), mac_key=KEY)
    store.put("neff", key_of(1), {"record": b"{}", "neff": CONTENT * 10_000})
    for reader in (_core.Store(store.root, mac_key=KEY), _core.Store(store.root)):
        entry = reader.get("neff", key_of(1), verify=["record"])
        assert bytes(entry.section("neff")) == CONTENT * 10_000
    copy = path_of(tmp_path / "copy", 1)
    copy.parent.mkdir(parents=True, mode=0o700)
    for folder in (copy.parent.parent, copy.parent.parent.parent):
        folder.chmod(0o700)
    shutil.copyfile(path_of(tmp_path / "store", 1), copy)
    copy.chmod(0o400)
    assert _core.Store(str(tmp_path / "copy"), mac_key=KEY).get("neff", key_of(1)) is not None


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_has_32_bytes(tmp_path, length):
    with pytest.raises(ValueError, match=f"mac_key: expected 32 bytes, found {length}"):
        _core.Store(str(tmp_path), mac_key=bytes(length))
