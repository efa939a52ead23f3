"""The entry store beside other stores: hit, miss, durable put, and many entries."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benches.compare.layouts import REFERENCES, Floor, Inductor, Layout
from benches.compare.timing import Operation, Row, at_most, faster, interleaved, within
from vllm_neuron import _core

SMALL, LARGE = 4096, 64 << 20
#: How many times as long the references may take for 4 KiB: hit, miss. None is no goal.
SMALL_GOALS: dict[str, tuple[float | None, float | None]] = {
    "inductor's layout": (2, 2),
    "libneuronxla's layout": (4, 7),
}


def _key(number: int) -> str:
    return _core.digest(number.to_bytes(8, "little"))


class Ours:
    """This store, with the interface of the others."""

    def __init__(self, folder: Path) -> None:
        self.store = _core.Store(str(folder))

    def put(self, key: str, value: bytes) -> None:
        self.store.put("neff", key, {"neff": value})

    def get(self, key: str) -> object:
        return self.store.get("neff", key)


def _stores(folder: Path) -> dict[str, Layout]:
    stores = {
        name: made(folder / f"{index}") for index, (name, made) in enumerate(REFERENCES.items())
    }
    return {**stores, "floor": Floor(folder / "floor"), "ours": Ours(folder / "ours")}


def _gets(stores: dict[str, Layout], key: str) -> dict[str, Operation]:
    return {name: partial(store.get, key) for name, store in stores.items()}


def small(folder: Path) -> Iterator[Row]:
    """Entries of 4 KiB."""
    stores = _stores(folder / "small")
    value = os.urandom(SMALL)
    for store, number in itertools.product(stores.values(), range(50)):
        store.put(_key(number), value)
    hits = interleaved(_gets(stores, _key(7)), rounds=200, calls=10)
    misses = interleaved(_gets(stores, _key(1000)), rounds=200, calls=10)
    for name in REFERENCES:
        hit_goal, miss_goal = SMALL_GOALS.get(name, (None, None))
        yield faster("hit, 4 KiB", name, hits["ours"], hits[name], hit_goal)
        yield faster("miss", name, misses["ours"], misses[name], miss_goal)
    yield at_most("hit, 4 KiB", hits["ours"], 12e-6)
    yield at_most("miss", misses["ours"], 3e-6)
    store, key = _core.Store(str(folder / "small" / "ours")), _key(7)
    held = store.get("neff", key)
    repeated = interleaved({"ours": lambda: store.get("neff", key)}, rounds=200, calls=100)
    assert held is not None
    yield at_most("hit on what the process holds", repeated["ours"], 0.5e-6)


def large(folder: Path) -> Iterator[Row]:
    """Entries of 64 MiB: mapped, mapped and checked."""
    inductor, floor, ours = (
        Inductor(folder / "large"),
        Floor(folder / "floor"),
        Ours(folder / "ours"),
    )
    value = os.urandom(1 << 20) * (LARGE >> 20)
    for store in (inductor, floor, ours):
        store.put(_key(0), value)
    operations: dict[str, Operation] = {
        "inductor": partial(inductor.get, _key(0)),
        "checked": partial(ours.get, _key(0)),
    }
    taken = interleaved(operations, rounds=15)
    # Apart from those that sweep the caches of the processor.
    operations = {
        "floor": partial(floor.get, _key(0)),
        "mapped": lambda: ours.store.get("neff", _key(0), verify=[]),
    }
    taken |= interleaved(operations, rounds=50, calls=10)
    name = "inductor's layout"
    yield faster("hit, 64 MiB, mapped", name, taken["mapped"], taken["inductor"], 1000)
    yield faster("hit, 64 MiB, checked", name, taken["checked"], taken["inductor"], 5)
    yield within("hit, 64 MiB, mapped", "open and mmap alone", taken["mapped"], taken["floor"], 1.5)


def put(folder: Path) -> Iterator[Row]:
    """Durable publication."""
    yield from _put(folder, SMALL, "4 KiB", rounds=30)
    yield from _put(folder, LARGE, "64 MiB", rounds=5)


def _put(folder: Path, size: int, name: str, *, rounds: int) -> Iterator[Row]:
    value = os.urandom(min(size, 1 << 20)) * max(1, size >> 20)
    stores: dict[str, Layout] = {
        "floor": Floor(folder / f"floor{size}"),
        "ours": Ours(folder / f"ours{size}"),
        "inductor": Inductor(folder / f"inductor{size}", is_synced=True),
    }
    # One directory for all: each new one costs a synchronisation of its own, once per process.
    keys = (key for key in map(_key, itertools.count()) if key.startswith("7f"))
    operations: dict[str, Operation] = {
        name: lambda store=store: store.put(next(keys), value) for name, store in stores.items()
    }
    taken = interleaved(operations, rounds=rounds)
    what = "write, fdatasync, rename, fsync"
    yield within(f"durable put, {name}", what, taken["ours"], taken["floor"], 1.15)
    synced = "inductor's layout with fsync"
    yield faster(f"durable put, {name}", synced, taken["ours"], taken["inductor"], None)


def many(folder: Path, *, count: int) -> Iterator[Row]:
    """Hit and miss among many entries, and a pass of eviction over them.

    The other entries are empty files: what grows with them is the directory.
    """
    few, full = Ours(folder / "few"), Ours(folder / "many")
    for store, entries in ((few, 1000), (full, count)):
        store.put(_key(0), bytes(SMALL))
        root = Path(store.store.root) / "v1"
        for prefix in range(256):
            (root / f"{prefix:02x}").mkdir(mode=0o700, exist_ok=True)
        for number in range(1, entries):
            key = _key(number)
            descriptor = os.open(f"{root}/{key[:2]}/{key}", os.O_CREAT | os.O_WRONLY, 0o400)
            os.close(descriptor)
    for what, key in (("hit", _key(0)), ("miss", _key(1 << 40))):
        taken = interleaved(
            {"few": partial(few.get, key), "many": partial(full.get, key)},
            rounds=300,
            calls=10,
        )
        row = f"{what} among {count:,} entries"
        yield within(row, "the same among 1,000", taken["many"], taken["few"], 1.5)
    passes = []
    for store in (few, full):
        start = time.perf_counter()
        eviction = store.store.evict(max_size_bytes=1 << 40, dry_run=True)
        passes.append((time.perf_counter() - start) / eviction.kept)
    yield within(
        f"eviction pass, per entry of {count:,}", "per entry of 1,000", passes[1], passes[0], 2
    )
