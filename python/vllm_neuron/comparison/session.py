"""Runs prompts through a model eagerly and by routes, and compares at every call of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_neuron.capture import CapturedGraph, capture
from vllm_neuron.comparison.calls import Call, Schedule
from vllm_neuron.comparison.measures import Difference, NextTokens, difference, largest
from vllm_neuron.comparison.operators import OperatorFault, find_operator
from vllm_neuron.comparison.routes import CompiledGraph, GraphInputs, RouteCompiler
from vllm_neuron.comparison.taps import TappedStep, decoder_layers, tapped_modules
from vllm_neuron.errors import NeuronError
from vllm_neuron.vllm.attention import KVCache, storage_dtype
from vllm_neuron.vllm.model_runner import NeuronModelRunner
from vllm_neuron.vllm.step import DecoderStep

__all__ = ["LOGITS", "BucketResult", "ComparisonSession", "Parting"]

LOGITS = "logits"
"""The place after the last layer."""


@dataclass(slots=True)
class BucketResult:
    """How far a route is from eager in all calls of one bucket.

    Attributes:
        bucket: its name.
        route: the route's name.
        calls: how many calls were compared.
        logits: of the graph that a server has.
        kv_caches: of what that graph wrote, by decoder layer.
        layers: in the graph with taps, by place, in the order of the model.
        next_tokens: top-1 agreement and divergence, of the graph that a server has.
    """

    bucket: str
    route: str
    calls: int = 0
    logits: Difference = field(default_factory=Difference)
    kv_caches: dict[str, Difference] = field(default_factory=dict)
    layers: dict[str, Difference] = field(default_factory=dict)
    next_tokens: NextTokens = field(default_factory=NextTokens)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a route first parts from eager.

    Attributes:
        bucket: the bucket of the call.
        prompts: the prompts of the call, counted from 0.
        place: the module, or `logits`.
        difference: there.
        operator: the operator at fault, if a single one is.
        note: why there is no operator; empty if there is one.
    """

    bucket: str
    prompts: tuple[int, ...]
    place: str
    difference: Difference
    operator: OperatorFault | None
    note: str


@dataclass(slots=True)
class _Graphs:
    """One bucket's graphs, as served and with taps."""

    served: CapturedGraph
    tapped: CapturedGraph
    compiled: dict[str, tuple[CompiledGraph, CompiledGraph]] = field(default_factory=dict)


