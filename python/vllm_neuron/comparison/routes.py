"""A route's way from a captured graph to its outputs, without caches."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_neuron.binding import argument_leaves, find_tensor, memory_of
from vllm_neuron.compiler.arguments import HOST_TARGET, compiler_arguments
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.lowering import lowering_for
from vllm_neuron.route import DEFAULT_LEVELS, Route
from vllm_neuron.runtime.host import HostRuntime

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.runtime.base import DeviceTensor, LoadedModel

__all__ = ["CompiledGraph", "GraphInputs", "RouteCompiler"]

logger = logging.getLogger(__name__)


class GraphInputs:
    """The tensors that a captured graph reads; weights are taken to the runtime once.

    Args:
        runtime: where weights go.
    """

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime
        self._weights: dict[tuple[object, ...], tuple[torch.Tensor, DeviceTensor]] = {}

    def tensors(
        self, graph: CapturedGraph, step: torch.nn.Module, args: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The step's own tensors, in the order of the graph's inputs."""
        leaves = dict(argument_leaves(step, args))
        found = []
        for item in graph.record.inputs:
            tensor = leaves[item.name] if item.kind == "argument" else find_tensor(step, item.name)
            assert tensor is not None, f"the graph reads {item.name}, which the step has not"
            found.append(tensor)
        return found

    def for_runtime(
        self, graph: CapturedGraph, tensors: Sequence[torch.Tensor]
    ) -> list[DeviceTensor | torch.Tensor]:
        """The same for the runtime: weights uploaded, arguments as they are."""
        return [
            tensor if item.kind == "argument" else self._upload(tensor)
            for item, tensor in zip(graph.record.inputs, tensors, strict=True)
        ]

    def _upload(self, weight: torch.Tensor) -> DeviceTensor:
        identity = memory_of(weight)
        if identity not in self._weights:
            self._weights[identity] = (weight, self._runtime.upload(weight.detach()))
        return self._weights[identity][1]


class CompiledGraph:
    """A captured graph, compiled by a route and loaded."""

    def __init__(self, graph: CapturedGraph, model: LoadedModel, inputs: GraphInputs) -> None:
        self.graph = graph
        self._model = model
        self._inputs = inputs

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All outputs of the graph; arguments that it updates are updated."""
        given = self._inputs.for_runtime(self.graph, tensors)
        return [output.read() for output in self._model.execute(given)]

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the step returns."""
        return self.graph.record.rebuild_result(self.outputs(tensors), tensors)


class RouteCompiler:
    """Lowers, compiles and loads graphs by one route, as a server of it does.

    Nothing comes from the caches, which could hide a fault of the code that is there now.

    Args:
        route: the route.
        xla_python: VLLM_NEURON_XLA_PYTHON.
        runtime: where graphs run.
        inputs: the weights there.

    Raises:
        ConfigurationError: the XLA route's worker has no interpreter.
    """

    def __init__(
        self, route: Route, *, xla_python: Path | None, runtime: HostRuntime, inputs: GraphInputs
    ) -> None:
        self.route = route
        self._lowering = lowering_for(route, xla_python=xla_python, logger=logger)
        self._compiler = HostCompiler()
        self._runtime = runtime
        self._inputs = inputs
        self._arguments = compiler_arguments(
            DEFAULT_LEVELS[route], extra=os.environ.get("NEURON_CC_FLAGS"), target=HOST_TARGET
        ).arguments

    def compile(self, graph: CapturedGraph) -> CompiledGraph:
        """Lower, compile and load one graph.

        Raises:
            LoweringError: an operator cannot be lowered.
            CompileError: the compiler failed.
        """
        record = graph.record
        module = self._lowering.lower(graph, bucket=graph.bucket)
        neff = self._compiler.compile(
            module,
            bucket=graph.bucket,
            arguments=self._arguments,
            input_names=[f"input{index}" for index in range(len(record.inputs))],
            output_names=[f"output{index}" for index in range(len(record.outputs))],
        )
        model = self._runtime.load(neff, aliases=record.aliases, bucket=graph.bucket)
        return CompiledGraph(graph, model, self._inputs)

    def close(self) -> None:
        """End the route's child process."""
        self._lowering.close()
