"""Compilation cache: lowered modules by graph, NEFFs by module.

Two kinds of entry below `$VLLM_CACHE_ROOT/neuron/compile_cache` and in the tiers behind it:
"lowering" (graph key to module) and "neff" (module, compiler arguments and compiler to NEFF). Equal
graphs of different models, ranks or servers share both. A failed compilation is never kept (spec
CC-64), and one process per node compiles or fetches a given key (spec CC-6).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_neuron import _core
from vllm_neuron.cache import keys
from vllm_neuron.cache.entries import EntryKind
from vllm_neuron.cache.explain import Miss, MissReasons
from vllm_neuron.cache.single_flight import Flights, SharedFailure
from vllm_neuron.cache.tiers import Tiers
from vllm_neuron.errors import CacheMissError, NeuronError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.trace_record import TensorSpec

__all__ = ["CompilationCache", "CompiledNeff"]


@dataclass(frozen=True, slots=True)
class CompiledNeff:
    """The bytes of a NEFF and where they came from."""

    data: memoryview | bytes
    key: _core.Key
    hit: bool
    #: What parsing them found out (`_core.Neff.index`), so that loading need not read the archive.
    index: memoryview | bytes | None = None


class CompilationCache:
    """Lowering and NEFF entries.

    Args:
        tiers: directories of the entries, or None for no cache: then nothing is looked up or kept.
        logger: where hits, misses and their reasons are written.
        timeout_s: how long to wait for another process that gives no sign of life.
        strict: name of the variable that forbids compiling, or None.
    """

    def __init__(
        self,
        tiers: Tiers | None,
        *,
        logger: logging.Logger,
        timeout_s: float = 600.0,
        strict: str | None = None,
    ) -> None:
        self.tiers = tiers
        self.strict = strict
        self.flights = (
            Flights(tiers.local, logger=logger, timeout_s=timeout_s) if tiers is not None else None
        )
        #: Why NEFFs were not found, by bucket.
        self.misses: dict[str, Miss] = {}
        self._reasons = MissReasons(tiers, "neff") if tiers is not None else None
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
        entry = self.tiers.find("lowering", key) if self.tiers is not None else None
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
        if self.tiers is not None:
            self.tiers.put(
                "lowering",
                key,
                {
                    "record": keys.canonical_json({**describe, "route": module.route}),
                    "factors": keys.canonical_json(dict(factors)),
                    "module": module.data,
                },
            )

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
            CacheMissError: there is none and compiling is forbidden.
            CompileError: the compiler failed, here or in the process that this one waited for.
            NeffError: the compiler's output is not a NEFF.
        """
        self._logger.info("Compilation cache key: %s (%s)", key.short, bucket)
        if self.tiers is None or self.flights is None:
            self._logger.info("Cache disabled - forcing recompilation for key: %s", key.short)
            return self._compile(key, compile_module, bucket=bucket)
        found = self._taken_from(self.tiers.find_near("neff", key), key)
        if found is not None:
            self._logger.info("Local cache hit for key: %s (%s)", key.short, bucket)
            return found
        assert self._reasons is not None
        miss = self._reasons.explain(key, factors, bucket=bucket)
        self._logger.info("Local cache miss for key: %s (%s): %s", key.short, bucket, miss)
        try:
            with self.flights.flight(key, bucket) as tell_failure:
                found = self._taken_from(self.tiers.find_near("neff", key), key)
                if found is not None:
                    self._logger.info(
                        "Lock acquired but local cache already populated: %s (%s)",
                        key.short,
                        bucket,
                    )
                    return found
                found = self._taken_from(self.tiers.fetch("neff", key), key)
                if found is not None:
                    return found
                self.misses[bucket] = miss
                if self.strict is not None:
                    raise CacheMissError(
                        f"{bucket}: key {key.short} is in no cache: {miss}",
                        missing=[[bucket, key.hex]],
                    )
                try:
                    compiled = self._compile(key, compile_module, bucket=bucket)
                except NeuronError as error:
                    tell_failure(error)
                    raise
                self.tiers.put(
                    "neff",
                    key,
                    {
                        "record": keys.canonical_json(dict(describe)),
                        "factors": keys.canonical_json(dict(factors)),
                        "index": compiled.index or b"",
                        "neff": compiled.data,
                        "module": module.data,
                    },
                )
        except SharedFailure as failure:
            raise failure.error from None
        return compiled

    def discard_neff(self, key: _core.Key, reason: str) -> None:
        """Take away a NEFF that does not load, so that it is compiled once more (spec CC-22)."""
        self._set_aside("neff", key, reason)

    def _taken_from(self, entry: _core.Entry | None, key: _core.Key) -> CompiledNeff | None:
        """The NEFF of an entry; its bytes are the mapped pages."""
        if entry is None:
            return None
        if "neff" not in entry.sections:
            self._set_aside("neff", key, "it has no NEFF section")
            return None
        index = entry.section("index") if "index" in entry.sections else None
        return CompiledNeff(data=entry.section("neff"), key=key, hit=True, index=index)

    def _compile(
        self, key: _core.Key, compile_module: Callable[[], bytes], *, bucket: str
    ) -> CompiledNeff:
        started = time.monotonic()
        data = compile_module()
        # Bytes that are not a NEFF must not enter the cache (bugs C07).
        parsed = _core.Neff.parse(data, path=None, verify_hash=True)
        self._logger.info(
            "Compilation complete in %.2f seconds (%s, key %s)",
            time.monotonic() - started,
            bucket,
            key.short,
        )
        return CompiledNeff(data=data, key=key, hit=False, index=parsed.index())

    def _set_aside(self, kind: EntryKind, key: _core.Key, reason: str) -> None:
        self._logger.warning(
            "Compilation cache: the %s entry %s is set aside: %s", kind, key.short, reason
        )
        if self.tiers is not None:
            self.tiers.remove(kind, key)
