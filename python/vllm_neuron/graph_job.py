"""A graph on its way through a start, and the counters of all of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm_neuron import _core
    from vllm_neuron.cache.compilation import CompiledNeff
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.errors import NeuronError
    from vllm_neuron.lowering.graph_message import EncodedGraph
    from vllm_neuron.lowering.module import LoweredModule
    from vllm_neuron.runtime.base import LoadedModel
    from vllm_neuron.trace_record import TraceRecord

__all__ = ["GraphJob", "GraphSpec", "PipelineCounters"]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph to have ready.

    Attributes:
        bucket: its name, unique in a start, such as `prefill_s128`.
        step: the module whose forward is the graph.
        args: example arguments, tensors in nested tuples, lists or dicts; only their shapes and
            dtypes matter.
    """

    bucket: str
    step: torch.nn.Module
    args: tuple[Any, ...]


@dataclass(slots=True)
class PipelineCounters:
    """What one start did. `*_s` are seconds of work, added up over graphs.

    `discards` counts trace entries that turned out to be wrong after they were loaded.
    """

    graphs: int = 0
    traces: int = 0
    trace_hits: int = 0
    lowerings: int = 0
    lowering_hits: int = 0
    compilations: int = 0
    neff_hits: int = 0
    discards: int = 0
    trace_s: float = 0.0
    lower_s: float = 0.0
    compile_s: float = 0.0
    load_s: float = 0.0
    #: Seconds by bucket and phase: trace, lower, compile, load.
    phases: dict[tuple[str, str], float] = field(default_factory=dict)
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: int) -> None:
        """Add to counters, from any thread."""
        with self._adding:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def spent(self, bucket: str, phase: str, seconds: float) -> None:
        """Add seconds of work to a phase of a bucket, from any thread."""
        with self._adding:
            name = f"{phase}_s"
            setattr(self, name, getattr(self, name) + seconds)
            self.phases[bucket, phase] = self.phases.get((bucket, phase), 0.0) + seconds

    def totals(self) -> dict[str, float]:
        """Every counter by its name."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("phases", "_adding")
        }

    @property
    def precompile_state(self) -> str:
        """`cold`, `partly warm` or `warm` (spec PC-14)."""
        if self.trace_hits == 0:
            return "cold"
        return "warm" if self.trace_hits == self.graphs else "partly warm"


@dataclass(slots=True, eq=False)
class GraphJob:
    """A graph on its way: what is known of it so far."""

    spec: GraphSpec
    trace_key: _core.Key
    trace_factors: dict[str, Any]
    trace: TraceRecord | None = None
    #: What the trace took for granted, as the Precompile Cache keeps it.
    premises: bytes = b"[]"
    module: LoweredModule | None = None
    graph: CapturedGraph | EncodedGraph | None = None
    graph_digest: str | None = None
    is_from_cache: bool = False
    #: What went wrong with a trace from the cache; it is to be traced anew.
    doubt: NeuronError | None = None
    model: LoadedModel | None = None
    #: What was made of it, for a report.
    neff: CompiledNeff | None = None
    #: What went wrong, where the other graphs go on all the same.
    failure: NeuronError | None = None

    @property
    def size(self) -> int:
        """How much there is to compile: elements of what comes and goes at each call."""
        assert self.trace is not None
        aliases = self.trace.aliases
        passed = [
            item.spec
            for index, item in enumerate(self.trace.inputs)
            if item.kind == "argument" and index not in aliases.values()
        ]
        made = [spec for index, spec in enumerate(self.trace.outputs) if index not in aliases]
        return sum(prod(spec.shape) for spec in (*passed, *made))
