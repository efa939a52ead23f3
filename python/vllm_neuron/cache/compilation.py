"""Compilation cache: lowered modules by graph, NEFFs by module.

Two kinds of entry below `$VLLM_CACHE_ROOT/neuron/compile_cache`: "lowering" (graph key to module)
and "neff" (module, compiler arguments and compiler to NEFF). Equal graphs of different models,
ranks or servers share both. A failed compilation is never kept (spec CC-64), and one process per
node compiles a given key (spec CC-6).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_neuron import _core
from vllm_neuron.cache import keys
from vllm_neuron.cache.entries import EntryStore
from vllm_neuron.errors import StoreError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.trace_record import TensorSpec

__all__ = ["CompilationCache", "CompiledNeff"]

#: How often a waiter says whom it waits for (spec OB-3).
WAIT_LINE_INTERVAL_S = 30.0


@dataclass(frozen=True, slots=True)
class CompiledNeff:
    """The bytes of a NEFF and where they came from."""

    data: memoryview | bytes
    key: _core.Key
    hit: bool


class CompilationCache:
    """Lowering and NEFF entries in one directory.

    Args:
        root: directory of the entries, or None for no cache: then nothing is looked up or kept.
        logger: where hits, misses and their reasons are written.
    """

    def __init__(self, root: Path | None, *, logger: logging.Logger) -> None:
        self.entries = (
            EntryStore(root, name="Compilation cache", logger=logger) if root is not None else None
        )
        self._logger = logger

    def load_module(
        self,
        key: _core.Key,
        *,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        aliases: Mapping[int, int],
    ) -> LoweredModule | None:
        """Look up the module that a graph lowers to."""
        entry = self.entries.get("lowering", key.hex) if self.entries is not None else None
        if entry is None:
            return None
        try:
            record = json.loads(bytes(entry.section("record")))
            return LoweredModule(
                route=record["route"],
                data=bytes(entry.section("module")),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                aliases=dict(aliases),
            )
        except (KeyError, TypeError, ValueError) as error:
            self._set_aside("lowering", key, f"its record cannot be read: {error!r}")
            return None

    def store_module(
        self,
        key: _core.Key,
        factors: Mapping[str, Any],
        module: LoweredModule,
        *,
        describe: Mapping[str, Any],
    ) -> None:
        """Keep a lowered module."""
        if self.entries is not None:
            self.entries.put(
                "lowering",
                key.hex,
                {
                    "record": keys.canonical_json({**describe, "route": module.route}),
                    "factors": keys.canonical_json(dict(factors)),
                    "module": module.data,
                },
            )

    def load_neff(self, key: _core.Key) -> CompiledNeff | None:
        """Look a NEFF up; the bytes are the pages of the mapped entry."""
        entry = self.entries.get("neff", key.hex) if self.entries is not None else None
        if entry is None:
            return None
        if "neff" not in entry.sections:
            self._set_aside("neff", key, "it has no NEFF section")
            return None
        return CompiledNeff(data=entry.section("neff"), key=key, hit=True)

    def neff(
        self,
        key: _core.Key,
        factors: Mapping[str, Any],
        module: LoweredModule,
        compile_module: Callable[[], bytes],
        *,
        bucket: str,
        describe: Mapping[str, Any],
    ) -> CompiledNeff:
        """Return the NEFF of a key, from the cache or by one compilation per node.

        Args:
            key: the NEFF key.
            factors: its factors, kept with the entry.
            module: what is compiled, kept with the entry.
            compile_module: runs the compiler; what it raises reaches the caller.
            bucket: for the log.
            describe: what `vllm-neuron cache ls` shows of the entry.

        Raises:
            CompileError: the compiler failed.
            NeffError: the compiler's output is not a NEFF.
        """
        found = self.load_neff(key)
        if found is not None:
            self._logger.info("Local cache hit for key: %s (%s)", key.short, bucket)
            return found
        if self.entries is None:
            self._logger.info("Cache disabled - forcing recompilation for key: %s", key.short)
            return self._compile(key, compile_module, bucket=bucket)
        self._logger.info("Local cache miss for key: %s (%s)", key.short, bucket)
        with _SingleFlight(self.entries, key, bucket, self._logger):
            found = self.load_neff(key)
            if found is not None:
                self._logger.info(
                    "Lock acquired but local cache already populated: %s (%s)", key.short, bucket
                )
                return found
            compiled = self._compile(key, compile_module, bucket=bucket)
            self.entries.put(
                "neff",
                key.hex,
                {
                    "record": keys.canonical_json(dict(describe)),
                    "factors": keys.canonical_json(dict(factors)),
                    "neff": compiled.data,
                    "module": module.data,
                },
            )
        return compiled

    def discard_neff(self, key: _core.Key, reason: str) -> None:
        """Take away a NEFF that does not load, so that it is compiled once more (spec CC-22)."""
        self._set_aside("neff", key, reason)

    def _compile(
        self, key: _core.Key, compile_module: Callable[[], bytes], *, bucket: str
    ) -> CompiledNeff:
        started = time.monotonic()
        data = compile_module()
        # Bytes that are not a NEFF must not enter the cache (bugs C07).
        _core.Neff.parse(data, path=None, verify_hash=True)
        self._logger.info(
            "Compilation complete in %.2f seconds (%s, key %s)",
            time.monotonic() - started,
            bucket,
            key.short,
        )
        return CompiledNeff(data=data, key=key, hit=False)

    def _set_aside(self, kind: str, key: _core.Key, reason: str) -> None:
        self._logger.warning(
            "Compilation cache: the %s entry %s is set aside: %s", kind, key.short, reason
        )
        if self.entries is not None:
            self.entries.remove(kind, key.hex)


class _SingleFlight:
    """Hold a key's lock while compiling. Without a usable lock the compilation is private.

    A lock that cannot be taken costs at most a double compilation, never a wrong entry: an entry
    appears only by an atomic link.
    """

    def __init__(
        self, entries: EntryStore, key: _core.Key, bucket: str, logger: logging.Logger
    ) -> None:
        self._entries = entries
        self._key = key
        self._bucket = bucket
        self._logger = logger
        self._lock: _core.KeyLock | None = None

    def __enter__(self) -> None:
        try:
            lock = self._entries.lock(self._key.hex, note=self._bucket)
            started = time.monotonic()
            timeout_s = 0.0
            while not lock.acquire(timeout_s):
                holder = lock.holder() or {}
                self._logger.info(
                    "Waiting for shared compilation by process %s (%s), %.0f s so far",
                    holder.get("pid", "unknown"),
                    holder.get("note") or self._bucket,
                    time.monotonic() - started,
                )
                timeout_s = WAIT_LINE_INTERVAL_S
            self._lock = lock
        except (OSError, StoreError) as error:
            self._logger.warning(
                "Compilation cache: no lock for key %s, compiling without coordination: %s",
                self._key.short,
                error,
            )

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
