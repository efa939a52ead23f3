"""Small FX graphs built by hand, so that a golden value depends on nothing but the key format."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def value(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    stride: tuple[int, ...] | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    """Return what stands in a placeholder's meta['val']."""
    dense = torch.empty(shape, dtype=dtype, device=device)
    return dense if stride is None else dense.as_strided(shape, stride)


@dataclass(frozen=True)
class Parts:
    """Everything that `two_ops` is made of; each field is one thing that a key depends on."""

    x: Any = field(default_factory=lambda: value(2, 3))
    w: Any = field(default_factory=lambda: value(2, 3))
    first: Callable[..., Any] = aten.add.Tensor
    second: Callable[..., Any] = aten.sum.dim_IntList
    scale: Any = 1
    dims: Any = (1,)
    keywords: tuple[tuple[str, Any], ...] = (("keepdim", True), ("dtype", torch.float32))
    constant: Any = field(default_factory=lambda: torch.tensor([1.0, -0.0, 2.5]))
    results: tuple[str | None, ...] = ("total", None, "sum")
    operands: tuple[str, str] = ("x", "w")
    names: dict[str, str] = field(default_factory=dict)
    extra_placeholder: bool = False


def two_ops(**changes: Any) -> fx.GraphModule:
    """Return: total = first(x, w, alpha=scale) * constant; sum = second(total, dims, ...)."""
    parts = replace(Parts(), **changes)

    def name(plain: str) -> str:
        return parts.names.get(plain, plain)

    graph = fx.Graph()
    nodes: dict[str | None, Any] = {None: None}
    for plain, val in (("x", parts.x), ("w", parts.w)):
        nodes[plain] = graph.placeholder(name(plain))
        nodes[plain].meta["val"] = val
    if parts.extra_placeholder:
        graph.placeholder("unused").meta["val"] = value(1)
    constant = graph.get_attr(name("constant"))
    operands = tuple(nodes[operand] for operand in parts.operands)
    added = graph.create_node(
        "call_function", parts.first, operands, {"alpha": parts.scale}, name("added")
    )
    nodes["total"] = graph.create_node(
        "call_function", aten.mul.Tensor, (added, constant), {}, name("total")
    )
    nodes["sum"] = graph.create_node(
        "call_function",
        parts.second,
        (nodes["total"], list(parts.dims)),
        dict(parts.keywords),
        name("sum"),
    )
    graph.output(tuple(nodes[result] for result in parts.results))
    root = torch.nn.Module()
    root.register_buffer(name("constant"), parts.constant)
    return fx.GraphModule(root, graph)


def call(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> fx.GraphModule:
    """Return a graph of one placeholder and one call on it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value(2)
    node = graph.call_function(target, (x,))
    graph.output((node,))
    graph_module = fx.GraphModule(torch.nn.Module(), graph)
    # After the code was generated: not every argument that a graph can hold can be printed.
    node.args, node.kwargs = (x, *args), kwargs or {}
    return graph_module


def every_argument() -> fx.GraphModule:
    """Return a graph with every kind of argument that has a canonical form."""
    return call(
        aten.add.Tensor,
        (
            None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**70, -(2**70),
            0.0, -0.0, 1.5, float("inf"), complex(1, -2), "text \u00e9", b"\x00bytes",
            [1, [2.0]], (3, ()), torch.Size([4, 5]), {"b": 1, "a": [None]},
            slice(None, 7, 2), ..., torch.bfloat16, torch.strided, torch.channels_last,
            torch.device("cpu", 0), aten.relu.default, operator.getitem,
        ),
    )  # fmt: skip


def branches(*, same: bool = True, inner: Callable[..., Any] = aten.sin.default) -> fx.GraphModule:
    """Return two `cond` calls whose first branches are one module, or two equal ones."""

    def branch(op: Callable[..., Any]) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output((graph.call_function(op, (graph.placeholder("a"),)),))
        return fx.GraphModule(torch.nn.Module(), graph)

    root = torch.nn.Module()
    root.true_graph_0, root.false_graph_0 = branch(inner), branch(aten.cos.default)
    root.true_graph_1 = root.true_graph_0 if same else branch(inner)
    graph = fx.Graph()
    predicate, x = graph.placeholder("p"), graph.placeholder("x")
    predicate.meta["val"], x.meta["val"] = value(dtype=torch.bool), value(2, 2)
    results = []
    for true_graph in ("true_graph_0", "true_graph_1"):
        cond = graph.call_function(
            torch.ops.higher_order.cond,
            (predicate, graph.get_attr(true_graph), graph.get_attr("false_graph_0"), (x,)),
        )
        results.append(graph.call_function(operator.getitem, (cond, 0)))
    graph.output(tuple(results))
    return fx.GraphModule(root, graph)


def views() -> fx.GraphModule:
    """Return a graph of constants: two views of one storage, a strided one, one object twice."""
    base = torch.arange(6, dtype=torch.int64)
    root = torch.nn.Module()
    root.head, root.tail = base[:3], base[3:]
    root.columns = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
    root.empty = torch.empty(0)
    graph = fx.Graph()
    names = ("head", "tail", "columns", "head", "empty")
    graph.output(tuple(graph.get_attr(name) for name in names))
    return fx.GraphModule(root, graph)


GOLDEN = {
    "two_ops": two_ops,
    "every_argument": every_argument,
    "branches": branches,
    "views": views,
}
