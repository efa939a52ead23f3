"""Writes under masks, and scattering with a reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch_xla.core import xla_builder as xb

from vllm_neuron.lowering.failure import LoweringFailure
from vllm_neuron.lowering.xla_operators.registry import (
    Node,
    apply_xla,
    aten,
    full,
    lowers,
    xla_type,
)


@lowers("index_put.default", "_unsafe_index_put.default")
def _index_put(
    node: Node, self: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    masks = [index for index in indices if index is not None and index.dtype == torch.bool]
    if not masks:
        return aten.index_put.default(self, indices, values, accumulate)
    if len(masks) > 1 or indices[0] is not masks[0] or len(indices) > 1:
        raise LoweringFailure("a boolean mask is supported as the only and first index")
    mask = masks[0]
    rest = list(self.shape[mask.ndim :])
    wide_mask = mask.reshape([*mask.shape, *[1] * len(rest)])
    if values.ndim > len(rest) and values.shape[0] != 1:
        # The k-th true place takes row k.
        values = _rows_at(mask, values)
    written = values + self if accumulate else values.expand(self.shape)
    return torch.where(wide_mask, written, self)


@lowers("masked_scatter.default")
def _masked_scatter(
    node: Node, self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    self, mask = torch.broadcast_tensors(self, mask)
    return torch.where(mask, _rows_at(mask, source.reshape(-1)), self)


def _rows_at(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each place of the mask the row of its turn among the true places."""
    turn = torch.cumsum(mask.reshape(-1).to(torch.int64), 0) - 1
    turn = torch.minimum(torch.maximum(turn, full(0, turn.dtype)), full(len(rows) - 1, turn.dtype))
    return rows[turn].reshape([*mask.shape, *rows.shape[1:]])


_COMBINE = {
    "sum": lambda x, y: x + y,
    "prod": lambda x, y: x * y,
    "mean": lambda x, y: x + y,
    "amax": lambda x, y: x.max(y),
    "amin": lambda x, y: x.min(y),
}


def _identity(reduce: str, dtype: torch.dtype) -> int | float:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return float("-inf") if reduce == "amax" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


def _scatter(
    base: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str
) -> torch.Tensor:
    """Combine the elements of `source` into `base` at `index` along `dim`."""
    source = source[tuple(slice(size) for size in index.shape)]
    places = []
    for axis, size in enumerate(index.shape):
        if axis == dim:
            places.append(torch.where(index < 0, index + base.shape[dim], index))
        else:
            steps = torch.arange(size, device=base.device)
            shape = [size if i == axis else 1 for i in range(index.ndim)]
            places.append(steps.reshape(shape).expand(index.shape))
    where = torch.stack(places, -1).reshape(-1, index.ndim)
    kind = xb.mkshape(xla_type(base.dtype), ())
    combine = xb.create_computation(f"combine_{reduce}", _COMBINE[reduce], (kind, kind))

    def scatter(operand: xb.Op, indices: xb.Op, updates: xb.Op) -> xb.Op:
        axes = list(range(index.ndim))
        return operand.scatter(
            indices,
            updates,
            combine,
            update_window_dims=[],
            inserted_window_dims=axes,
            scatter_dims_to_operand_dims=axes,
            index_vector_dim=1,
        )

    return apply_xla(f"scatter_{reduce}", scatter, base, where, source.reshape(-1))


@lowers("scatter_reduce.two")
def _scatter_reduce(
    node: Node,
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    include_self: bool,
) -> torch.Tensor:
    if not self.ndim:
        scattered = _scatter_reduce(
            node, self.reshape(1), 0, index.reshape(1), src.reshape(1), reduce, include_self
        )
        return scattered.reshape(())
    dim %= self.ndim
    counts = _scatter(
        torch.zeros_like(self, dtype=torch.int64),
        dim,
        index,
        torch.ones_like(index, dtype=torch.int64),
        "sum",
    )
    base = self
    if not include_self:
        base = torch.where(counts > 0, torch.full_like(self, _identity(reduce, self.dtype)), self)
    result = _scatter(base, dim, index, src, reduce)
    if reduce == "mean":
        divisor = (counts + 1 if include_self else counts.clamp(min=1)).to(self.dtype)
        floating = self.dtype.is_floating_point
        result = result / divisor if floating else result.div(divisor, rounding_mode="floor")
    return result
