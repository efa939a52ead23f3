"""Eviction: what was used longest ago goes, readers keep what they hold, nothing else happens."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from tests.scale import SCALE, scaled
from tests.store.places import files_below, key_of, lock_of, path_of
from tests.store.processes import finish, start
from tests.store.test_limits import mounted, needs_root
from vllm_neuron import _core

PAGE = 4096
YEAR_S = 365 * 24 * 3600
#: A header page and one page of content.
ENTRY_BYTES = 2 * PAGE


def publish(store, root, ages_s):
    """Publish one entry per age; each was last used that many seconds ago."""
    for number, age_s in enumerate(ages_s):
        assert store.put("neff", key_of(number), {"neff": bytes([number]) * 100})
        set_age(root, number, age_s)


def set_age(root, number, age_s):
    at = time.time() - age_s
    os.utime(path_of(root, number), (at, at))


def numbers(eviction):
    keys = {key_of(number): number for number in range(100)}
    return [keys[entry.key] for entry in eviction.removed]


def left(root):
    return [number for number in range(100) if path_of(root, number).exists()]


def test_entries_used_longest_ago_go_first(store, root):
    publish(store, root, [500, 900, 100, 700, 300])
    eviction = store.evict(max_size_bytes=3 * ENTRY_BYTES, min_age_s=0)
    assert sorted(numbers(eviction)) == [1, 3]
    assert (eviction.removed_bytes, eviction.kept) == (2 * ENTRY_BYTES, 3)
    assert eviction.kept_bytes == 3 * ENTRY_BYTES
    assert left(root) == [0, 2, 4]
    by_number = dict(zip(numbers(eviction), eviction.removed, strict=True))
    assert by_number[1].path == str(path_of(root, 1))
    assert by_number[1].size_bytes == ENTRY_BYTES
    assert by_number[1].last_used_s == pytest.approx(time.time() - 900, abs=30)
    assert store.counters()["evicted"] == 2
    assert repr(eviction).startswith("Eviction(removed=2, removed_bytes=16384, kept=3")
    assert store.evict(max_size_bytes=3 * ENTRY_BYTES, min_age_s=0).removed == []
    assert store.get("neff", key_of(0)) is not None
    assert store.get("neff", key_of(1)) is None


def test_as_few_as_needed_go(store, root):
    publish(store, root, [500, 400, 300])
    assert numbers(store.evict(max_size_bytes=3 * ENTRY_BYTES - 1, min_age_s=0)) == [0]
    assert numbers(store.evict(max_size_bytes=0, min_age_s=0)) in ([1, 2], [2, 1])
    assert files_below(root) == []


def test_entries_that_were_not_used_for_long_go(store, root):
    publish(store, root, [500, 900, 100])
    assert numbers(store.evict(max_age_s=600)) == [1]
    assert store.evict().removed == []
    assert left(root) == [0, 2]


def test_young_entries_stay_whatever_the_limits_are(store, root):
    publish(store, root, [500, 0])
    eviction = store.evict(max_size_bytes=0)
    assert (numbers(eviction), eviction.kept, eviction.kept_bytes) == ([0], 1, ENTRY_BYTES)


def test_dry_run_removes_nothing(store, root):
    publish(store, root, [500, 900])
    eviction = store.evict(max_size_bytes=ENTRY_BYTES, dry_run=True)
    assert (numbers(eviction), eviction.kept) == ([1], 1)
    assert left(root) == [0, 1]
    assert store.counters()["evicted"] == 0


def test_a_hit_is_a_use_and_a_listing_is_none(store, root):
    publish(store, root, [90_000, 80_000, 70_000])
    before = {info.key: info.last_used_s for info in store.entries()}
    assert before[key_of(0)] == pytest.approx(time.time() - 90_000, abs=30)
    assert {info.key: info.last_used_s for info in store.entries()} == before
    modified = path_of(root, 0).stat().st_mtime_ns
    assert store.get("neff", key_of(0)) is not None
    after = {info.key: info.last_used_s for info in store.entries()}
    assert after[key_of(0)] == pytest.approx(time.time(), abs=30)
    assert path_of(root, 0).stat().st_mtime_ns == modified
    assert numbers(store.evict(max_size_bytes=ENTRY_BYTES)) in ([1, 2], [2, 1])


@pytest.mark.parametrize(("age_s", "is_noted"), [(3000, False), (4000, True)])
def test_a_use_is_noted_at_most_once_an_hour(store, root, age_s, is_noted):
    publish(store, root, [age_s])
    # The kernel's own note of an access leaves the change time alone.
    changed = path_of(root, 0).stat().st_ctime_ns
    time.sleep(0.02)
    assert store.get("neff", key_of(0)) is not None
    assert (path_of(root, 0).stat().st_ctime_ns > changed) == is_noted


def test_publishing_again_is_a_use(store, root):
    publish(store, root, [900, 500])
    assert not store.put("neff", key_of(0), {"neff": b""})
    assert numbers(store.evict(max_size_bytes=ENTRY_BYTES)) == [1]


def test_times_in_the_future_count_as_now_and_are_set_right_by_a_hit(store, root):
    publish(store, root, [900, -1_000_000])
    assert numbers(store.evict(max_age_s=600)) == [0]
    path = path_of(root, 1)
    os.utime(path, (time.time() + 1_000_000, time.time() - 100_000))
    assert store.get("neff", key_of(1)) is not None
    assert path.stat().st_atime == pytest.approx(time.time(), abs=30)


@needs_root
@pytest.mark.parametrize("option", ["noatime", "relatime", "strictatime"])
def test_uses_are_known_whatever_the_mount_notes(tmp_path, option):
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted("-t", "tmpfs", "-o", f"{option},mode=0700", "tmpfs", at=disk):
        store = _core.Store(str(disk / "store"))
        publish(store, disk / "store", [90_000, 80_000, 70_000])
        assert store.get("neff", key_of(0)) is not None
        assert sorted(numbers(store.evict(max_size_bytes=ENTRY_BYTES))) == [1, 2]


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, -3600, 3600, 10 * YEAR_S])
def test_clocks_that_jump_evict_nothing_that_was_just_used(store, root, jump_s):
    """What was written and used before the jump is seen from after it."""
    publish(store, root, [jump_s] * 3)
    assert store.get("neff", key_of(0)) is not None
    store.evict(max_age_s=3000)
    # An hour and more ago by the clock: the others may go. They never go before those in use.
    assert left(root) == ([0] if jump_s > 0 else [0, 1, 2])
    assert store.put("neff", key_of(3), {"neff": b"new"})
    store.evict(max_size_bytes=0)
    assert path_of(root, 3).exists()
    assert path_of(root, 0).exists()


def test_what_is_held_stays_readable(store, root):
    publish(store, root, [900])
    entry = store.get("neff", key_of(0))
    section = entry.section("neff")
    assert numbers(store.evict(max_size_bytes=0, min_age_s=0)) == [0]
    assert store.put("neff", key_of(0), {"neff": b"other"})
    assert bytes(section) == bytes(entry.section("neff")) == bytes(100)
    assert bytes(store.get("neff", key_of(0)).section("neff")) == b"other"


def test_maps_outlive_all_that_happens_to_the_file(store, root):
    """Evicted, unlinked, replaced by a file of another length, damaged and set aside."""

    def replace(path):
        other = path.with_name("other")
        other.write_bytes(b"short")
        other.rename(path)

    def damage(path):
        replace(path)
        assert _core.Store(str(root)).get("neff", key_of(0)) is None

    happenings = [
        lambda path: store.evict(max_size_bytes=0, min_age_s=0),
        lambda path: store.remove("neff", key_of(0)),
        lambda path: path.unlink(),
        replace,
        damage,
        lambda path: shutil.rmtree(root / "v1"),
    ]
    held = []
    for number in range(scaled(200)):
        content = bytes([number % 251]) * (70_000 + number)
        assert store.put("neff", key_of(0), {"neff": content})
        held = [
            *held[-8:],
            (content, _core.Store(str(root)).get("neff", key_of(0)).section("neff")),
        ]
        happenings[number % len(happenings)](path_of(root, 0))
        assert all(view == content for content, view in held)
    assert store.counters()["errors"] == 0


def test_other_files_are_left(store, root):
    publish(store, root, [900])
    other = path_of(root, 0).with_name("notes.txt")
    other.write_text("mine")
    misplaced = root / "v1" / "zz"
    misplaced.mkdir()
    (misplaced / key_of(0)).write_text("mine")
    directory = path_of(root, 1)
    directory.mkdir(parents=True)
    store.evict(max_size_bytes=0, max_age_s=0, min_age_s=0)
    assert left(root) == [1]
    assert other.exists()
    assert (misplaced / key_of(0)).exists()


def test_nothing_there_is_nothing_done(store, root):
    assert (store.evict(max_size_bytes=0).removed, root.exists()) == ([], False)


@pytest.mark.parametrize("limit", ["max_age_s", "min_age_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_times_must_be_spans(store, limit, value):
    with pytest.raises(ValueError, match=f"{limit}: expected seconds, found"):
        store.evict(**{limit: value})


_KILLED = """
lock = _core.Store(sys.argv[1]).lock(sys.argv[2])
assert lock.acquire(5)
os.kill(os.getpid(), 9)
"""


def test_old_lock_files_of_killed_holders_go(store, root):
    for number in (0, 1):
        killed = start(_KILLED, root, key_of(number))
        killed.wait(60)
    held = store.lock(key_of(2))
    assert held.acquire(5)
    for number in (0, 2):
        os.utime(lock_of(root, number), (1, 1))
    store.evict()
    assert [lock_of(root, number).exists() for number in range(3)] == [False, True, True]
    assert held.held
    held.release()


_WORK = """
import random
root, seed, until = sys.argv[1], int(sys.argv[2]), time.time() + float(sys.argv[3])
store, random = _core.Store(root), random.Random(seed)
content = lambda number: number.to_bytes(8, "little") * random.randrange(1, 4000)
key = lambda number: f"{number:064x}"
done = {"put": 0, "hit": 0, "miss": 0, "evicted": 0}
held = []
descriptors = lambda: len(os.listdir("/proc/self/fd"))
def memory_mb():
    # Its own: without the pages of files.
    _, resident, shared, *_ = map(int, open("/proc/self/statm").read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 1e6
rounds = 0
store.put("neff", key(99), {"neff": b"opens the directory"})
baseline = descriptors()
while time.time() < until:
    number = random.randrange(40)
    choice = random.random()
    if choice < 0.3:
        store.put("neff", key(number), {"neff": content(number)})
        done["put"] += 1
    elif choice < 0.95:
        entry = store.get("neff", key(number))
        if entry is None:
            done["miss"] += 1
        else:
            data = entry.section("neff")
            assert data[:8] == number.to_bytes(8, "little") == data[-8:]
            held = held[-20:] + [(number, data)]
            done["hit"] += 1
    else:
        done["evicted"] += len(store.evict(max_size_bytes=200_000, min_age_s=0).removed)
    for kept, data in held:
        assert data[:8] == kept.to_bytes(8, "little") == data[-8:]
    assert descriptors() <= baseline
    rounds += 1
    if rounds == 30:
        start_mb = memory_mb()
assert rounds <= 30 or memory_mb() < start_mb + 8, (memory_mb(), start_mb)
problems = [problem.reason for problem in store.take_problems()]
print(json.dumps({**done, "problems": problems, "counters": store.counters()}))
"""


@pytest.mark.parametrize(("processes", "seconds"), [(64, 12 * SCALE)])
def test_processes_that_read_write_and_evict_at_once(store, root, processes, seconds):
    """bugs D07, D10, E14, H04."""
    children = [start(_WORK, root, seed, seconds) for seed in range(processes)]
    results = [json.loads(finish(child)) for child in children]
    for name in ("put", "hit", "miss", "evicted"):
        assert sum(result[name] for result in results) > 0, name
    assert [result["problems"] for result in results] == [[]] * processes
    for result in results:
        assert result["counters"]["corrupt"] == result["counters"]["errors"] == 0
    store.evict(max_size_bytes=200_000, min_age_s=0)
    assert sum(info.size_bytes for info in store.entries()) <= 200_000
