"""Views and casts that PyTorch/XLA computes on the CPU or rounds otherwise than eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_xla

from vllm_neuron.lowering.xla_operators.registry import (
    Node,
    apply_xla,
    aten,
    full,
    lowers,
    operands,
    xla_type,
)


@lowers("_to_copy.default")
def _cast(node: Node, self: torch.Tensor, *options: Any) -> torch.Tensor:
    dtype = getattr(torch, node["results"][0][1])
    if dtype is torch.float8_e4m3fn and self.is_floating_point():
        # Eager saturates, infinity too; the type has none.
        limit = torch.finfo(dtype).max
        self = torch.minimum(torch.maximum(*operands(self, -limit)), full(limit, self.dtype))
    if dtype in _INTEGERS and self.is_floating_point():
        return _truncated(self, dtype)
    return self.to(dtype) if self.dtype != dtype else aten.clone.default(self)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _truncated(self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float as an integer, with what x86's cvttss2si gives where it does not fit.

    That is the least value of int64 or, for narrower integers, the low bits of int32's.
    """
    via = torch.int64 if dtype == torch.int64 else torch.int32
    wide = self if self.dtype == torch.float64 else self.to(torch.float32)
    limit = 2.0 ** (via.itemsize * 8 - 1)
    fits = (torch.trunc(wide) >= -limit) & (wide < limit)
    held = torch.where(fits, wide, torch.zeros_like(wide)).to(via)
    return torch.where(fits, held, full(torch.iinfo(via).min, via)).to(dtype)


@lowers("view_as_real.default")
def _view_as_real(node: Node, self: torch.Tensor) -> torch.Tensor:
    parts = (lambda x: x.real(), lambda x: x.imag())
    return torch.stack([apply_xla("view_as_real", part, self) for part in parts], -1)


@lowers("polar.default")
def _polar(node: Node, magnitude: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    parts = torch.broadcast_tensors(magnitude * torch.cos(angle), magnitude * torch.sin(angle))
    return torch.view_as_complex(torch.stack(parts, -1))


@lowers("unfold.default")
def _unfold(node: Node, self: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    if not self.ndim:
        return self.expand(size)
    dim %= self.ndim
    starts = torch.arange(0, self.shape[dim] - size + 1, step)
    places = (starts[:, None] + torch.arange(size)).reshape(-1).to(torch_xla.device())
    windows = [*self.shape[:dim], len(starts), size, *self.shape[dim + 1 :]]
    return self.index_select(dim, places).reshape(windows).movedim(dim + 1, -1)


@lowers("view.dtype")
def _view_dtype(node: Node, self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    sizes, ratio = list(self.shape), 1
    old, new = self.element_size(), dtype.itemsize
    if old < new:
        # XLA joins a last dimension of its own.
        ratio = new // old
        sizes = [*sizes[:-1], sizes[-1] // ratio]
        self = self.reshape([*sizes, ratio])
    elif old > new:
        sizes = [*sizes[:-1], sizes[-1] * (old // new)]
    target = xla_type(dtype)
    return apply_xla("view_dtype", lambda x: x.bitcast(target), self).reshape(sizes)


@lowers("as_strided.default", "as_strided_copy.default")
def _as_strided(
    node: Node, self: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> torch.Tensor:
    flat = self.permute(node["storage_order"]).reshape(-1)
    return flat[_places(size, stride, offset)]


@lowers("as_strided_scatter.default")
def _as_strided_scatter(
    node: Node, self: Any, src: Any, size: Any, stride: Any, offset: int | None = None
) -> torch.Tensor:
    order = node["storage_order"]
    stored = self.permute(order)
    places = _places(size, stride, offset).reshape(-1)
    written = aten.index_put.default(stored.reshape(-1), [places], src.reshape(-1))
    return written.reshape(stored.shape).permute([order.index(axis) for axis in range(self.ndim)])


def _places(size: Sequence[int], stride: Sequence[int], offset: int | None) -> torch.Tensor:
    """Where the elements of a strided view lie; strides count in eager's storage."""
    places = torch.full((), offset or 0, dtype=torch.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [count if i == axis else 1 for i in range(len(size))]
        places = places + (torch.arange(count) * step).reshape(shape)
    return places.to(torch_xla.device())
