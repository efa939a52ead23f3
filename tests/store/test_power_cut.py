"""Power cuts: replayed from the calls of a publication, and real ones on a loop device."""

from __future__ import annotations

import os
import platform
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scale import scaled
from tests.store.places import key_of
from tests.store.processes import start
from tests.store.tracing import Call, trace
from vllm_neuron import _core

#: How often the power is cut, and how many crash states are looked at.
CUTS, STATES = scaled(16), scaled(10_000)
PAGE = 4096
SECTIONS = {"record": b"{}", "neff": bytes(range(256)) * 40}

needs_tracer = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="the tracer knows the system calls of Linux on x86-64",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change that a crash may or may not have kept.

    Attributes:
        at: number of the call that made it.
        kind: `data`, `directory` or `name`.
        place: for data the file's number, else the path.
        file: for a name the number of the file that it is given to.
        certain_at: number of the call that made it durable; None if none did.
    """

    at: int
    kind: str
    place: str | int
    file: int | None
    certain_at: int | None


def changes(calls: list[Call], *, without: str | None = None) -> list[Change]:
    """Return the changes of a trace; `without` leaves out a kind of synchronisation."""
    paths: dict[int, str] = {}
    open_files: dict[int, int] = {}
    found: list[tuple[int, str, str | int, int | None, str | int]] = []
    syncs: list[tuple[int, str | int]] = []
    for number, call in enumerate(calls):
        first = call.arguments[0] & 0xFFFFFFFF
        parent = paths.get(first, "")
        match call.name:
            case "openat" if call.result is not None and call.result >= 0:
                path = str(Path(parent, call.paths[0]))
                paths[call.result], open_files[call.result] = path, number
            case "pwrite64":
                offset, length = call.arguments[3], call.arguments[2]
                for _ in range(offset // PAGE, -(-(offset + length) // PAGE)):
                    file = open_files[first]
                    found.append((number, "data", file, None, file))
            case "mkdirat" if call.result == 0:
                path = str(Path(parent, call.paths[0]))
                found.append((number, "directory", path, None, parent))
            case "linkat" if call.result == 0:
                folder = paths[call.arguments[2] & 0xFFFFFFFF]
                path = str(Path(folder, call.paths[1]))
                found.append((number, "name", path, open_files[first], folder))
            case "fdatasync" | "fsync" if call.result == 0 and call.name != without:
                syncs += [(number, paths[first]), (number, open_files[first])]
    certain = lambda at, what: next((n for n, synced in syncs if n > at and synced == what), None)  # noqa: E731
    return [Change(at, kind, place, file, certain(at, by)) for at, kind, place, file, by in found]


def crash_states(made: list[Change], calls: int, count: int) -> Iterator[tuple[int, list[Change]]]:
    """Yield when the power goes, and which changes are there afterwards, at random."""
    generator = random.Random(20261130)
    for _ in range(count):
        crash = generator.randrange(calls + 1)
        likely = generator.random()
        yield (
            crash,
            [
                change
                for change in made
                if change.at < crash
                and (
                    (change.certain_at is not None and change.certain_at < crash)
                    or generator.random() < likely
                )
            ],
        )


def torn(made: list[Change], kept: list[Change]) -> bool:
    """Tell whether a name shows a file whose data is not all there."""
    named = {change.file for change in kept if change.kind == "name"}
    lost = set(made) - set(kept)
    return any(change.kind == "data" and change.place in named for change in lost)


def published(kept: list[Change], directories: set[str], path: str) -> bool:
    """Tell whether the entry can be found: its name and each directory above it."""
    there = {change.place for change in kept if change.kind == "directory"}
    names = {change.place for change in kept if change.kind == "name"}
    above = {str(parent) for parent in Path(path).parents} & directories
    return path in names and above <= there


@needs_tracer
def test_replayed_power_cuts_show_all_or_nothing(tmp_path):
    root = tmp_path / "above" / "store"
    outcome = trace(lambda: _core.Store(str(root)).put("neff", key_of(1), SECTIONS))
    assert outcome.status == 0
    calls = outcome.calls
    entry = str(root / "v1" / key_of(1)[:2] / key_of(1))

    def judge(made: list[Change]) -> tuple[int, int]:
        directories = {str(c.place) for c in made if c.kind == "directory"}
        assert directories == {
            str(root.parent),
            str(root),
            str(root / "v1"),
            str(Path(entry).parent),
        }
        states = list(crash_states(made, len(calls), STATES))
        bad = sum(torn(made, kept) for _, kept in states)
        done = [kept for crash, kept in states if crash == len(calls)]
        assert len(done) > STATES // len(calls) // 4
        lost = sum(not published(kept, directories, entry) for kept in done)
        return bad, lost

    assert len({change.at for change in changes(calls) if change.kind == "data"}) > 1
    assert judge(changes(calls)) == (0, 0)
    # The same states without one of the synchronisations are bad: the test can tell.
    bad, _ = judge(changes(calls, without="fdatasync"))
    _, lost = judge(changes(calls, without="fsync"))
    assert bad > STATES // 100
    assert lost > 0


_OURS = """
store, number = _core.Store(sys.argv[1] + "/store"), 0
while True:
    key = f"{number:064x}"
    store.put("neff", key, {"neff": key.encode() * 200})
    print(key, flush=True)
    number += 1
