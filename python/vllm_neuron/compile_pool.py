"""The pool that lowers and compiles: how wide, in what order, and what is said meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MOST_WORKERS",
    "Progress",
    "Work",
    "default_workers",
    "fitting_workers",
    "run_largest_first",
]

#: Memory to have free for each compiler that runs at the same time (spec CM-20).
MEMORY_PER_WORKER = 8 << 30
#: The most compilers at a time without being asked for more (spec CM-20).
MOST_WORKERS = 8
#: While graphs are being compiled, one line at least this often says how far it is (spec OB-3).
PROGRESS_INTERVAL_S = 30.0
#: How often the bar on a terminal is drawn.
BAR_INTERVAL_S = 0.5
BAR_CELLS = 24

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def default_workers(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Return how many compilers may run at a time; see `fitting_workers`."""
    return fitting_workers(MEMORY_PER_WORKER, most=MOST_WORKERS, cgroup=cgroup, meminfo=meminfo)


def fitting_workers(
    memory_per_worker: int, *, most: int, cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO
) -> int:
    """Return how many may work at a time: what cores and available memory allow, at least 1.

    Args:
        memory_per_worker: bytes that each may need.
        most: the most that it may be.
        cgroup: the control group of this process (cgroup v2; its limits count when it has any).
        meminfo: the system's memory (proc(5)).
    """
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, int(quota) / int(period))
    # What the page cache holds of files can be had: weights that were just read are no shortage.
    available = _field(meminfo, "MemAvailable:") << 10
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        evictable = _field(cgroup / "memory.stat", "inactive_file")
        available = min(available, int(limit) - int(used) + evictable)
    return max(1, min(most, int(cores), available // memory_per_worker))


def _field(path: Path, name: str) -> int:
    """Return the number behind a name in a table of the kernel's, 0 if there is none."""
    found = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in found if words[0] == name), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        # No such control group: no such limit.
        return ""


@dataclass(frozen=True, slots=True)
class Work:
    """One graph to lower and compile.

    Attributes:
        bucket: its name.
        size: estimate to order by; the largest begins first, so that it does not end last.
        run: does it.
    """

    bucket: str
    size: int
    run: Callable[[], None]


class Progress:
    """Says how far the graphs of a start are.

    Args:
        total: how many there are.
        waiting: buckets that wait for another process, kept up to date by whoever waits.
        logger: where the lines go.
    """

    def __init__(self, total: int, *, waiting: Set[str], logger: logging.Logger) -> None:
        self._total = total
        self._waiting = waiting
        self._logger = logger
        self._started = time.monotonic()
        self._said = self._started
        self._since: dict[str, float] = {}
        self._done = 0
        self._changing = threading.Lock()
        self._is_terminal = sys.stderr.isatty()

    @contextlib.contextmanager
    def working_on(self, bucket: str) -> Iterator[None]:
        """Count a bucket as in work, then as done."""
        with self._changing:
            self._since[bucket] = time.monotonic()
        try:
            yield
        finally:
            with self._changing:
                del self._since[bucket]
                self._done += 1

    @property
    def interval_s(self) -> float:
        """How often `show` is to be called."""
        return BAR_INTERVAL_S if self._is_terminal else PROGRESS_INTERVAL_S

    def show(self) -> None:
        """Draw the bar on a terminal, else write a line when one is due."""
        if self._is_terminal:
            filled = BAR_CELLS * self._done // max(1, self._total)
            bar = "#" * filled + "-" * (BAR_CELLS - filled)
            # Back to the margin and clear to the end of the line (ECMA-48 EL).
            sys.stderr.write(f"\r\x1b[KCompiling [{bar}] {self._text()}")
            sys.stderr.flush()
        elif time.monotonic() - self._said >= PROGRESS_INTERVAL_S:
            self._said = time.monotonic()
            self._logger.info("Compiling: %s", self._text())

    def close(self) -> None:
        """Take the bar away."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _text(self) -> str:
        now = time.monotonic()
        with self._changing:
            since = dict(self._since)
        waiting = set(self._waiting)
        in_work = [
            f"{bucket} ({now - begun:.0f} s{', waiting' if bucket in waiting else ''})"
            for bucket, begun in sorted(since.items(), key=lambda item: item[1])
        ]
        text = f"{self._done} of {self._total} graphs done after {now - self._started:.0f} s"
        return f"{text}, in work: {', '.join(in_work)}" if in_work else text


def run_largest_first(
    items: Sequence[Work],
    *,
    workers: int,
    progress: Progress,
    stop: Callable[[], None],
) -> None:
    """Do all work on a pool of threads; the first failure, or Ctrl-C, ends the rest.

    Args:
        items: what is to be done.
        workers: threads.
        progress: told of each item.
        stop: ends what the threads wait for: children and other processes' locks.
    """

    def run(item: Work) -> None:
        with progress.working_on(item.bucket):
            item.run()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="neuron-compile")
    try:
        ordered = sorted(items, key=lambda item: -item.size)
        pending = {pool.submit(run, item) for item in ordered}
        while pending:
            done, pending = wait(pending, timeout=progress.interval_s, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if pending:
                progress.show()
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        progress.close()
