"""Which operator of a part of a graph a route computes otherwise than PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from vllm_neuron.binding import spec_of
from vllm_neuron.capture import CapturedGraph
from vllm_neuron.comparison.measures import Difference, difference
from vllm_neuron.comparison.routes import RouteCompiler
from vllm_neuron.dynamo_trace import source_line

__all__ = ["OperatorFault", "find_operator", "module_of"]


@dataclass(frozen=True, slots=True)
class OperatorFault:
    """An operator whose result is another one than PyTorch's, from the very same operands.

    Attributes:
        operator: its ATen name.
        module: the module of the model that it is in; None if it is in none.
        source: `file:line` of the model's code, or None.
        difference: of the route's result from PyTorch's.
    """

    operator: str
    module: str | None
    source: str | None
    difference: Difference


def find_operator(
    compiler: RouteCompiler,
    graph: CapturedGraph,
    tensors: Sequence[torch.Tensor],
    *,
    place: str | None,
    places: Sequence[str],
    tolerance: float,
) -> OperatorFault | None:
    """Find the first operator at fault in one part of a graph.

    The graph is compiled again with each value of that part, and each that comes into it, as an
    output. Then PyTorch computes it operator by operator, but goes on from the values that the
    route had: so the difference at an operator is its own and not that of operators before it.

    Args:
        compiler: of the route.
        graph: the captured graph.
        tensors: its inputs; left as they are.
        place: the module whose operators are looked at; None for those outside of all `places`.
        places: the modules that graphs are cut at.
        tolerance: relative difference of an operator at fault.

    Returns:
        None if no single operator of the part is beyond the tolerance.
    """
    nodes = _looked_at(graph.graph_module.graph, place, places)
    tapped, position = _with_outputs(graph, nodes)
    compiled = compiler.compile(tapped)
    outputs = compiled.outputs(_copies(graph, tensors))
    found = {name: outputs[index] for name, index in position.items()}
    check = _OwnDifferences(graph.graph_module, found)
    with torch.no_grad():
        check.run(*_copies(graph, tensors))
    for node in nodes:
        own = check.differences[node.name]
        if own.exceeds(tolerance):
            made_by = _maker(node)
            return OperatorFault(
                str(made_by.target), module_of(made_by), source_line(made_by.stack_trace), own
            )
    return None


def module_of(node: fx.Node) -> str | None:
    """Name, in vLLM's model, of the module whose code made a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return None
    name = str(stack[-1][0]).removeprefix("L['self'].model").lstrip(".")
    return name or None


class _OwnDifferences(fx.Interpreter):
    """Computes a graph by PyTorch, taking over the route's value wherever there is one."""

    def __init__(self, module: fx.GraphModule, found: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module)
        self._found = found
        self.differences: dict[str, Difference] = {}

    def run_node(self, n: fx.Node) -> Any:
        expected = super().run_node(n)
        if n.name not in self._found:
            return expected
        found = self._found[n.name]
        self.differences[n.name] = difference(found, expected)
        return found


def _looked_at(graph: fx.Graph, place: str | None, places: Sequence[str]) -> list[fx.Node]:
    """The computing nodes of a place, and those outside that it reads, in the graph's order."""

    def is_inside(node: fx.Node) -> bool:
        name = module_of(node) or ""
        if place is not None:
            return _is_in(name, place)
        return not any(_is_in(name, other) for other in places)

    inside = [node for node in graph.nodes if node.op == "call_function" and is_inside(node)]
    wanted = {node for node in inside if _is_computed(node)}
    for node in inside:
        wanted |= {source for source in map(_origin, node.all_input_nodes) if _is_computed(source)}
    return [node for node in graph.nodes if node in wanted]


def _is_in(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _maker(node: fx.Node) -> fx.Node:
    """The operator that computed a value: of one result of several, the operator itself."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    source = node.args[0] if not is_operator and node.args else node
    return source if isinstance(source, fx.Node) else node


def _origin(node: fx.Node) -> fx.Node:
    """What a view shows, through any number of views."""
    while node.op == "call_function" and (_is_view(node) or _is_view(_maker(node))):
        node = node.all_input_nodes[0]
    return node


def _is_computed(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and not value.is_complex()
        and not _is_view(_maker(node))
    )


def _with_outputs(
    graph: CapturedGraph, nodes: Sequence[fx.Node]
) -> tuple[CapturedGraph, dict[str, int]]:
    """A graph with the values of some nodes as further outputs, and where these are."""
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.graph_module.graph.nodes:
        values[node] = copied.node_copy(node, values.__getitem__)
    output = graph.graph_module.graph.output_node()
    produced: Any = output.args[0]
    results = list(produced)
    count = len(results)
    position = {node.name: index for index, node in enumerate(results)}
    added = [node for node in nodes if node.name not in position]
    position |= {node.name: count + index for index, node in enumerate(added)}
    values[output].args = (tuple(values[node] for node in (*results, *added)),)
    record = dataclasses.replace(
        graph.record,
        outputs=(*graph.record.outputs, *(spec_of(node.meta["val"]) for node in added)),
    )
    module = fx.GraphModule(graph.graph_module, copied)
    wanted = {node.name for node in nodes}
    return (
        CapturedGraph(module, record, graph.bucket),
        {name: index for name, index in position.items() if name in wanted},
    )


def _copies(graph: CapturedGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs, with copies of those that the graph updates."""
    updated = set(graph.record.aliases.values())
    return [item.clone() if index in updated else item for index, item in enumerate(tensors)]
