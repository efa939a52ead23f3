"""One run of a compiler as a child process: output to a file, figures, an end to standstill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ChildRun", "run_child"]

# How often a running child is looked at: soon after its start, then less and less often.
_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.5
_PROC = Path("/proc")
# Fields of /proc/PID/stat after the name in brackets (proc(5)): session, utime, stime, rss.
_SESSION, _USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 3, 11, 12, 21
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ChildRun:
    """How a child ended and what it took.

    Attributes:
        status: the exit code, or minus the number of the signal that ended it.
        stalled: it was killed because it neither wrote nor computed anything for too long.
        wall_s: seconds from start to end.
        cpu_s: seconds of processor time, of the child and of its children that ended.
        peak_bytes: the most resident memory that all of them together were seen to have; the
            figure of the kernel (getrusage(2)) would count this process too.
    """

    status: int
    stalled: bool
    wall_s: float
    cpu_s: float
    peak_bytes: int


def run_child(
    command: Sequence[str],
    *,
    folder: Path,
    output: Path,
    environment: Mapping[str, str],
    stall_s: float,
    watched: Sequence[Path] = (),
    is_stopped: threading.Event | None = None,
) -> ChildRun:
    """Run a command to its end; whatever happens, nothing of its session is left running.

    Args:
        command: executable and arguments.
        folder: its working directory.
        output: the file that gets what it writes to stdout and stderr, as it writes it.
        environment: its environment.
        stall_s: seconds without new output and without processor time after which it is killed.
        watched: more files whose growth is a sign of life.
        is_stopped: once set, the child is killed.

    Raises:
        OSError: it cannot be started.
    """
    started = time.monotonic()
    with output.open("wb") as stream:
        child = subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stalled = reaped = False
    try:
        life = _SignOfLife(child.pid, [output, *watched])
        poll_s = _FIRST_POLL_S
        while True:
            # wait4 instead of Popen.wait: it is what tells the resources used.
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                reaped = True
                break
            if is_stopped is not None and is_stopped.is_set():
                _kill_session(child.pid)
            if life.silence_s() > stall_s and not stalled:
                stalled = True
                _kill_session(child.pid)
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.5, _LONGEST_POLL_S, max(stall_s / 4, _FIRST_POLL_S))
    finally:
        _kill_session(child.pid)
        if not reaped:
            os.wait4(child.pid, 0)
        # Popen must not wait for a process that is gone.
        child.returncode = 0
    return ChildRun(
        status=os.waitstatus_to_exitcode(status),
        stalled=stalled,
        wall_s=time.monotonic() - started,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=life.peak_bytes,
    )


class _SignOfLife:
    """How long a session has neither written to its files nor used a processor."""

    def __init__(self, session: int, files: Sequence[Path]) -> None:
        self._session = session
        self._files = files
        self._seen: tuple[int, int] = (-1, -1)
        self._since = time.monotonic()
        self.peak_bytes = 0

    def silence_s(self) -> float:
        """Look again, and return the seconds since the last change."""
        now = time.monotonic()
        processes = list(_processes(self._session))
        self.peak_bytes = max(self.peak_bytes, sum(process.resident for process in processes))
        state = (sum(map(_size, self._files)), sum(process.ticks for process in processes))
        if state != self._seen:
            self._seen, self._since = state, now
        return now - self._since


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class _Process:
    """A running process: processor time in clock ticks, resident memory in bytes."""

    pid: int
    ticks: int
    resident: int


def _processes(session: int) -> Iterator[_Process]:
    """Yield the processes of a session; parts of a compiler have process groups of their own."""
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            # It ended meanwhile.
            continue
        if int(fields[_SESSION]) == session:
            yield _Process(
                pid=int(entry.name),
                ticks=int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]),
                resident=int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
            )


def _kill_session(session: int) -> None:
    for process in _processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
