"""Promotion: copying entries of a local cache to the remote one that other nodes read.

Imports neither torch nor vllm. Any number of nodes may promote the same entries at the same time:
an entry appears whole or not at all, and what is there stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_neuron import _core
from vllm_neuron.cache.entries import open_to_readers, sections_of

__all__ = ["Promotion", "copy_entries", "find_keys", "give_way", "save_cache"]


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a promotion did, in entries."""

    promoted: int
    existed: int


class _Entries(Protocol):
    def get(self, kind: Any, key: str) -> _core.Entry | None: ...
    def remove(self, kind: Any, key: str) -> Any: ...


def save_cache(
    local_cache_dir: str | os.PathLike[str],
    remote_cache_dir: str | os.PathLike[str],
    hash_key: str | None = None,
) -> Promotion:
    """Promote entries of a local cache to a remote one (spec CC-40 to CC-42).

    Args:
        local_cache_dir: directory of the local entries, such as
            `$VLLM_CACHE_ROOT/neuron/compile_cache`.
        remote_cache_dir: what `NEURON_LIBTORCH_REMOTE_CACHE` names; made if it is absent.
        hash_key: a key, in full or its first 32 or more digits; None promotes every complete entry.

    Returns:
        How many entries were promoted, and how many were there already.

    Raises:
        RuntimeError: there is no complete entry of `hash_key`.
        StoreError: a directory cannot be used.
        OSError: the system refused to write, such as ENOSPC.
    """
    source = _core.Store(os.fspath(local_cache_dir))
    if hash_key is None:
        wanted = None
    else:
        wanted = find_keys(source, hash_key)
        if not wanted:
            problems = "".join(f" {problem.reason}" for problem in source.take_problems())
            raise RuntimeError(
                f"There is no complete entry {hash_key} in {local_cache_dir}.{problems}"
            )
    return copy_entries(source, _core.Store(os.fspath(remote_cache_dir)), wanted)


def find_keys(store: _core.Store, hash_key: str) -> set[str]:
    """Keys of the entries of a store that begin with `hash_key`."""
    return {info.key for info in store.entries() if info.key.startswith(hash_key.lower())}


def copy_entries(
    source: _core.Store, target: _core.Store, wanted: set[str] | None = None
) -> Promotion:
    """Copy entries from store to store, each checked; `wanted` are keys, None means all.

    Raises:
        RuntimeError: a wanted entry is damaged.
    """
    promoted = existed = 0
    for info in source.entries():
        if wanted is not None and info.key not in wanted:
            continue
        entry = source.get(info.kind, info.key)
        if entry is None:
            # Damaged, or removed meanwhile.
            if wanted is not None:
                problems = "; ".join(problem.reason for problem in source.take_problems())
                raise RuntimeError(f"The entry {info.key} is not complete: {problems}")
            continue
        sections = sections_of(entry)
        give_way(target, info.kind, info.key, sections)
        if target.put(info.kind, info.key, sections):
            open_to_readers(Path(target.root), info.key)
            promoted += 1
        else:
            existed += 1
    return Promotion(promoted, existed)


def give_way(
    target: _Entries, kind: str, key: str, sections: Mapping[str, bytes | memoryview]
) -> None:
    """Take a trace away that was made of other sources than the one that is to be promoted.

    Equal keys mean equal work, but for traces: what a trace read is compared at each hit, not part
    of its key. A trace of last week's sources would be a miss on every node, for ever.
    """
    if kind != "trace":
        return
    found = target.get(kind, key)
    if found is not None and _read(sections_of(found)) != _read(sections):
        target.remove(kind, key)


def _read(sections: Mapping[str, bytes | memoryview]) -> Any:
    """What the trace of an entry read: the sources and premises."""
    try:
        sources = json.loads(bytes(sections["record"]))["trace"]["sources"]
        return sources, bytes(sections["premises"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
