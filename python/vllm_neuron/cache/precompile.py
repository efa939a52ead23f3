"""Precompile Cache: the trace of each graph, kept for the next start.

One entry of kind "trace" holds the trace record, the lowered module (so that a lost NEFF is
compiled again without tracing, spec PC-26) and the factors of its key. An entry is data: reading it
runs no code. Any doubt about an entry is a miss, and a miss traces anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_neuron import _core
from vllm_neuron.binding import argument_leaves, find_tensor, spec_of
from vllm_neuron.cache import keys
from vllm_neuron.cache.explain import Miss, MissReasons
from vllm_neuron.cache.tiers import Tiers
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.premises import PremiseChecks
from vllm_neuron.trace_record import TensorSpec, TraceRecord

if TYPE_CHECKING:
    import torch

__all__ = ["CachedTrace", "PrecompileCache"]

#: Version of the "record" section of a trace entry.
RECORD_SCHEMA = 2


@dataclass(frozen=True, slots=True)
class CachedTrace:
    """What a hit gives: enough to load a compiled graph without tracing or lowering it."""

    trace: TraceRecord
    premises: bytes
    module: LoweredModule
    graph_digest: str


class PrecompileCache:
    """Trace entries below `$VLLM_CACHE_ROOT/neuron/precompile` and in the tiers behind it.

    Args:
        tiers: directories of the entries.
        logger: where hits, misses and their reasons are written.
    """

    KIND = "trace"

    def __init__(self, tiers: Tiers, *, logger: logging.Logger) -> None:
        self.tiers = tiers
        #: Why traces were not found, by bucket.
        self.misses: dict[str, Miss] = {}
        self._reasons = MissReasons(tiers, self.KIND)
        self._logger = logger

    def load(
        self,
        key: _core.Key,
        factors: Mapping[str, Any],
        step: torch.nn.Module,
        args: Sequence[Any],
        *,
        checks: PremiseChecks,
    ) -> CachedTrace | None:
        """Look a trace up and check it against what it will be bound to.

        Args:
            key: the trace key.
            factors: the factors of the key, to explain a miss.
            step: the step module whose weights the trace will be bound to.
            args: example arguments of the step.
            checks: the premises that this start has looked at so far.

        Returns:
            The trace, or None on a miss. The reason of a miss is logged.
        """
        bucket = factors["bucket"]
        reason: str | None = None
        for look_up in (self.tiers.find_near, self.tiers.fetch):
            entry = look_up(self.KIND, key)
            if entry is None:
                continue
            try:
                found = _decode(entry)
                reason = _mismatch(found, step, args, checks)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                # The bytes are as written, so something else than a capture wrote them.
                reason = f"the entry cannot be read: {error!r}"
            if reason is None:
                self._logger.info("Precompile Cache: hit for %s, key %s", bucket, key.short)
                return found
            self.tiers.remove(self.KIND, key)
        miss = (
            self._reasons.explain(key, factors, bucket=bucket)
            if reason is None
            else Miss(key, (reason,))
        )
        self._logger.info("Precompile Cache: miss for %s, key %s: %s", bucket, key.short, miss)
        self.misses[bucket] = miss
        return None

    def discard(self, key: _core.Key, bucket: str, reason: str) -> None:
        """Take away a trace that turned out to be wrong after it was loaded."""
        self._logger.warning(
            "Precompile Cache: the entry %s of %s is set aside: %s", key.short, bucket, reason
        )
        self.misses[bucket] = Miss(key, (reason,))
        self.tiers.remove(self.KIND, key)

    def store(
        self,
        key: _core.Key,
        factors: Mapping[str, Any],
        trace: CachedTrace,
        *,
        describe: Mapping[str, Any],
    ) -> None:
        """Keep a trace. A cache that takes no writes is logged once and changes nothing else."""
        record = {
            "schema": RECORD_SCHEMA,
            **describe,
            "graph digest": trace.graph_digest,
            "trace": json.loads(trace.trace.to_json()),
            "module": {"route": trace.module.route},
        }
        self.tiers.put(
            self.KIND,
            key,
            {
                "record": keys.canonical_json(record),
                "factors": keys.canonical_json(dict(factors)),
                "premises": trace.premises,
                "module": trace.module.data,
            },
        )


def _decode(entry: _core.Entry) -> CachedTrace:
    record = json.loads(bytes(entry.section("record")))
    if record.get("schema") != RECORD_SCHEMA:
        raise ValueError(f"record schema {record.get('schema')!r}, expected {RECORD_SCHEMA}")
    trace = TraceRecord.from_tree(record["trace"])
    module = LoweredModule(
        route=record["module"]["route"],
        data=bytes(entry.section("module")),
        inputs=tuple(item.spec for item in trace.inputs),
        outputs=trace.outputs,
        aliases=trace.aliases,
    )
    return CachedTrace(
        trace=trace,
        premises=bytes(entry.section("premises")),
        module=module,
        graph_digest=record["graph digest"],
    )


def _mismatch(
    found: CachedTrace, step: torch.nn.Module, args: Sequence[Any], checks: PremiseChecks
) -> str | None:
    """Say why a trace cannot be bound to the tensors that exist now, or None if it can."""
    trace = found.trace
    changed = trace.sources_changed()
    if changed:
        return f"the source of {', '.join(changed)} changed"
    broken = checks.broken(found.premises, step)
    if broken is not None:
        return f"the trace read something that changed: {broken}"
    missing = trace.missing_class()
    if missing is not None:
        return f"the class {missing} of its result is not loaded"
    arguments = dict(argument_leaves(step, args))
    for item in trace.inputs:
        if item.kind == "argument":
            tensor = arguments.get(item.name)
        else:
            tensor = find_tensor(step, item.name)
        spec = spec_of(tensor) if tensor is not None else None
        if spec != item.spec:
            return f"{item.kind} {item.name} is {_text(spec)}, the trace has {_text(item.spec)}"
    return None


def _text(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
