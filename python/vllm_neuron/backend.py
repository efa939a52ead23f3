"""The torch.compile backends: `neuron_native` and, for the XLA route, `vllm_neuron`.

`torch.compile(model, backend=...)` sends each graph the whole way of a route (AOTAutograd,
lowering, the host emulator's compiler and runtime) and runs it on CPU tensors, so that a person
can try a model outside vLLM. The server does not come through here: it captures whole
steps (`capture`) and keeps weights and KV caches on the device.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from vllm_neuron.binding import spec_of
from vllm_neuron.capture import CapturedGraph
from vllm_neuron.dynamo_trace import refusal, refuse_data_dependent_sizes
from vllm_neuron.envs import read_settings
from vllm_neuron.lowering import lowering_for
from vllm_neuron.lowering.decompositions import decomposition_table, finish_decomposition
from vllm_neuron.lowering.graph_message import lowering_error
from vllm_neuron.lowering.scalar_index import gather_scalar_indices
from vllm_neuron.lowering.trace_state import kept_state, without_inference_mode
from vllm_neuron.route import DEFAULT_LEVELS, Route
from vllm_neuron.shared_memory import join_inputs, overlaps, separate
from vllm_neuron.trace_record import GraphInput, TraceRecord

if TYPE_CHECKING:
    from vllm_neuron.compiler.host import HostCompiler
    from vllm_neuron.lowering.module import Lowering
    from vllm_neuron.runtime.base import LoadedModel
    from vllm_neuron.runtime.host import HostRuntime

__all__ = ["neuron_native", "vllm_neuron"]

logger = logging.getLogger(__name__)

aten = torch.ops.aten

# Random operators that fill a tensor and look only at the shape and dtype of their operand.
_FILLS = {
    aten.bernoulli.p,
    aten.cauchy.default,
    aten.exponential.default,
    aten.geometric.default,
    aten.log_normal.default,
    aten.normal_functional.default,
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn_like.default,
    aten.random.default,
    getattr(aten.random, "from"),
    aten.random.to,
    aten.uniform.default,
}

_BACKENDS = {Route.NATIVE: "neuron_native", Route.XLA: "vllm_neuron"}

_numbers = itertools.count()


def neuron_native(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Compile one graph by the native route for the host emulator.

    Tensors that the graph updates in place are updated; random numbers come from torch's generator,
    in the order of eager.

    Args:
        gm: Dynamo's graph.
        example_inputs: its fake inputs.
        options: `mode` and `options` of torch.compile; only the defaults mean something here.

    Raises:
        CaptureError: a dimension is dynamic.
        LoweringError: an operator cannot be lowered.
        CompileError: the host compiler failed.
    """
    return _compile_graph(gm, example_inputs, Route.NATIVE, options)


def vllm_neuron(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """The same by the XLA route, which is deprecated.

    Raises:
        ConfigurationError: there is no interpreter for the XLA route's worker.
    """
    return _compile_graph(gm, example_inputs, Route.XLA, options)


def _compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    route: Route,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    name = f"graph_{next(_numbers)}"
    ignored = [key for key, value in options.items() if value not in (None, "default", {})]
    if ignored:
        logger.warning(
            "torch.compile(backend='%s'): %s has no effect on the Neuron %s route",
            _BACKENDS[route],
            " and ".join(sorted(ignored)),
            route,
        )
    for index, value in enumerate(example_inputs):
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise refusal(
                name,
                f"input {index} has a dynamic dimension",
                "Neuron graphs have static shapes: pass dynamic=False to torch.compile.",
            )
    gather_scalar_indices(gm)
    without_inference_mode(gm)
    return _Graph(gm, example_inputs, name, route)


class _Graph:
    """A graph of Dynamo's, compiled once for each way in which its inputs share memory.

    Dynamo does not guard that (pytorch/pytorch#139789): without this, a graph compiled for separate
    tensors would be run on overlapping ones, whose updates each other must see.
    """

    def __init__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], name: str, route: Route
    ) -> None:
        self._gm = gm
        self._route = route
        self._name = name
        self._updates_inputs = False
        mode = detect_fake_mode(example_inputs)
        self._every_example = separate(example_inputs, mode, every=True)
        self._apart = self._compiled(gm, separate(example_inputs, mode))
        self._joined: dict[Any, Callable[..., Any]] = {}

    def _compiled(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler = functools.partial(self._compile, name=self._name)
        compiled = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=functools.partial(
                _compile, name=f"{self._name}_backward", route=self._route
            ),
            inference_compiler=compiler,
            decompositions=decomposition_table(),
            keep_inference_input_mutations=True,
        )
        with kept_state():
            return compiled(gm, list(inputs))

    def _compile(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, name: str
    ) -> Callable[[list[Any]], list[Any]]:
        copies = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
        self._updates_inputs |= bool(copies)
        return _compile(gm, example_inputs, name=name, route=self._route)

    def _compiled_jointly(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile for inputs that share memory as these do."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self._gm.graph, {}))
        gm = torch.fx.GraphModule(self._gm, graph)
        if join_inputs(gm, inputs):
            return self._compiled(gm, self._every_example)
        return self._compiled(self._gm, inputs)

    def __call__(self, *args: Any) -> Any:
        if not self._updates_inputs:
            return self._apart(*args)
        found = overlaps(args)
        if not found:
            return self._apart(*args)
        sharing = tuple(
            (item.start, *((index, args[index].storage_offset()) for index in item.members))
            for item in found
        )
        if sharing not in self._joined:
            self._joined[sharing] = self._compiled_jointly(args)
        return self._joined[sharing](*args)


@functools.cache
def _host() -> tuple[HostCompiler, HostRuntime]:
    from vllm_neuron.compiler.host import HostCompiler
    from vllm_neuron.runtime.host import HostRuntime

    return HostCompiler(), HostRuntime()


@functools.cache
def _lowering(route: Route) -> Lowering:
    python = read_settings()["VLLM_NEURON_XLA_PYTHON"]
    return lowering_for(route, xla_python=python, logger=logger)


def _compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, name: str, route: Route
) -> Callable[[list[Any]], list[Any]]:
    """AOTAutograd's compiler: a functional graph, plus `copy_` into inputs, becomes a callable."""
    del example_inputs
    plan = _plan(gm, name, route)
    if not plan.captured.record.outputs:
        return _boxed(functools.partial(_run, plan, None))
    # AOTAutograd calls with its fake tensor mode on; literals of the graph are real tensors.
    with unset_fake_temporarily():
        return _boxed(functools.partial(_run, plan, _load(plan.captured, name, route)))


