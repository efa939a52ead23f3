"""The directories of one cache, from near to far: local, compiled artefacts, remote.

The local tier is always there. `NEURON_COMPILED_ARTIFACTS` names a second one that is read and
written; `NEURON_LIBTORCH_REMOTE_CACHE` a shared one that is only read, unless promotion is asked
for. All hold the same entry files (docs/entry-format.md). What is found in the remote tier is
copied into the local one, checked and published there before it is used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_neuron import _core
from vllm_neuron.cache.entries import EntryKind, EntryStore, sections_of

if TYPE_CHECKING:
    from vllm_neuron.envs import Settings

__all__ = ["COMPILATION_SHARE", "PRECOMPILE_SHARE", "Tiers", "tiers_of"]

#: Parts of the size limit. A trace is a fraction of a NEFF, and worth as much time.
PRECOMPILE_SHARE, COMPILATION_SHARE = 0.25, 0.75

LOCAL, ARTIFACTS, REMOTE = "local", "artifacts", "remote"


class Tiers:
    """One cache over its directories.

    Args:
        local: directory of the local tier.
        name: how the log names the cache.
        logger: where hits, misses and problems are written.
        artifacts: directory of the compiled artefacts, or None.
        remote: directory of the remote tier, or None.
        promotes: whether what is stored locally goes to the remote tier too.
        max_size_bytes: most bytes of the local tier's entries, or None; those used longest ago go.
    """

    def __init__(
        self,
        local: Path,
        *,
        name: str,
        logger: logging.Logger,
        artifacts: Path | None = None,
        remote: Path | None = None,
        promotes: bool = False,
        max_size_bytes: int | None = None,
    ) -> None:
        def store(root: Path, tier: str) -> EntryStore:
            return EntryStore(root, name=f"{name} ({tier})", logger=logger)

        self.local = EntryStore(local, name=name, logger=logger)
        self.artifacts = store(artifacts, "compiled artefacts") if artifacts is not None else None
        self.remote = store(remote, REMOTE) if remote is not None else None
        #: How many look-ups each tier answered, by tier and "hit" or "miss".
        self.requests: Counter[tuple[str, str]] = Counter()
        #: How many entries of a kind were asked of the remote tier, by kind and "hit" or "miss".
        self.remote_requests: Counter[tuple[EntryKind, str]] = Counter()
        self._made: set[str] = set()
        self._name = name
        self._logger = logger
        self._promotes = promotes
        self._max_size_bytes = max_size_bytes

    def directories(self) -> dict[str, Path]:
        """The directory of each tier, from near to far."""
        tiers = {LOCAL: self.local, ARTIFACTS: self.artifacts, REMOTE: self.remote}
        return {tier: store.root for tier, store in tiers.items() if store is not None}

    def find(self, kind: EntryKind, key: _core.Key) -> _core.Entry | None:
        """Look an entry up in all tiers."""
        return self.find_near(kind, key) or self.fetch(kind, key)

    def find_near(self, kind: EntryKind, key: _core.Key) -> _core.Entry | None:
        """Look an entry up where a look-up is cheap: local, then compiled artefacts."""
        for tier, store in ((LOCAL, self.local), (ARTIFACTS, self.artifacts)):
            if store is not None and (entry := self._look_up(tier, store, kind, key)) is not None:
                return entry
        return None

    def fetch(self, kind: EntryKind, key: _core.Key) -> _core.Entry | None:
        """Look an entry up in the remote tier and copy it into the local one."""
        if self.remote is None:
            return None
        entry = self._look_up(REMOTE, self.remote, kind, key)
        self.remote_requests[kind, "miss" if entry is None else "hit"] += 1
        if entry is None:
            reason = (
                "no such entry" if self.remote.root.is_dir() else "remote directory does not exist"
            )
            self._logger.info("Remote cache miss for key %s (%s) — %s", key.short, kind, reason)
            return None
        self._logger.info(
            "Remote cache hit for key %s (%s) — copying from %s",
            key.short,
            kind,
            self.remote.root,
        )
        # `get` and `put` verify the checksums of what they read and found.
        if self._put_locally(kind, key, sections_of(entry)):
            self._logger.info("Remote artifacts fetched to local cache: %s", key.short)
        # A local tier that takes no writes costs the copy, not the hit.
        return self.local.get(kind, key.hex) or entry

    def put(
        self, kind: EntryKind, key: _core.Key, sections: Mapping[str, bytes | memoryview]
    ) -> None:
        """Publish an entry in the local tier and the compiled artefacts; promote it if asked."""
        self._made.add(key.hex)
        if self._put_locally(kind, key, sections) and kind == "neff":
            self._logger.info("Stored compilation artifacts in local cache: %s", key.short)
        if self.artifacts is not None:
            self.artifacts.put(kind, key.hex, sections)
        if self.remote is not None and self._promotes:
            from vllm_neuron.cache.promotion import give_way

            give_way(self.remote, kind, key.hex, sections)
            if self.remote.put(kind, key.hex, sections):
                self._logger.info("Promoted cache entry to remote: %s (%s)", key.short, kind)

    def remove(self, kind: EntryKind, key: _core.Key) -> None:
        """Take an entry out of the tiers that are this start's to write.

        The remote tier is everybody's: what does not fit here may fit another node.
        """
        for store in (self.local, self.artifacts):
            if store is not None:
                store.remove(kind, key.hex)

    def warn_of_lost(self) -> None:
        """Say at the end of a start if the next one will not find what this one made."""
        near = [store for store in (self.local, self.artifacts) if store is not None]
        lost = [key for key in self._made if not any(store.holds(key) for store in near)]
        if not lost:
            return
        reason = self.local.write_failure
        if reason is None and self._max_size_bytes is not None:
            reason = (
                f"they do not fit in {self._max_size_bytes} bytes, which is this cache's part of "
                f"VLLM_NEURON_CACHE_MAX_SIZE"
            )
        self._logger.warning(
            "%s: %d of the %d entries that this start made are not in %s (%s), and the next start "
            "makes them again",
            self._name,
            len(lost),
            len(self._made),
            self.local.root,
            reason or "they were removed meanwhile",
        )

    def described(self, kind: EntryKind) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield record and factors of near entries, to explain a miss."""
        for store in (self.local, self.artifacts):
            if store is not None:
                yield from store.described(kind)

    def _put_locally(
        self, kind: EntryKind, key: _core.Key, sections: Mapping[str, bytes | memoryview]
    ) -> bool:
        is_new = self.local.put(kind, key.hex, sections)
        if is_new and self._max_size_bytes is not None:
            self.local.evict(self._max_size_bytes)
        return is_new

    def _look_up(
        self, tier: str, store: EntryStore, kind: EntryKind, key: _core.Key
    ) -> _core.Entry | None:
        entry = store.get(kind, key.hex)
        self.requests[tier, "miss" if entry is None else "hit"] += 1
        return entry


def tiers_of(
    settings: Settings, local: Path, *, name: str, logger: logging.Logger, share: float
) -> Tiers:
    """The tiers of the cache that is at `local`, as the settings of a start have them.

    Args:
        settings: of the start.
        local: directory of the local tier.
        name: how the log names the cache.
        logger: where its lines go.
        share: its part of `VLLM_NEURON_CACHE_MAX_SIZE`.
    """
    limit = settings["VLLM_NEURON_CACHE_MAX_SIZE"]
    return Tiers(
        local,
        name=name,
        logger=logger,
        artifacts=settings["NEURON_COMPILED_ARTIFACTS"],
        remote=settings["NEURON_LIBTORCH_REMOTE_CACHE"],
        promotes=settings["VLLM_NEURON_CACHE_PROMOTE"],
        max_size_bytes=None if limit is None else int(limit * share),
    )
