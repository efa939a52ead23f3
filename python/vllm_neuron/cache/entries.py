"""A store of cache entries whose every problem is a counted, logged miss.

Law: a cache is never worse than no cache. A corrupt entry, a full disk, a read-only or foreign
directory must neither stop a server nor be silent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vllm_neuron import _core
from vllm_neuron.errors import StoreError

__all__ = ["EntryKind", "EntryStore", "open_to_readers", "sections_of"]

#: What an entry holds, as docs/entry-format.md names it.
EntryKind = Literal["trace", "lowering", "neff"]

#: Most entries that are read to explain a miss; the newest ones are the likeliest to be near.
MOST_COMPARED = 256


class EntryStore:
    """`_core.Store` with the log lines that an operator needs.

    Args:
        root: directory of the entries; made on the first write.
        name: how the log names this cache.
        logger: where problems are written.
    """

    def __init__(self, root: Path, *, name: str, logger: logging.Logger) -> None:
        self.root = root
        self._name = name
        self._logger = logger
        self._store = _core.Store(str(root))
        #: Why the last entry could not be written, if one could not.
        self.write_failure: str | None = None
        self._said: set[str] = set()

    def get(self, kind: EntryKind, key: str) -> _core.Entry | None:
        """Look an entry up; None is a miss, whatever its reason."""
        entry = self._store.get(kind, key)
        self._log_problems()
        return entry

    def put(self, kind: EntryKind, key: str, sections: Mapping[str, bytes | memoryview]) -> bool:
        """Publish an entry; False if it was there already or could not be written."""
        try:
            is_new = self._store.put(kind, key, sections)
            if is_new:
                open_to_readers(self.root, key)
            return is_new
        except (OSError, StoreError) as error:
            # Every further write fails for the same reason: one line says it.
            if self.write_failure is None:
                self._logger.warning("%s: not written to %s: %s", self._name, self.root, error)
            self.write_failure = str(error)
            return False
        finally:
            self._log_problems()

    def holds(self, key: str) -> bool:
        """Whether there is an entry, sound or not, at the place of a key."""
        return (self.root / "v1" / key[:2] / key).exists()

    def remove(self, kind: EntryKind, key: str) -> None:
        """Take an entry away that turned out to be unusable, so that a good one can replace it."""
        try:
            self._store.remove(kind, key)
        except (OSError, StoreError) as error:
            self._logger.warning("%s: not removed from %s: %s", self._name, self.root, error)

    def evict(self, max_size_bytes: int) -> None:
        """Remove the entries used longest ago until the rest takes no more than a size."""
        try:
            done = self._store.evict(max_size_bytes=max_size_bytes, min_age_s=0.0)
        except (OSError, StoreError) as error:
            self._logger.warning("%s: nothing removed from %s: %s", self._name, self.root, error)
            return
        if done.removed:
            self._logger.info(
                "%s: removed %d entries, those used longest ago (%d bytes), to keep %d bytes",
                self._name,
                len(done.removed),
                done.removed_bytes,
                max_size_bytes,
            )
        self._log_problems()

    def lock(self, key: str, *, note: str) -> _core.KeyLock:
        """Return the single-flight lock of a key; `note` says to waiters what its holder does."""
        return self._store.lock(key, note=note)

    def described(self, kind: EntryKind) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the record and the factors of the newest entries of a kind.

        Only explaining a miss pays for it. What has no such sections is passed over.
        """
        found = [info for info in self._store.entries() if info.kind == kind]
        found.sort(key=lambda info: -info.modified_s)
        names = ("record", "factors")
        for info in found[:MOST_COMPARED]:
            if not set(names) <= set(info.sections):
                continue
            entry = self._store.get(kind, info.key, verify=names)
            if entry is None:
                continue
            try:
                record, factors = (json.loads(bytes(entry.section(name))) for name in names)
            except (ValueError, RecursionError) as error:
                self._logger.warning("%s: %s: %s", self._name, info.path, error)
                continue
            if isinstance(factors, dict):
                yield record if isinstance(record, dict) else {}, factors
        self._log_problems()

    def counters(self) -> dict[str, int]:
        """The store's own counts of hits, misses, corrupt entries and writes."""
        return self._store.counters()

    def _log_problems(self) -> None:
        for problem in self._store.take_problems():
            # What is wrong with a directory is found at each look-up: one line says it.
            if problem.reason not in self._said:
                self._said.add(problem.reason)
                self._logger.warning("%s: %s", self._name, problem.reason)


def sections_of(entry: _core.Entry) -> dict[str, memoryview]:
    """The content of an entry, in file order, so that a copy has the same bytes."""
    names: Sequence[str] = tuple(entry.sections)
    return {name: entry.section(name) for name in names}


def open_to_readers(root: Path, key: str) -> None:
    """Let those read a published entry who may read its root.

    A root that the store made is private (0700), and so is all in it. A root that an operator made
    readable, for a shared file system or in a container image, has readable entries.
    """
    readers = root.stat().st_mode & 0o055
    if not readers:
        return
    top = root / "v1"
    # A directory of another writer is that writer's to open.
    for directory in (top, top / key[:2]):
        with contextlib.suppress(PermissionError):
            directory.chmod(stat.S_IMODE(directory.stat().st_mode) | readers)
    (top / key[:2] / key).chmod(0o400 | readers & 0o044)