def _load(captured: CapturedGraph, name: str, route: Route) -> LoadedModel:
    from vllm_neuron.compiler.arguments import HOST_TARGET, compiler_arguments

    compiler, runtime = _host()
    lowered = _lowering(route).lower(captured, bucket=name)
    arguments = compiler_arguments(
        DEFAULT_LEVELS[route], extra=os.environ.get("NEURON_CC_FLAGS"), target=HOST_TARGET
    ).arguments
    neff = compiler.compile(
        lowered,
        bucket=name,
        arguments=arguments,
        input_names=[item.name for item in captured.record.inputs],
        output_names=[f"output{index}" for index in range(len(lowered.outputs))],
    )
    return runtime.load(neff, aliases=lowered.aliases, bucket=name)


def _boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Mark a function for AOTAutograd as one that takes its arguments in a list."""

    def run(args: list[Any]) -> list[Any]:
        return function(args)

    run._boxed_call = True
    return run


@dataclass(frozen=True, slots=True)
class _Plan:
    """What surrounds the compiled graph at each call.

    Attributes:
        captured: the graph to lower. Its inputs are the call's arguments, then the noise.
        noise: draw the random tensors, in the order of eager.
        returned: for each result of the call its kind and index or value: `output`, `input` or
            `const`.
    """

    captured: CapturedGraph
    noise: tuple[Callable[[], torch.Tensor], ...]
    returned: tuple[tuple[str, Any], ...]


def _run(plan: _Plan, model: LoadedModel | None, args: list[Any]) -> list[Any]:
    tensors = [*args, *(draw() for draw in plan.noise)]
    outputs = model.execute(tensors) if model is not None else []
    results = []
    for kind, value in plan.returned:
        if kind == "output":
            results.append(outputs[value].read())
        else:
            results.append(tensors[value] if kind == "input" else value)
    return results


def _plan(gm: torch.fx.GraphModule, name: str, route: Route) -> _Plan:
    graph = gm.graph
    refuse_data_dependent_sizes(graph, name)
    finish_decomposition(graph)
    inputs = list(graph.find_nodes(op="placeholder"))
    noise = []
    for node in list(graph.nodes):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in target.tags
        ):
            noise.append(_draw(node, name, route))
            # Of a graph without inputs the first node; inserting_after(None) would mean the end.
            first = next(iter(graph.nodes))
            with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(first):
                drawn = graph.placeholder(f"noise_{len(noise)}")
            drawn.meta["val"] = node.meta["val"]
            inputs.append(drawn)
            node.replace_all_uses_with(drawn)
            graph.erase_node(node)
    outputs, aliases = [], {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        updated, value = node.args[:2]
        if updated.op != "placeholder":
            raise lowering_error(
                name, node, "it updates a tensor that is not an input", route=route
            )
        aliases[len(outputs)] = inputs.index(updated)
        outputs.append(value)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    returned: list[tuple[str, Any]] = []
    for value in graph.output_node().args[0]:
        if not isinstance(value, torch.fx.Node):
            returned.append(("const", value))
        elif value.op == "placeholder":
            returned.append(("input", inputs.index(value)))
        else:
            # An updated value that is returned too is a tensor of its own.
            returned.append(("output", len(outputs)))
            outputs.append(value)
    graph.output_node().args = (tuple(outputs),)
    graph.eliminate_dead_code()
    gm.recompile()
    record = TraceRecord(
        inputs=tuple(
            GraphInput("argument", f"input{index}", spec_of(node.meta["val"]))
            for index, node in enumerate(inputs)
        ),
        outputs=tuple(spec_of(node.meta["val"]) for node in outputs),
        aliases=aliases,
        result=["const", None],
        sources={},
    )
    return _Plan(CapturedGraph(gm, record, name), tuple(noise), tuple(returned))


def _draw(node: torch.fx.Node, name: str, route: Route) -> Callable[[], torch.Tensor]:
    """What makes one random tensor with torch's own generator.

    Raises:
        LoweringError: the distribution depends on values that the graph computes.
    """
    args, kwargs, like = list(node.args), dict(node.kwargs), None
    if node.target in _FILLS:
        example = args[0].meta["val"]
        like = (tuple(example.shape), example.dtype)
        args = args[1:]
    if any(isinstance(item, torch.fx.Node) for item in [*args, *kwargs.values()]):
        raise lowering_error(
            name,
            node,
            "its distribution depends on tensors, so its numbers cannot be drawn before the graph; "
            "draw uniform or exponential noise and compute with it",
            route=route,
        )

    def draw() -> torch.Tensor:
        if like is None:
            return node.target(*args, **kwargs)
        shape, dtype = like
        return node.target(torch.empty(shape, dtype=dtype), *args, **kwargs)

    return draw
