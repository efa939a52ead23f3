"""Children of a process with threads, an open store, live maps and a live lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.scale import scaled
from tests.store.places import key_of
from tests.store.processes import IN_REPOSITORY, finish, forked, start
from vllm_neuron import _core

#: Mapped, not copied.
CONTENT = b"parent" * 20_000
THREADS = 8


def open_locks() -> list[Path]:
    """Return the lock files that this process has open."""
    links = descriptors()
    # The listing's own descriptor is gone by the time that it is read.
    files = [link.readlink() for link in links if link.is_symlink()]
    return [file for file in files if "locks" in file.parts and len(file.name) == 64]


def descriptors() -> list[Path]:
    """Return the links of what this process has open, the listing's own descriptor included."""
    return sorted(Path("/proc/self/fd").iterdir())


@contextmanager
def busy_parent(store: _core.Store) -> Iterator[tuple[_core.Entry, _core.KeyLock]]:
    """Hold an entry and the lock of key 9 while threads look up, publish, lock and list."""
    store.put("neff", key_of(1), {"neff": CONTENT})
    entry, lock = store.get("neff", key_of(1)), store.lock(key_of(9))
    assert lock.acquire(0)
    stop = threading.Event()

    def use(number: int) -> None:
        while not stop.is_set():
            store.get("neff", key_of(1))
            store.put("neff", key_of(2), {"neff": b"thread"})
            with store.lock(key_of(100 + number)):
                store.entries()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield entry, lock
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    lock.release()


def test_forked_children_of_a_busy_parent_use_its_store(store):
    """None of them waits for a lock that a thread of the parent had."""
    with busy_parent(store) as (entry, lock):

        def child() -> None:
            assert entry.section("neff") == CONTENT
            assert store.get("neff", key_of(1)).section("neff") == CONTENT
            store.put("neff", key_of(3), {"neff": b"child"})
            assert not lock.held
            assert store.lock(key_of(9)).acquire(0) is False
            with store.lock(key_of(10)):
                store.evict(max_age_s=1e6)
            store.take_problems()

        for _ in range(scaled(50)):
            forked(child)
        assert lock.held
    assert bytes(store.get("neff", key_of(3)).section("neff")) == b"child"


def test_programs_started_by_a_busy_parent_see_its_store(store, root):
    """A spawned worker inherits nothing but what is on the disk."""
    code = """
from tests.store.test_fork import open_locks
store = _core.Store(sys.argv[1])
assert store.get("neff", sys.argv[2]).section("neff") == b"parent" * 20_000
assert store.lock(sys.argv[3]).acquire(0) is False
print(open_locks())
"""
    with busy_parent(store) as (_, lock):
        children = [
            start(code, root, key_of(1), key_of(9), close_fds=False, **IN_REPOSITORY)
            for _ in range(scaled(5))
        ]
        assert [finish(child) for child in children] == ["[]\n"] * scaled(5)
        assert lock.held


def test_forks_leave_no_descriptor(store):
    store.put("neff", key_of(1), {"neff": CONTENT})
    entry, lock = store.get("neff", key_of(1)), store.lock(key_of(1))
    assert lock.acquire(0)
    before = descriptors()
    assert len(open_locks()) == 1

    def child() -> None:
        assert open_locks() == []
        # Not equal: libraries that other tests loaded close some of theirs in a child.
        assert len(descriptors()) <= len(before)
        assert entry.section("neff")[:6] == b"parent"

    for _ in range(20):
        forked(child)
    assert descriptors() == before
    assert len(open_locks()) == 1
    lock.release()
