"""Single flight: one process of a node does the work for a key, the others wait for it.

The lock is the kernel's, so it is free as soon as its holder ends, however it ends. While it works
the holder touches the lock file: its heartbeat. Waiting on a holder with a heartbeat has no end;
one without (a suspended process, a paused container) is waited on for a limited time. A failure of
the holder reaches those who were waiting, and nobody else: it is no entry, and a later start does
not see it. docs/entry-format.md, "Single-flight".

Doing the work without the lock is always safe: an entry appears only by an atomic link.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_neuron import _core, errors
from vllm_neuron.cache.entries import EntryStore
from vllm_neuron.errors import NeuronError, StoreError

__all__ = ["Flights", "SharedFailure"]

#: How often a holder gives a sign of life.
HEARTBEAT_S = 0.5
#: How long a waiter sleeps in the kernel's queue before it looks for a sign of life again.
POLL_S = 0.5
#: How often a free place for a compiler is looked for.
SLOT_POLL_S = 0.05
#: How often a waiter says whom it waits for (spec OB-3).
WAIT_LINE_INTERVAL_S = 30.0
#: How long a failure is kept for those who were waiting.
FAILURE_LIFE_S = 3600.0

Holder = tuple[Any, ...]


class SharedFailure(Exception):
    """The holder that this process waited for failed; `error` is what it raised there."""

    def __init__(self, error: NeuronError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Flights:
    """The single flights of one cache.

    Attributes:
        entries: the local tier, whose directory holds the locks.
        logger: where waiting is logged.
        timeout_s: how long to wait for a holder that gives no sign of life.
        waited_s: seconds spent waiting, over all flights.
        waits: how many flights had to wait.
        is_stopped: set to end all waiting.
    """

    entries: EntryStore
    logger: logging.Logger
    timeout_s: float = 600.0
    waited_s: float = 0.0
    waits: int = 0
    is_stopped: threading.Event = field(default_factory=threading.Event)
    #: Buckets that wait for another process, for the progress line.
    waiting: set[str] = field(default_factory=set)
    _has_no_locks: bool = False

    @contextlib.contextmanager
    def flight(self, key: _core.Key, bucket: str) -> Iterator[Callable[[NeuronError], None]]:
        """Hold the lock of a key.

        Yields:
            A function that tells the waiters what the work failed with.

        Raises:
            SharedFailure: another process did the work meanwhile and failed.
        """
        lock = self._acquire(key, bucket)
        if lock is None:
            yield lambda error: None
            return
        me = _identity(lock.holder())
        with self._held(lock, key.hex):
            yield lambda error: self._leave_failure(key, me, error)

    @contextlib.contextmanager
    def slot(self, count: int, note: str) -> Iterator[None]:
        """Hold one of the node's `count` places for compilers; spec CM-20.

        The places belong to the directory: all processes that share it share them.
        """
        names = [_core.digest(f"compiler {number}".encode()) for number in range(count)]
        locks = {name: self.entries.lock(name, note=note) for name in names}
        signs: list[float | None] = []
        since = time.monotonic()
        while True:
            try:
                name = next((name for name in names if locks[name].acquire(0.0)), None)
            except (OSError, StoreError):
                # No usable locks: `flight` says so.
                yield
                return
            if name is not None:
                break
            if (found := [_heartbeat(self._lock_path(name)) for name in names]) != signs:
                signs, since = found, time.monotonic()
            if time.monotonic() - since >= self.timeout_s:
                self.logger.warning(
                    "All %d compilers of this node are suspended: compiling %s beside them",
                    count,
                    note,
                )
                yield
                return
            if self.is_stopped.wait(SLOT_POLL_S):
                raise CancelledError("the start was stopped while it waited")
        with self._held(locks[name], name):
            yield

    @contextlib.contextmanager
    def _held(self, lock: _core.KeyLock, name: str) -> Iterator[None]:
        """Give signs of life while a lock is held, and release it."""
        done = threading.Event()
        heart = threading.Thread(
            target=self._beat, args=(name, done), name="neuron-heartbeat", daemon=True
        )
        heart.start()
        try:
            yield
        finally:
            done.set()
            lock.release()
            heart.join()

    def _acquire(self, key: _core.Key, bucket: str) -> _core.KeyLock | None:
        """The lock, or None to work without it."""
        seen: set[Holder] = set()
        started = time.monotonic()
        try:
            lock = self.entries.lock(key.hex, note=bucket)
            if lock.acquire(0.0):
                self.logger.info("Acquired compilation lock for cache: %s", key.short)
                return lock
            self.waits += 1
            self.waiting.add(bucket)
            if not self._wait(lock, key, bucket, seen):
                return None
        except (OSError, StoreError) as error:
            # The same for every key: one line says it.
            if not self._has_no_locks:
                self._has_no_locks = True
                self.logger.warning(
                    "Compilation cache: no locks in %s, compiling without coordination: %s",
                    self.entries.root,
                    error,
                )
            return None
        finally:
            if bucket in self.waiting:
                self.waiting.discard(bucket)
                self.waited_s += time.monotonic() - started
        content = self._failure_of(key, seen)
        if content is not None:
            # Whoever came while this process had the lock waits for it, not for the first holder.
            content["holders"].append(_identity(lock.holder()))
            self._write_failure(key, content)
            lock.release()
            raise SharedFailure(_error_of(content))
        self.logger.info("Shared compilation completed: %s", key.short)
        return lock

    def _wait(self, lock: _core.KeyLock, key: _core.Key, bucket: str, seen: set[Holder]) -> bool:
        started = time.monotonic()
        said = -WAIT_LINE_INTERVAL_S
        #: The holder and its last heartbeat, and since when (here) there was no other.
        sign: tuple[Holder, float | None] | None = None
        since = started
        while True:
            now = time.monotonic()
            about = lock.holder() or {}
            holder = _identity(about)
            seen.add(holder)
            if (found := (holder, _heartbeat(self._lock_path(key.hex)))) != sign:
                sign, since = found, now
            who = f"{about.get('pid', 'unknown')} ({about.get('note') or bucket})"
            if now - since >= self.timeout_s:
                self.logger.warning(
                    "Shared compilation timeout after %.0f s in %s: process %s on %s gave no sign "
                    "of life since %s. Compiling %s without it.",
                    now - since,
                    self.entries.root,
                    who,
                    about.get("host", "an unknown host"),
                    _clock(sign[1]),
                    bucket,
                )
                return False
            if now - started - said >= WAIT_LINE_INTERVAL_S:
                said = now - started
                self.logger.info(
                    "Waiting for shared compilation by process %s, %.0f s so far", who, said
                )
            if self.is_stopped.is_set():
                raise CancelledError("the start was stopped while it waited")
            if lock.acquire(min(POLL_S, self.timeout_s)):
                return True

    def _lock_path(self, name: str) -> Path:
        return self.entries.root / "v1" / "locks" / name[:2] / name

    def _beat(self, name: str, done: threading.Event) -> None:
        path = self._lock_path(name)
        while not done.wait(HEARTBEAT_S):
            # Somebody may have removed the cache; the lock holds nothing then.
            with contextlib.suppress(OSError):
                os.utime(path)

    def _failure_path(self, key: _core.Key) -> Path:
        return self.entries.root / "v1" / "failures" / key.hex

    def _leave_failure(self, key: _core.Key, me: Holder, error: NeuronError) -> None:
        content = {
            "holders": [me],
            "class": type(error).__name__,
            "message": str(error),
            "details": {
                name: value
                for name, value in error.details.items()
                if value is None or isinstance(value, str | int | float)
            },
        }
        self._write_failure(key, content)

    def _write_failure(self, key: _core.Key, content: dict[str, Any]) -> None:
        path = self._failure_path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        # Without it each waiter finds the failure out for itself.
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for old in path.parent.iterdir():
                if time.time() - old.stat().st_mtime > FAILURE_LIFE_S:
                    old.unlink()
            temporary.write_text(json.dumps(content))
            temporary.replace(path)

    def _failure_of(self, key: _core.Key, seen: set[Holder]) -> dict[str, Any] | None:
        """What a holder that this process saw at work failed with."""
        try:
            content = json.loads(self._failure_path(key).read_text())
            holders = {tuple(holder) for holder in content["holders"]}
            _error_of(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            # None was left, or what is there is none.
            return None
        return content if holders & seen else None


def _error_of(content: dict[str, Any]) -> NeuronError:
    cls = getattr(errors, content["class"])
    if not issubclass(cls, NeuronError):
        raise TypeError(f"{cls} is no error of this package")
    message = (
        f"{content['message']} (compiled by process {content['holders'][0][0]} for all that waited)"
    )
    return cls(message, **content["details"])


def _identity(holder: dict[str, Any] | None) -> Holder:
    about = holder or {}
    return tuple(about.get(name) for name in ("pid", "host", "boot_id", "time_s"))


def _heartbeat(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _clock(time_s: float | None) -> str:
    if time_s is None:
        return "it began"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
