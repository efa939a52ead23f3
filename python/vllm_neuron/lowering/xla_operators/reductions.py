"""Reductions, scans and searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_neuron.lowering.failure import LoweringFailure
from vllm_neuron.lowering.xla_operators.registry import Node, aten, full, lowers

# PyTorch/XLA takes an empty list of dimensions at its word; to eager it means all of them.


@lowers("sum.dim_IntList")
def _sum(node: Node, self: Any, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return aten.sum.dim_IntList(self, dim or list(range(self.ndim)), keepdim, dtype=dtype)


@lowers("mean.dim")
def _mean(node: Node, self: Any, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return aten.mean.dim(self, dim or list(range(self.ndim)), keepdim, dtype=dtype)


@lowers("amax.default", "amin.default")
def _extreme(node: Node, self: Any, dim: Any, keepdim: bool) -> torch.Tensor:
    function = aten.amax.default if node["op"] == "aten.amax.default" else aten.amin.default
    return function(self, dim or list(range(self.ndim)), keepdim)


@lowers("_softmax.default", "_log_softmax.default")
def _softmax(node: Node, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    is_log = node["op"] == "aten._log_softmax.default"
    if not self.ndim:
        return self - self if is_log else torch.exp(self - self)
    function = aten._log_softmax.default if is_log else aten._softmax.default
    return function(self, dim, half_to_float)


@lowers("_int_mm.default")
def _int_mm(node: Node, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    return torch.mm(self.to(torch.int32), mat2.to(torch.int32))


@lowers("searchsorted.Tensor")
def _searchsorted(
    node: Node,
    sequence: torch.Tensor,
    self: torch.Tensor,
    out_int32: bool,
    right: bool,
    side: str | None,
    sorter: torch.Tensor | None,
) -> torch.Tensor:
    if sorter is not None:
        raise LoweringFailure("a sorter is not supported; sort the sequence")
    bounds = sequence.unsqueeze(-2 if sequence.ndim > 1 else 0)
    value = self.unsqueeze(-1)
    # As eager's binary search compares, with NaN behind everything.
    before = (bounds > value) if right or side == "right" else (bounds >= value)
    counts = torch.sum(~before, -1)
    return counts.to(torch.int32) if out_int32 else counts


@lowers("bucketize.Tensor")
def _bucketize(
    node: Node, self: torch.Tensor, bounds: torch.Tensor, out_int32: bool, right: bool
) -> torch.Tensor:
    return _searchsorted(node, bounds, self, out_int32, right, None, None)


def _first_extreme(
    self: torch.Tensor, dim: int, *, is_max: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest or least along a dimension and its first index; NaN is both, as in eager."""
    values = self.to(torch.int32) if self.dtype in (torch.bool, torch.uint8) else self
    function = aten.amax.default if is_max else aten.amin.default
    extreme = function(values, [dim], True)
    holds = values == extreme
    if values.is_floating_point():
        holds = holds | torch.isnan(values)
    size = values.shape[dim]
    shape = [1] * values.ndim
    shape[dim] = size
    places = torch.arange(size, device=values.device).reshape(shape).expand(values.shape)
    first = aten.amin.default(torch.where(holds, places, full(size, torch.int64)), [dim], True)
    return extreme.to(self.dtype), first


@lowers("argmax.default", "argmin.default")
def _arg_extreme(node: Node, self: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    shape = list(self.shape)
    if dim is None or not self.ndim:
        self, dim, shape = self.reshape(-1), 0, [1] * self.ndim
    else:
        shape[dim] = 1
    _, first = _first_extreme(self, dim, is_max=node["op"] == "aten.argmax.default")
    if keepdim:
        return first.reshape(shape)
    return first.squeeze(dim)


@lowers("max.dim", "min.dim")
def _extreme_with_index(node: Node, self: torch.Tensor, dim: int, keepdim: bool) -> Any:
    if not self.ndim:
        return self, torch.zeros_like(self, dtype=torch.int64)
    found = _first_extreme(self, dim, is_max=node["op"] == "aten.max.dim")
    return found if keepdim else tuple(item.squeeze(dim) for item in found)


@lowers("sort.default", "sort.stable")
def _sort(node: Node, self: torch.Tensor, *options: Any) -> Any:
    dim, descending = options[-2:]
    if not self.ndim:
        return self, torch.zeros_like(self, dtype=torch.int64)
    return aten.sort.stable(self, stable=True, dim=dim, descending=descending)


@lowers("cumsum.default")
def _cumsum(node: Node, self: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
    self = self.to(getattr(torch, node["results"][0][1]))
    return aten.cumsum.default(self, dim) if self.ndim and self.numel() else self


@lowers("cumprod.default")
def _cumprod(node: Node, self: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
    self = self.to(getattr(torch, node["results"][0][1]))
    if not self.ndim or not self.numel():
        return self
    # Each round multiplies with what lies twice as far back.
    size, reach = self.shape[dim], 1
    while reach < size:
        ones = torch.ones_like(self.narrow(dim, 0, reach))
        self = self * torch.cat([ones, self.narrow(dim, 0, size - reach)], dim)
        reach *= 2
    return self


@lowers("cummax.default", "cummin.default")
def _cumulative_extreme(node: Node, self: torch.Tensor, dim: int) -> Any:
    if not self.ndim:
        return self, torch.zeros_like(self, dtype=torch.int64)
    is_max = node["op"] == "aten.cummax.default"
    combine = torch.maximum if is_max else torch.minimum
    values = _running(self, dim, combine)
    # The index of the last place that holds the running value.
    shape = [1] * self.ndim
    shape[dim] = self.shape[dim]
    places = torch.arange(self.shape[dim], device=self.device).reshape(shape).expand(self.shape)
    holds = self == values
    if self.is_floating_point():
        holds = holds | torch.isnan(self)
    places = torch.where(holds, places, torch.zeros_like(places))
    return values, _running(places, dim, torch.maximum)


def _running(
    self: torch.Tensor, dim: int, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The running maximum or minimum, in rounds that look twice as far back each."""
    size, reach = self.shape[dim], 1
    kept = self.to(torch.int32) if self.dtype in (torch.bool, torch.uint8) else self
    while reach < size:
        shifted = kept.narrow(dim, 0, size - reach)
        kept = combine(kept, torch.cat([kept.narrow(dim, 0, reach), shifted], dim))
        reach *= 2
    return kept.to(self.dtype)