"""
_UNSYNCED = """
folder, number = sys.argv[1], 0
while True:
    key = f"{number:064x}"
    with open(f"{folder}/.tmp", "wb") as file:
        file.write(key.encode() * 200)
    os.rename(f"{folder}/.tmp", f"{folder}/{key}")
    print(key, flush=True)
    number += 1
    time.sleep(0.002)
"""


@contextmanager
def mounted_image(image: Path, at: Path) -> Iterator[None]:
    """Mount an image of ext4 that writes its journal each second."""
    at.mkdir(exist_ok=True, mode=0o700)
    subprocess.run(["mount", "-o", "loop,commit=1", image, at], check=True)
    try:
        at.chmod(0o700)
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def cuts(tmp_path: Path, code: str, seconds: Iterable[float]) -> Iterator[list[str]]:
    """Run a writer on a fresh file system and cut the power now and then, after so many seconds.

    Each time the file system as it was is mounted at `after`; yields what had been acknowledged.
    """
    image, copy, log = tmp_path / "image", tmp_path / "copy", tmp_path / "log"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    with mounted_image(image, tmp_path / "disk"), log.open("w") as out:
        writer = start(code, tmp_path / "disk", stdout=out)
        try:
            for pause_s in seconds:
                time.sleep(pause_s)
                writer.send_signal(signal.SIGSTOP)
                # What is in the log now was acknowledged before; what reached the device is in
                # the copy.
                acknowledged = log.read_text().split("\n")[:-1]
                subprocess.run(["cp", "--sparse=always", image, copy], check=True)
                writer.send_signal(signal.SIGCONT)
                with mounted_image(copy, tmp_path / "after"):
                    yield acknowledged
        finally:
            writer.kill()
            writer.wait(60)


needs_loop = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("mkfs.ext4") is None
    or not Path("/dev/loop-control").exists(),
    reason="cutting the power of a loop device needs root and mkfs.ext4",
)


def check_published(root: Path, acknowledged: list[str]) -> None:
    """Check that all that was acknowledged is there, and that all that is there is sound."""
    store = _core.Store(str(root))
    for key in acknowledged:
        entry = store.get("neff", key)
        assert entry is not None, f"{key} was acknowledged"
        assert bytes(entry.section("neff")) == key.encode() * 200
        del entry
    for info in store.entries():
        assert store.get("neff", info.key) is not None
    assert store.counters()["corrupt"] == 0
    assert store.take_problems() == []


@needs_loop
def test_power_cuts_lose_nothing_that_was_published(tmp_path):
    generator, left = random.Random(1), CUTS
    while left > 0:
        count = min(left, 16)
        # The journal is written each second: some cuts are before, some after, some within.
        pauses = [1.0] + [generator.uniform(0.05, 0.6) for _ in range(count - 1)]
        counts = []
        for acknowledged in cuts(tmp_path, _OURS, pauses):
            check_published(tmp_path / "after" / "store", acknowledged)
            counts.append(len(acknowledged))
        assert len(counts) == count
        assert counts[-1] > 2 * count
        left -= count


@needs_loop
def test_power_cuts_break_files_that_are_renamed_without_synchronisation(tmp_path):
    """The control: the way of torch's, JAX's and ccache's caches; else the test above is blind."""
    for _ in cuts(tmp_path, _UNSYNCED, [2.2] * 10):
        files = [path for path in (tmp_path / "after").iterdir() if len(path.name) == 64]
        if any(path.read_bytes() != path.name.encode() * 200 for path in files):
            return
    raise AssertionError("no cut has shown the loss")
