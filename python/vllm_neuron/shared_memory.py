"""Tensors that lie in one memory, and a graph whose inputs do.

A compiled graph reads each input as a tensor of its own and writes it back afterwards. Where inputs
overlap and one is updated, the others must see that: `join_inputs` has the graph put them together
in one tensor first, work on views of it, and write every input back from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

__all__ = ["Overlap", "join_inputs", "overlaps", "separate"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tensors whose spans of one storage overlap, directly or through others.

    Attributes:
        start: the first element of the storage that one of them has, in elements of `dtype`.
        stop: the element after the last.
        members: which tensors, in order.
        dtype: their dtype, or None if they differ.
    """

    start: int
    stop: int
    members: tuple[int, ...]
    dtype: torch.dtype | None


def overlaps(tensors: Sequence[Any]) -> list[Overlap]:
    """Find the tensors that overlap; what is no tensor, or is empty, is passed over.

    Tensors that alternate in memory count too, since only the spans are compared.
    """
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * stride for size, stride in steps)
            width = tensor.dtype.itemsize
            start = tensor.storage_offset() * width
            storage = tensor.untyped_storage()._cdata
            spans.setdefault(storage, []).append((start, start + length * width, index))
    found = []
    for members in spans.values():
        group: list[int] = []
        low = high = 0
        for start, stop, index in [*sorted(members), (-1, -1, -1)]:
            if group and 0 <= start < high:
                group.append(index)
                high = max(high, stop)
                continue
            if len(group) > 1:
                found.append(_overlap(tensors, low, high, group))
            group, low, high = [index], start, stop
    return sorted(found, key=lambda overlap: overlap.members)


def _overlap(tensors: Sequence[torch.Tensor], low: int, high: int, group: list[int]) -> Overlap:
    dtypes = {tensors[index].dtype for index in group}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    width = 1 if dtype is None else dtype.itemsize
    return Overlap(low // width, high // width, tuple(sorted(group)), dtype)


def separate(examples: Sequence[Any], mode: Any, *, every: bool = False) -> list[Any]:
    """Fake inputs with memories of their own, where the given ones overlap.

    Args:
        examples: the inputs of a graph of Dynamo's.
        mode: fake tensor mode of the trace.
        every: replace the others too.
    """
    members = {index for overlap in overlaps(examples) for index in overlap.members}
    apart = list(examples)
    for index, tensor in enumerate(examples):
        if isinstance(tensor, torch.Tensor) and (every or index in members):
            with mode:
                fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            apart[index] = fresh.requires_grad_(tensor.requires_grad)
    return apart


def join_inputs(graph_module: fx.GraphModule, tensors: Sequence[Any]) -> bool:
    """Rewrite a graph of torch functions so that its overlapping inputs see each other's updates.

    Args:
        graph_module: Dynamo's graph; it is changed.
        tensors: its inputs, which say what overlaps.

    Returns:
        False, with the graph unchanged, if nothing overlaps, or the overlapping tensors differ in
        dtype or take part in gradients.
    """
    found = overlaps(tensors)
    shared = [tensors[index] for overlap in found for index in overlap.members]
    if (
        not found
        or any(overlap.dtype is None for overlap in found)
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in shared))
    ):
        return False
    graph = graph_module.graph
    inputs = list(graph.find_nodes(op="placeholder"))
    views: dict[fx.Node, fx.Node] = {}
    with graph.inserting_after(inputs[-1]):
        # The end of the inputs; what is inserted before it comes in order.
        mark = graph.call_function(torch.empty, (0,))
    with graph.inserting_before(mark):
        for overlap in found:
            base = graph.call_function(
                torch.empty, (overlap.stop - overlap.start,), {"dtype": overlap.dtype}
            )
            for index in overlap.members:
                tensor, node = tensors[index], inputs[index]
                strides = tensor.stride()
                # Of elements that lie in one place, the first: a copy to all is refused.
                shape = tuple(
                    size if stride else min(size, 1)
                    for size, stride in zip(tensor.shape, strides, strict=True)
                )
                for dimension, size in enumerate(shape):
                    if size != tensor.shape[dimension]:
                        node = graph.call_method("narrow", (node, dimension, 0, 1))
                where = (base, shape, strides, tensor.storage_offset() - overlap.start)
                graph.call_method("copy_", (graph.call_function(torch.as_strided, where), node))
            for index in overlap.members:
                tensor = tensors[index]
                where = (
                    base,
                    tuple(tensor.shape),
                    tensor.stride(),
                    tensor.storage_offset() - overlap.start,
                )
                views[inputs[index]] = graph.call_function(torch.as_strided, where)
    _use_views(graph, mark, views)
    graph.erase_node(mark)
    graph_module.recompile()
    return True


def _use_views(graph: fx.Graph, mark: fx.Node, views: dict[fx.Node, fx.Node]) -> None:
    """Put views in the place of inputs in all that follows `mark`, and write inputs back."""
    after = False
    for node in list(graph.nodes):
        after = after or node is mark
        if after and node.op != "output":
            node.args = fx.node.map_arg(node.args, lambda item: views.get(item, item))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda item: views.get(item, item))
    with graph.inserting_before(graph.output_node()):
        for node, view in views.items():
            size, strides = view.args[1], view.args[2]
            # What repeats its own elements (stride 0) cannot be written; its memory is others' too.
            if all(stride or length == 1 for length, stride in zip(size, strides, strict=True)):
                graph.call_method("copy_", (node, view))
