"""What the process holds is found again without a system call, and only as long as it is held."""

from __future__ import annotations

import gc
import threading

import pytest

from tests.store.places import key_of, path_of
from tests.store.processes import forked
from vllm_neuron import _core
from vllm_neuron.errors import StoreCorruptError

SECTIONS = {"record": b"{}", "neff": b"x" * 100_000}


def test_held_entry_is_found_although_its_file_is_gone(store, root):
    store.put("neff", key_of(1), SECTIONS)
    first = store.get("neff", key_of(1))
    path_of(root, 1).unlink()
    again = store.get("neff", key_of(1))
    assert bytes(again.section("neff")) == SECTIONS["neff"]
    assert store.counters()["hits"] == 2
    # The bytes alone keep it too.
    view = again.section("neff")
    del first, again
    assert store.get("neff", key_of(1)) is not None
    del view
    gc.collect()
    assert store.get("neff", key_of(1)) is None
    assert store.counters()["hits"] == 3


def test_another_kind_or_key_or_store_does_not_find_it(store, root):
    store.put("neff", key_of(1), SECTIONS)
    held = store.get("neff", key_of(1))
    path_of(root, 1).unlink()
    assert store.get("trace", key_of(1)) is None
    assert store.get("neff", key_of(2)) is None
    assert _core.Store(str(root)).get("neff", key_of(1)) is None
    assert held.key == key_of(1)


@pytest.mark.parametrize("removal", ["remove", "evict"])
def test_what_this_store_removes_is_not_found_again(store, removal):
    store.put("neff", key_of(1), SECTIONS)
    held = store.get("neff", key_of(1))
    if removal == "remove":
        assert store.remove("neff", key_of(1))
    else:
        assert len(store.evict(max_size_bytes=0, min_age_s=0).removed) == 1
    assert store.get("neff", key_of(1)) is None
    assert store.put("neff", key_of(1), {"neff": b"better"})
    assert bytes(store.get("neff", key_of(1)).section("neff")) == b"better"
    assert bytes(held.section("neff")) == SECTIONS["neff"]


def test_sections_that_were_not_checked_are_checked_by_the_look_up_that_asks(store, root):
    store.put("neff", key_of(1), SECTIONS)
    path = path_of(root, 1)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"damage")
    held = store.get("neff", key_of(1), verify=["record"])
    assert store.get("neff", key_of(1), verify=["record"]) is not None
    assert store.get("neff", key_of(1)) is None
    assert store.counters()["corrupt"] == 1
    with pytest.raises(StoreCorruptError):
        held.section("neff")


def test_forked_child_looks_up_anew(store, root):
    store.put("neff", key_of(1), SECTIONS)
    held = store.get("neff", key_of(1))
    path_of(root, 1).unlink()

    def child():
        assert store.get("neff", key_of(1)) is None
        assert bytes(held.section("neff")) == SECTIONS["neff"]

    forked(child)
    assert store.get("neff", key_of(1)) is not None


def test_a_forked_child_never_waits_for_the_table(store):
    """Threads keep the table busy while the process forks."""
    for number in range(4):
        store.put("neff", key_of(number), SECTIONS)
    stop = threading.Event()

    def look_up():
        while not stop.is_set():
            for number in range(4):
                assert store.get("neff", key_of(number)) is not None

    threads = [threading.Thread(target=look_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            forked(lambda: store.get("neff", key_of(0)).section("neff")[0])
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_many_entries_are_held_at_once(store):
    for number in range(300):
        store.put("neff", key_of(number), {"neff": b"x"})
        assert store.get("neff", key_of(number)) is not None
    held = [store.get("neff", key_of(number)) for number in range(300)]
    assert all(store.get("neff", key_of(number)) is not None for number in range(300))
    assert len(held) == 300
