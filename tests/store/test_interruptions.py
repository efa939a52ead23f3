"""Killed or failing at every file system call: old or new state, never a wrong one, no litter."""

from __future__ import annotations

import errno
import os
import platform
import signal
import time

import pytest

from tests.store.places import files_below, key_of, path_of
from tests.store.tracing import trace
from vllm_neuron import _core
from vllm_neuron.errors import StoreError

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="the tracer knows the system calls of Linux on x86-64",
)

OLD, NEW, DAMAGED = 1, 2, 3
SECTIONS = {"record": b"{}", "neff": bytes(range(256)) * 40}
ERRORS = (
    errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, errno.EACCES, errno.EINTR, errno.EDQUOT,
)  # fmt: skip


def prepare(root):
    """Make a store of one old entry and one damaged file."""
    store = _core.Store(str(root))
    for number in (OLD, DAMAGED):
        store.put("neff", key_of(number), SECTIONS)
    long_ago = time.time() - 1000
    os.utime(path_of(root, OLD), (long_ago, long_ago))
    path = path_of(root, DAMAGED)
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    path.chmod(0o400)
    return store


def _put(root):
    assert _core.Store(str(root)).put("neff", key_of(NEW), SECTIONS)


def _put_over_damage(root):
    assert _core.Store(str(root)).put("neff", key_of(DAMAGED), SECTIONS)


def _evict(root):
    # The damaged file is younger and stays.
    eviction = _core.Store(str(root)).evict(max_size_bytes=100, min_age_s=0)
    assert [entry.key for entry in eviction.removed] == [key_of(OLD)]


def _lock(root):
    lock = _core.Store(str(root)).lock(key_of(NEW))
    assert lock.acquire(1)
    lock.release()


def _get(root):
    store = _core.Store(str(root))
    assert store.get("neff", key_of(OLD)) is not None
    assert store.get("neff", key_of(DAMAGED)) is None
    assert store.get("neff", key_of(NEW)) is None


ACTIONS = {
    "put": _put, "put over damage": _put_over_damage, "evict": _evict, "lock": _lock, "get": _get,
}  # fmt: skip


def check(root, action):
    """Check the laws that hold whenever a process ends, and that others can go on."""
    store = _core.Store(str(root))
    for number in (OLD, NEW, DAMAGED):
        entry = store.get("neff", key_of(number))
        if entry is None:
            # Nothing but eviction takes a sound entry away.
            assert number != OLD or action == "evict"
        else:
            assert bytes(entry.section("neff")) == SECTIONS["neff"]
        del entry
    lock = store.lock(key_of(NEW))
    assert lock.acquire(0), "the lock of a dead process is stuck"
    lock.release()
    for number in (OLD, NEW, DAMAGED):
        store.put("neff", key_of(number), SECTIONS)
        assert store.get("neff", key_of(number)) is not None
    entries = {path_of(root, number) for number in (OLD, NEW, DAMAGED)}
    litter = [path for path in files_below(root) if path not in entries]
    assert [path for path in litter if path.parent.name != "aside"] == []


@pytest.mark.parametrize("action", ACTIONS)
def test_killed_at_every_call(tmp_path, action):
    prepare(tmp_path / "whole")
    whole = trace(lambda: ACTIONS[action](tmp_path / "whole"))
    assert whole.status == 0
    assert len(whole.calls) > 5
    check(tmp_path / "whole", action)
    for number in range(len(whole.calls)):
        root = tmp_path / str(number)
        prepare(root)
        outcome = trace(lambda root=root: ACTIONS[action](root), kill_at=number)
        assert outcome.status == -signal.SIGKILL, outcome.calls[-1]
        check(root, action)


@pytest.mark.parametrize("action", ACTIONS)
def test_every_call_fails(tmp_path, action):
    prepare(tmp_path / "whole")
    count = len(trace(lambda: ACTIONS[action](tmp_path / "whole")).calls)
    for number in range(count):
        # Each call meets two of the errors; over the calls all of them come up.
        for code in (ERRORS[number % len(ERRORS)], ERRORS[(number + 3) % len(ERRORS)]):
            root = tmp_path / f"{number}-{code}"
            prepare(root)

            def act(root=root):
                store = _core.Store(str(root))
                if action == "get":
                    # A look-up is a hit or a miss, whatever fails.
                    for key in (OLD, NEW, DAMAGED):
                        store.get("neff", key_of(key))
                    counters = store.counters()
                    assert counters["hits"] + counters["misses"] == 3
                    return
                try:
                    ACTIONS[action](root)
                except (OSError, StoreError):
                    pass
                except AssertionError:
                    # An eviction that could not remove says so among the problems.
                    assert action in ("evict", "lock")

            outcome = trace(act, fail_at=(number, code))
            assert outcome.status == 0, outcome.calls[-3:]
            check(root, action)


def test_short_writes_are_continued(tmp_path):
    root = tmp_path / "store"
    prepare(root)
    outcome = trace(lambda: _put(root), short_writes=True)
    assert outcome.status == 0
    writes = [call for call in outcome.calls if call.name == "pwrite64"]
    assert len(writes) > 20
    assert (
        bytes(_core.Store(str(root)).get("neff", key_of(NEW)).section("neff")) == SECTIONS["neff"]
    )
