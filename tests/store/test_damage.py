"""A damaged entry is a counted miss that is set aside and can be replaced."""

from __future__ import annotations

import pickle

import pytest

from tests.store.places import files_below, key_of, path_of
from vllm_neuron import _core
from vllm_neuron.errors import StoreCorruptError

SECTIONS = {"record": b'{"model": "tiny"}', "neff": bytes(range(256)) * 2}


@pytest.fixture
def sound(store, root) -> bytes:
    """Return the bytes of a sound entry whose place is free again."""
    store.put("neff", key_of(1), SECTIONS)
    content = path_of(root, 1).read_bytes()
    store.remove("neff", key_of(1))
    return content


def place(root, content: bytes, number: int = 1) -> None:
    """Put bytes where an entry is expected."""
    path = path_of(root, number)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    path.write_bytes(content)


def refused(store, root) -> str:
    """Look the entry up; return why it is no hit, after checking that it was set aside."""
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    assert type(problem.error) is StoreCorruptError
    assert problem.path == str(path_of(root, 1))
    assert not path_of(root, 1).exists()
    return problem.reason


def test_damage_in_any_byte_is_a_miss(store, root, sound):
    """bugs C04."""
    # One bit of every third byte; all bits are flipped in rust/core/tests/entry_format.rs.
    for offset in range(0, len(sound), 3):
        damaged = bytearray(sound)
        damaged[offset] ^= 1 << (offset % 8)
        place(root, bytes(damaged))
        refused(store, root)
    tried = len(range(0, len(sound), 3))
    assert store.counters()["corrupt"] == store.counters()["set_aside"] == tried


def test_truncation_at_every_byte_of_header_and_table_is_a_miss(store, root, sound):
    edges = [4080, 4095, 4096, 4097, 4113, 8191, 8192, 8193, 8704, len(sound) - 1]
    for length in [*range(64 + 2 * 48 + 1), *edges]:
        place(root, sound[:length])
        refused(store, root)
    place(root, sound + b"\0")
    refused(store, root)


def test_damaged_entry_can_be_replaced(store, root, sound):
    """bugs C05."""
    place(root, sound[:-1] + b"\1")
    assert "padding of a section at offset 12287: expected 00, found 01" in refused(store, root)
    assert store.put("neff", key_of(1), SECTIONS) is True
    assert bytes(store.get("neff", key_of(1)).section("neff")) == SECTIONS["neff"]
    (aside,) = files_below(root / "v1" / "aside")
    assert aside.name.startswith(key_of(1) + "-")
    assert aside.read_bytes() == sound[:-1] + b"\1"


def test_publishing_replaces_a_damaged_entry_that_nobody_looked_up(store, root, sound):
    place(root, sound[:5000])
    assert store.put("neff", key_of(1), SECTIONS) is True
    (problem,) = store.take_problems()
    assert type(problem.error) is StoreCorruptError
    assert path_of(root, 1).read_bytes() == sound


def test_entry_under_another_key_is_a_miss(store, root, sound):
    place(root, sound, 2)
    assert store.get("neff", key_of(2)) is None
    (problem,) = store.take_problems()
    assert (problem.error.offset, problem.error.found) == (32, key_of(1))
    assert problem.error.expected == f"{key_of(2)} (the file's name)"
    assert not path_of(root, 2).exists()


def test_unused_sections_are_checked_when_they_are_asked_for(store, root, sound):
    damaged = bytearray(sound)
    damaged[8192] ^= 1
    place(root, bytes(damaged))
    entry = store.get("neff", key_of(1), verify=["record", "absent"])
    assert bytes(entry.section("record")) == SECTIONS["record"]
    with pytest.raises(StoreCorruptError, match='for section "neff"') as caught:
        entry.section("neff")
    assert caught.value.offset == 8192
    assert pickle.loads(pickle.dumps(caught.value)).details == caught.value.details
    assert store.get("neff", key_of(1)) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95" + pickle.dumps({"a": 1}),
        b"PK\x03\x04" + bytes(8188),
        bytes(4096),
        bytes(1 << 20),
    ],
    ids=["empty", "pickle", "zip", "zeros", "many zeros"],
)
def test_other_files_are_misses(store, root, sound, content):
    place(root, content)
    refused(store, root)


def test_temporary_files_are_not_entries(store, root, sound):
    """bugs C02."""
    place(root, sound)
    for name in (".tmp-1", key_of(1) + ".tmp", "record"):
        (path_of(root, 1).parent / name).write_bytes(sound[:5000])
    assert [info.key for info in store.entries()] == [key_of(1)]
    assert store.take_problems() == []


def test_entry_of_a_later_version_is_a_miss_that_says_so(store, root, sound):
    later = bytearray(sound)
    later[8] = 2
    place(root, bytes(later))
    assert "format version at offset 8: expected 1, found 2" in refused(store, root)


def test_a_second_store_object_sees_the_same(store, root, sound):
    place(root, sound[:100])
    other = _core.Store(str(root))
    assert store.get("neff", key_of(1)) is None
    assert other.get("neff", key_of(1)) is None
    assert (store.counters()["corrupt"], other.counters()["corrupt"]) == (1, 0)
