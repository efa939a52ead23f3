"""Makes `x[i]` with an integer tensor `i` of rank 0 an operation on tensors.

PyTorch reads such an index out of the tensor (it has the same result as a Python number: a view),
which no static graph can do. Here the row is gathered instead, and written back where the graph
changes it in place. Works on Dynamo's graph, before AOTAutograd traces it.

Dynamo itself reads the index too, for the shape of the result. A capture has it assume 0
(`unread_indices`). torch.compile as the user calls it cannot: there only indices that are inputs of
the graph are gathered, and others are Dynamo's refusal.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph

__all__ = ["gather_scalar_indices", "unread_indices"]

_IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor")
} | {operator.ipow, operator.ilshift, operator.irshift, operator.setitem}


def _read(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    return tensor[_with_zeros(key)]


def _write(tensor: torch.Tensor, key: Any, value: Any) -> None:
    tensor[_with_zeros(key)] = value


def _with_zeros(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(_with_zeros(item) for item in key)
    return 0 if isinstance(key, torch.Tensor) and key.ndim == 0 and _is_index(key) else key


# What a capture has in its graph for an indexing, by what Python calls.
_READS = (operator.getitem, _read)
_WRITES = (operator.setitem, _write)


@contextmanager
def unread_indices() -> Iterator[None]:
    """While it lasts, Dynamo traces `x[i]` and `x[i] = y` without a look at the value of `i`."""
    create = OutputGraph.create_proxy

    def create_proxy(
        self: Any, kind: str, target: Any, args: Any, kwargs: Any, **options: Any
    ) -> Any:
        if target in (operator.getitem, operator.setitem):
            nodes = fx.node.map_aggregate(
                args, lambda item: item.node if isinstance(item, fx.Proxy) else item
            )
            if _scalar_indices(nodes[0], nodes[1]):
                target = _read if target is operator.getitem else _write
        return create(self, kind, target, args, kwargs, **options)

    OutputGraph.create_proxy = create_proxy
    try:
        yield
    finally:
        OutputGraph.create_proxy = create


def gather_scalar_indices(graph_module: fx.GraphModule) -> None:
    """Rewrite every indexing by an integer tensor of rank 0.

    One whose result is read after its tensor was changed in another way is left as it is, and then
    cannot be traced.

    Args:
        graph_module: a graph of torch functions whose nodes have `example_value`.
    """
    nodes = list(graph_module.graph.nodes)
    changed = False
    for position, node in enumerate(nodes):
        if node.op != "call_function" or node.target not in (*_READS, *_WRITES):
            continue
        base = node.args[0]
        found = _scalar_indices(base, node.args[1])
        if not found:
            continue
        if node.target in _WRITES:
            rows, key = _gathered(graph_module.graph, node, found)
            with graph_module.graph.inserting_before(node):
                graph_module.graph.call_function(operator.setitem, (rows[-1], key, node.args[2]))
                _write_back(graph_module.graph, rows, found)
            graph_module.graph.erase_node(node)
            changed = True
            continue
        writes = _writes(node, nodes[position + 1 :])
        if writes is None:
            node.target = operator.getitem
            changed = True
            continue
        rows, key = _gathered(graph_module.graph, node, found)
        node.target, node.args = operator.getitem, (rows[-1], key)
        for write in writes:
            with graph_module.graph.inserting_before(write.next):
                _write_back(graph_module.graph, rows, found)
        changed = True
    if changed:
        graph_module.graph.lint()
        graph_module.recompile()


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _scalar_indices(base: Any, key: Any) -> list[tuple[int, fx.Node, int]]:
    """Dimension of the base, index, and place in the key of each integer tensor of rank 0."""
    tensor = _value(base)
    if not isinstance(tensor, torch.Tensor):
        return []
    items = list(key) if isinstance(key, tuple) else [key]
    spans = [_span(item) for item in items]
    missing = tensor.ndim - sum(span for span in spans if span is not None)
    found, dimension = [], 0
    for place, (item, span) in enumerate(zip(items, spans, strict=True)):
        if span is None:
            dimension += missing
            continue
        value = _value(item)
        if isinstance(value, torch.Tensor) and value.ndim == 0 and _is_index(value):
            found.append((dimension, item, place))
        dimension += span
    return found


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _span(item: Any) -> int | None:
    """How many dimensions a part of a key takes up; None for an ellipsis."""
    if item is Ellipsis:
        return None
    if item is None or isinstance(item, bool):
        return 0
    value = _value(item)
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
        return value.ndim
    return 1


def _gathered(
    graph: fx.Graph, node: fx.Node, found: Sequence[tuple[int, fx.Node, int]]
) -> tuple[list[fx.Node], Any]:
    """The base, narrowed to one element of each indexed dimension in turn, and a key for the last.

    The key has 0 for those indices.
    """
    base, key = node.args[:2]
    items = list(key) if isinstance(key, tuple) else [key]
    rows = [base]
    with graph.inserting_before(node):
        for dimension, index, place in found:
            flat = graph.call_method("reshape", (index, 1))
            rows.append(
                graph.call_function(
                    torch.ops.aten.index.Tensor, (rows[-1], [None] * dimension + [flat])
                )
            )
            items[place] = 0
    return rows, tuple(items) if isinstance(key, tuple) else items[0]


def _write_back(
    graph: fx.Graph, rows: Sequence[fx.Node], found: Sequence[tuple[int, fx.Node, int]]
) -> None:
    """At the insertion point, put the narrowed tensors into those that they were taken from."""
    for step in reversed(range(len(found))):
        dimension, index, _ = found[step]
        flat = graph.call_method("reshape", (index, 1))
        key = [None] * dimension + [flat]
        graph.call_function(torch.ops.aten.index_put_.default, (rows[step], key, rows[step + 1]))


def _writes(node: fx.Node, later: Sequence[fx.Node]) -> list[fx.Node] | None:
    """The nodes that change the result of an indexing in place.

    None if a node reads the result after its tensor was changed in another way: the two are copies
    of each other after the rewriting, and would differ.
    """
    storage = _value(node).untyped_storage()._cdata
    same = {node}
    writes: list[fx.Node] = []
    stale = False
    for other in later:
        uses = not same.isdisjoint(other.all_input_nodes)
        if uses and stale:
            return None
        target = _written(other)
        if target is not None and _storage(target) == storage:
            if target in same:
                writes.append(other)
            else:
                stale = True
        if uses and _storage(other) == storage:
            same.add(other)
    return writes


def _storage(node: Any) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _written(node: fx.Node) -> Any:
    """What a node changes in place, or None."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_function" and (node.target in _IN_PLACE or node.target is _write):
        return node.args[0]
    if node.kwargs.get("out") is not None:
        return node.kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__")
    if node.op in ("call_method", "call_function") and in_place and node.args:
        return node.args[0]
    return None
