"""A store of cache entries whose every problem is a counted, logged miss.

Law: a cache is never worse than no cache. A corrupt entry, a full disk, a read-only or foreign
directory must neither stop a server nor be silent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_neuron import _core
from vllm_neuron.errors import StoreError

__all__ = ["EntryStore"]


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
        self._write_failure: str | None = None

    def get(self, kind: str, key: str) -> _core.Entry | None:
        """Look an entry up; None is a miss, whatever its reason."""
        entry = self._store.get(kind, key)
        self._log_problems()
        return entry

    def put(self, kind: str, key: str, sections: Mapping[str, bytes | memoryview]) -> bool:
        """Publish an entry; False if it was there already or could not be written."""
        try:
            return self._store.put(kind, key, sections)
        except (OSError, StoreError) as error:
            # Every further write fails for the same reason: one line says it.
            if self._write_failure is None:
                self._logger.warning("%s: not written to %s: %s", self._name, self.root, error)
            self._write_failure = str(error)
            return False
        finally:
            self._log_problems()

    def remove(self, kind: str, key: str) -> None:
        """Take an entry away that turned out to be unusable, so that a good one can replace it."""
        try:
            self._store.remove(kind, key)
        except (OSError, StoreError) as error:
            self._logger.warning("%s: not removed from %s: %s", self._name, self.root, error)

    def lock(self, key: str, *, note: str) -> _core.KeyLock:
        """Return the single-flight lock of a key; `note` says to waiters what its holder does."""
        return self._store.lock(key, note=note)

    def sections(self, kind: str, section: str) -> Iterator[Any]:
        """Yield the JSON value of one section of every readable entry of a kind.

        The cost grows with the number of entries; only explaining a miss pays it.
        """
        for info in self._store.entries():
            if info.kind != kind or section not in info.sections:
                continue
            entry = self._store.get(kind, info.key)
            if entry is None:
                continue
            try:
                yield json.loads(bytes(entry.section(section)))
            except (ValueError, RecursionError) as error:
                self._logger.warning("%s: %s: %s", self._name, info.path, error)
        self._log_problems()

    def counters(self) -> dict[str, int]:
        """The store's own counts of hits, misses, corrupt entries and writes."""
        return self._store.counters()

    def _log_problems(self) -> None:
        for problem in self._store.take_problems():
            self._logger.warning("%s: %s: %s", self._name, problem.path, problem.reason)