class ComparisonSession:
    """Compares routes with eager on one loaded model.

    At every call all start from the same tokens and the same KV caches, those of eager; so what is
    seen in a call comes from its graph alone.

    Args:
        runner: has the model and the buckets; nothing is compiled by it.
        compilers: of the routes to compare, by name.
        inputs: the weights for them.
        tolerance: relative difference beyond which a route parts from eager.
        report: is told what is being done.
    """

    def __init__(
        self,
        runner: NeuronModelRunner,
        compilers: Mapping[str, RouteCompiler],
        inputs: GraphInputs,
        *,
        tolerance: float,
        report: Callable[[str], None],
    ) -> None:
        self._compilers = dict(compilers)
        self._inputs = inputs
        self._tolerance = tolerance
        self._report = report
        self._attention = runner.layers
        self._places = tapped_modules(runner.model, list(runner.layers))
        options: dict[str, Any] = {
            "block_size": runner.vllm_config.cache_config.block_size,
            "return_logits": True,
            "return_hidden_states": True,
        }
        self._prefill = DecoderStep(runner.model, runner.layers, **options).eval()
        self._tapped = TappedStep(runner.model, runner.layers, **options).eval()
        options["return_hidden_states"] = False
        self._decode = DecoderStep(runner.model, runner.layers, **options).eval()
        self._graphs: dict[str, _Graphs] = {}
        self.results: dict[tuple[str, str], BucketResult] = {}
        self.partings: dict[str, Parting] = {}

    @property
    def places(self) -> tuple[str, ...]:
        """Where graphs are cut, in the order of the model, and the logits."""
        return (*self._places, LOGITS)

    @torch.no_grad()
    def run(self, schedule: Schedule, tokens: int) -> None:
        """Prefill the prompts and generate tokens, those that eager finds most likely.

        Raises:
            NeuronError: a route cannot lower or compile a graph.
        """
        caches = [
            (
                torch.zeros(*pages, layer.head_size, dtype=dtype),
                torch.zeros(*pages, layer.head_size_v, dtype=dtype),
            )
            for layer in self._attention.values()
            for pages in [(schedule.num_blocks, self._decode.block_size, layer.num_kv_heads)]
            for dtype in [storage_dtype(layer.kv_cache_torch_dtype)]
        ]
        for call in schedule.prefills():
            self._take(schedule, call, caches)
        # The prefill gave the first one.
        for _ in range(tokens - 1):
            self._take(schedule, schedule.decode(), caches)

    def _take(self, schedule: Schedule, call: Call, caches: list[KVCache]) -> None:
        logits = self._compare(call, caches)
        if call.gives_tokens:
            schedule.append(call.prompts, logits[: call.sequences].argmax(-1).tolist())

    def _compare(self, call: Call, caches: list[KVCache]) -> torch.Tensor:
        """Compare one call; returns eager's logits and leaves its KV caches in `caches`."""
        graphs = self._graphs_of(call, caches)
        before = _copies(caches)
        served = self._prefill if call.is_prefill else self._decode
        logits = served(*call.inputs, caches)[0]
        with self._tapped.hooked(self._places):
            tapped_logits, taps = self._tapped(*call.inputs, _copies(before))
        expected = {**taps, LOGITS: [tapped_logits]}
        for name in self._compilers:
            result = self.results.setdefault((call.bucket, name), BucketResult(call.bucket, name))
            compiled, compiled_tapped = graphs.compiled[name]
            served_parts = self._compare_served(call, compiled, before, logits, caches, result)
            parts = self._compare_layers(call, compiled_tapped, before, expected, result)
            if name in self.partings or not (parts or served_parts):
                continue
            # The graph with taps shows where; the one without may be the only one with a fault.
            step = self._tapped if parts else served
            graph = graphs.tapped if parts else graphs.served
            tensors = self._inputs.tensors(graph, step, (*call.inputs, before))
            self.partings[name] = self._parting(
                call, graph, tensors, name, *(parts or served_parts)[0]
            )
        return logits

    def _compare_served(
        self,
        call: Call,
        compiled: CompiledGraph,
        before: list[KVCache],
        logits: torch.Tensor,
        caches: list[KVCache],
        result: BucketResult,
    ) -> list[tuple[str, Difference]]:
        """Compare the graph that a server has; places where it parts, in the model's order."""
        own = _copies(before)
        step = self._prefill if call.is_prefill else self._decode
        tensors = self._inputs.tensors(compiled.graph, step, (*call.inputs, own))
        found = compiled.call(tensors)[0]
        rows = slice(call.sequences)
        result.calls += 1
        here = difference(found[rows], logits[rows])
        result.logits = largest([result.logits, here])
        if call.gives_tokens:
            result.next_tokens.add(found[rows], logits[rows])
        written: dict[str, Difference] = {}
        for name, ours, theirs in zip(self._attention, own, caches, strict=True):
            # Block 0 is for padding.
            apart = [difference(a[1:], b[1:]) for a, b in zip(ours, theirs, strict=True)]
            (layer,) = decoder_layers([name])
            written[layer] = largest([written.get(layer, Difference()), *apart])
        for layer, apart_here in written.items():
            known = result.kv_caches.get(layer, Difference())
            result.kv_caches[layer] = largest([known, apart_here])
        seen = [*written.items(), (LOGITS, here)]
        return [(place, apart) for place, apart in seen if apart.exceeds(self._tolerance)]

    def _compare_layers(
        self,
        call: Call,
        compiled: CompiledGraph,
        before: list[KVCache],
        expected: Mapping[str, list[torch.Tensor]],
        result: BucketResult,
    ) -> list[tuple[str, Difference]]:
        """Compare the graph with taps; places where it parts, in the model's order."""
        args = (*call.inputs, _copies(before))
        tensors = self._inputs.tensors(compiled.graph, self._tapped, args)
        found_logits, taps = compiled.call(tensors)
        found = {**taps, LOGITS: [found_logits]}
        parts = []
        for place in self.places:
            if place not in expected:
                continue
            # Padding comes last, and is nobody's result.
            rows = call.sequences if place == LOGITS else call.tokens
            here = largest(
                difference(_rows(ours, rows, call), _rows(theirs, rows, call))
                for ours, theirs in zip(found[place], expected[place], strict=True)
            )
            result.layers[place] = largest([result.layers.get(place, Difference()), here])
            if here.exceeds(self._tolerance):
                parts.append((place, here))
        return parts

    def _parting(
        self,
        call: Call,
        graph: CapturedGraph,
        tensors: Sequence[torch.Tensor],
        route: str,
        place: str,
        here: Difference,
    ) -> Parting:
        self._report(f"{route} parts at {place} in {call.bucket}: looking for the operator")
        operator, note = None, ""
        try:
            operator = find_operator(
                self._compilers[route],
                graph,
                tensors,
                place=None if place == LOGITS else place,
                places=tuple(self._places),
                tolerance=self._tolerance,
            )
        except NeuronError as error:
            note = f"the graph with every operator's result as an output fails: {error}"
        else:
            if operator is None:
                note = (
                    "each operator of the captured graph is within the tolerance by itself: "
                    "differences of several add up, or capture or decomposition changed the model"
                )
        return Parting(call.bucket, call.prompts, place, here, operator, note)

    def _graphs_of(self, call: Call, caches: list[KVCache]) -> _Graphs:
        if call.bucket in self._graphs:
            return self._graphs[call.bucket]
        self._report(f"{call.bucket}: capturing")
        args = (*call.inputs, caches)
        step = self._prefill if call.is_prefill else self._decode
        served = capture(step, args, bucket=call.bucket)
        with self._tapped.hooked(self._places):
            tapped = capture(self._tapped, args, bucket=call.bucket)
        graphs = self._graphs[call.bucket] = _Graphs(served, tapped)
        for name, compiler in self._compilers.items():
            self._report(f"{call.bucket}: compiling, {name}")
            graphs.compiled[name] = (compiler.compile(served), compiler.compile(tapped))
        return graphs


def _copies(caches: Sequence[KVCache]) -> list[KVCache]:
    return [(key.clone(), value.clone()) for key, value in caches]


def _rows(tensor: torch.Tensor, rows: int, call: Call) -> torch.Tensor:
    """The rows of a result that are no padding; all of one that is not by token."""
    padded = (len(call.inputs[0]), len(call.inputs[-1]))
    return tensor[:rows] if tensor.dim() and len(tensor) in padded else tensor
