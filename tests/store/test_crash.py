"""Writers killed at any time: nothing torn, nothing acknowledged lost, no stuck lock, no litter."""

from __future__ import annotations

import os
import random
import time

from tests.scale import scaled
from tests.store.places import files_below, key_of, lock_of, path_of
from tests.store.processes import IN_REPOSITORY, finish, start
from vllm_neuron import _core

#: Keys in play; few, so that writers meet. Every eighth has a large value.
KEYS = 40
#: Keys that nobody is told of: they are published as long unused, and evicted.
UNUSED_FROM, UNUSED_TO = 1000, 1010
#: Kills in all, over the two harness processes.
KILLS = scaled(200)

#: Forks writers and kills them at random times. Each writer locks a key, publishes it and, when
#: that is acknowledged, writes the key's number to the file argv[2]; or it publishes an entry as
#: one that nobody has used for long, or evicts those.
HARNESS = """
import random, signal
from pathlib import Path
from tests.store.places import key_of, path_of
from tests.store.test_crash import KEYS, UNUSED_FROM, UNUSED_TO, content_of
root, acknowledged, seed, kills = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
rng = random.Random(seed)
log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def write(seed):
    rng, store = random.Random(seed), _core.Store(root)
    while True:
        choice = rng.random()
        if choice < 0.1:
            store.evict(max_age_s=1000)
            continue
        if choice < 0.3:
            number = rng.randrange(UNUSED_FROM, UNUSED_TO)
            store.put("neff", key_of(number), {"neff": b"unused"})
            try:
                os.utime(path_of(Path(root), number), (1, 1))
            except FileNotFoundError:
                pass
            continue
        number = rng.randrange(KEYS)
        key = key_of(number)
        lock = store.lock(key, note="crash test")
        if not lock.acquire(0.01):
            continue
        if rng.random() < 0.3:
            store.remove("neff", key)
            os.write(log, b"-%d\\n" % number)
        elif store.put("neff", key, {"record": key.encode(), "neff": content_of(number)}):
            os.write(log, b"+%d\\n" % number)
        lock.release()

for kill in range(kills):
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            write(rng.randrange(1 << 30) ^ os.getpid())
        pids.append(pid)
    for pid in pids:
        time.sleep(rng.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
print("done")
"""


def content_of(number: int) -> bytes:
    """Return what the harness publishes under a key with a number: 16 MiB, or less than 2."""
    key = bytes.fromhex(key_of(number))
    size = 16 << 20 if number % 8 == 0 else 32 + 32 * (number * 7919 % 60_000)
    return key * (size // 32)


def test_old_leftovers_are_swept_and_young_ones_are_not(root):
    """Named temporary files of dead writers, where the file system has no unnamed ones."""
    _core.Store(str(root)).put("neff", key_of(1), {"neff": b"1"})
    day_s = 24 * 3600
    kept, swept = [], []
    for folder, age_s, paths in [
        ("tmp", 0.9 * day_s, kept),
        ("tmp", 1.1 * day_s, swept),
        ("tmp", -day_s, kept),
        ("aside", 6.9 * day_s, kept),
        ("aside", 7.1 * day_s, swept),
    ]:
        path = root / "v1" / folder / f"{age_s}"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"left")
        changed_s = time.time() - age_s
        os.utime(path, (changed_s, changed_s))
        paths.append(path)
    store = _core.Store(str(root))
    assert store.get("neff", key_of(1)) is not None
    assert files_below(root / "v1" / "tmp") != []
    assert all(path.exists() for path in swept)
    store.put("neff", key_of(2), {"neff": b"2"})
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in swept)


def test_killed_writers_leave_nothing_but_sound_entries(store, root, tmp_path):
    """bugs C01, C10, C11."""
    acknowledged = tmp_path / "acknowledged"
    per_harness = KILLS // 4  # two writers are killed per round, in two harnesses
    harnesses = [
        start(HARNESS, root, acknowledged, seed, per_harness, **IN_REPOSITORY) for seed in (1, 2)
    ]
    rng, reads = random.Random(3), 0
    while any(harness.poll() is None for harness in harnesses):
        number = rng.randrange(KEYS)
        entry = store.get("neff", key_of(number))
        if entry is not None:
            assert entry.section("neff") == content_of(number)
            assert bytes(entry.section("record")) == key_of(number).encode()
            reads += 1
    assert [finish(harness) for harness in harnesses] == ["done\n"] * 2

    assert reads > 20
    assert store.take_problems() == []
    assert store.counters()["corrupt"] == 0
    # The last acknowledged word on a key holds, unless a later writer died before its own word.
    words = dict.fromkeys(range(KEYS))
    lines = acknowledged.read_text().split()
    for line in lines:
        words[int(line[1:])] = line[0]
    assert len(lines) > KILLS // 2
    for number, word in words.items():
        assert path_of(root, number).exists() or word != "+" or was_removed_last(root, number)
    for number in range(KEYS):
        assert store.lock(key_of(number)).acquire(0) is True
        assert not lock_of(root, number).exists()
    numbers = [*range(KEYS), *range(UNUSED_FROM, UNUSED_TO)]
    entries = {path_of(root, number) for number in numbers}
    assert set(files_below(root)) <= entries


def was_removed_last(root, number: int) -> bool:
    """Whether the last writer of a key was killed between removing it and saying so.

    Its lock file tells: a writer that ends well takes it away.
    """
    return lock_of(root, number).exists()
