"""ATen operators that PyTorch/XLA lacks, or lowers to other numbers than eager gives.

Each is written with operators that it lowers exactly, or with XLA's own. They run on lazy tensors,
in the XLA route's lowering process only. Arguments come in schema order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_builder as xb

from vllm_neuron.lowering.failure import LoweringFailure

__all__ = ["own_operator"]

aten = torch.ops.aten

# Takes the node of the graph message and the operator's arguments.
Operator = Callable[..., Any]
Node = Mapping[str, Any]

_OPERATORS: dict[str, Operator] = {}


def own_operator(name: str) -> Operator | None:
    """The own form of an operator, or None where PyTorch/XLA's lowering is right."""
    return _OPERATORS.get(name)


def _lowers(*names: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        for name in names:
            _OPERATORS[f"aten.{name}"] = function
        return function

    return register


def _xla(name: str, function: Callable[..., xb.Op], *tensors: torch.Tensor) -> torch.Tensor:
    """Apply a function of XLA operations to lazy tensors."""
    shapes = [xb.mkshape(xb.Op.from_torch_type(t.dtype), tuple(t.shape)) for t in tensors]
    computation = xb.create_computation(name, function, shapes)
    (result,) = xb.xla_computation_as_func(computation, f"xla::{name}")(list(tensors))
    return result


def _full(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=torch_xla.device())


def _operands(*values: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Tensors and numbers as tensors of one dtype and shape, the ones that eager computes with."""
    if dtype is None:
        dtype = torch.result_type(*values)
    tensors = [v.to(dtype) if isinstance(v, torch.Tensor) else _full(v, dtype) for v in values]
    return list(torch.broadcast_tensors(*tensors))


# --- arithmetic ------------------------------------------------------------------------------

# PyTorch/XLA divides integers as floats, floors where eager corrects a rounded quotient, takes
# bytes for signed and shifts them logically, and clamps infinity to the largest finite number.


def _truncated_quotient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # XLA's integer division truncates.
    return _xla("divide", lambda x, y: x / y, left, right)


def _truncated_remainder(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # XLA's remainder has the sign of the dividend and is exact.
    return _xla("remainder", lambda x, y: x % y, left, right)


def _floored_remainder(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    remainder = _truncated_remainder(left, right)
    return torch.where(_signs_differ(remainder, right), remainder + right, remainder)


def _signs_differ(remainder: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    if remainder.dtype == torch.uint8:
        return torch.zeros_like(remainder, dtype=torch.bool)
    return (remainder != 0) & ((remainder < 0) != (divisor < 0))


def _floored_quotient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if not left.is_floating_point():
        quotient = _truncated_quotient(left, right)
        differ = _signs_differ(_truncated_remainder(left, right), right)
        return quotient - differ.to(quotient.dtype)
    # c10::div_floor_floating (c10/util/generic_math.h).
    remainder = _truncated_remainder(left, right)
    quotient = (left - remainder) / right
    quotient = torch.where(_signs_differ(remainder, right), quotient - 1, quotient)
    floored = torch.floor(quotient)
    floored = torch.where(quotient - floored > 0.5, floored + 1, floored)
    floored = torch.where(
        quotient != 0, floored, torch.copysign(torch.zeros_like(left), left / right)
    )
    return torch.where(right == 0, left / right, floored)


@_lowers("div.Tensor_mode", "div.Scalar_mode")
def _div(node: Node, self: Any, other: Any, rounding_mode: str | None) -> torch.Tensor:
    if rounding_mode is None:
        return aten.div.Tensor(self, other)
    left, right = _operands(self, other)
    if rounding_mode == "floor":
        return _floored_quotient(left, right)
    return (
        torch.trunc(left / right) if left.is_floating_point() else _truncated_quotient(left, right)
    )


@_lowers("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(node: Node, self: Any, other: Any) -> torch.Tensor:
    return _floored_quotient(*_operands(self, other))


@_lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(node: Node, self: Any, other: Any) -> torch.Tensor:
    return _floored_remainder(*_operands(self, other))


@_lowers("fmod.Tensor", "fmod.Scalar")
def _fmod(node: Node, self: Any, other: Any) -> torch.Tensor:
    return _truncated_remainder(*_operands(self, other))


_SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")


@_lowers(
    *(f"bitwise_left_shift.{name}" for name in _SHIFTS),
    *(f"bitwise_right_shift.{name}" for name in _SHIFTS),
    "__lshift__.Scalar",
    "__lshift__.Tensor",
    "__rshift__.Scalar",
    "__rshift__.Tensor",
)
def _shift(node: Node, self: Any, amount: Any) -> torch.Tensor:
    value, amount = _operands(self, amount)
    bits = value.dtype.itemsize * 8
    is_signed = value.dtype != torch.uint8
    powers = [1 << place for place in range(bits - 1)]
    powers.append(-(1 << (bits - 1)) if is_signed else 1 << (bits - 1))
    table = torch.tensor(powers, dtype=value.dtype).to(torch_xla.device())
    power = table[amount.to(torch.int64).clamp(0, bits - 1)]
    out_of_range = (amount.to(torch.int64) < 0) | (amount.to(torch.int64) >= bits)
    if "left" in node["op"] or "lshift" in node["op"]:
        return torch.where(out_of_range, torch.zeros_like(value), value * power)
    sign = torch.zeros_like(value)
    if is_signed:
        sign = torch.where(value < 0, _full(-1, value.dtype), _full(0, value.dtype))
        # The power of the last place is negative.
        out_of_range = out_of_range | (amount.to(torch.int64) == bits - 1)
    return torch.where(out_of_range, sign, _floored_quotient(value, power))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@_lowers(*(f"{name}.{kind}" for name in _COMPARISONS for kind in ("Tensor", "Scalar")))
def _compare(node: Node, self: Any, other: Any) -> torch.Tensor:
    common = getattr(torch, node["common"])
    left, right = _operands(self, other, dtype=common)
    if common in (torch.uint8, torch.bool):
        left, right = left.to(torch.int32), right.to(torch.int32)
    name = node["op"].split(".")[1]
    return getattr(aten, name).Tensor(left, right)


@_lowers("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default")
def _clamp(node: Node, self: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    if node["op"] == "aten.clamp_max.default":
        low, high = None, low
    if low is not None:
        self = torch.maximum(*_operands(self, low))
    return self if high is None else torch.minimum(*_operands(self, high))


@_lowers("_to_copy.default")
def _cast(node: Node, self: torch.Tensor, *options: Any) -> torch.Tensor:
    dtype = getattr(torch, node["results"][0][1])
    if dtype is torch.float8_e4m3fn and self.is_floating_point():
        # Eager saturates, infinity too; the type has none.
        limit = torch.finfo(dtype).max
        self = torch.minimum(torch.maximum(*_operands(self, -limit)), _full(limit, self.dtype))
    return self.to(dtype) if self.dtype != dtype else aten.clone.default(self)


# --- masks -----------------------------------------------------------------------------------


@_lowers("index_put.default", "_unsafe_index_put.default")
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


@_lowers("masked_scatter.default")
def _masked_scatter(
    node: Node, self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    self, mask = torch.broadcast_tensors(self, mask)
    return torch.where(mask, _rows_at(mask, source.reshape(-1)), self)


def _rows_at(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each place of the mask the row of its turn among the true places."""
    turn = torch.cumsum(mask.reshape(-1).to(torch.int64), 0) - 1
    turn = torch.minimum(
        torch.maximum(turn, _full(0, turn.dtype)), _full(len(rows) - 1, turn.dtype)
    )
    return rows[turn].reshape([*mask.shape, *rows.shape[1:]])


# --- reductions ------------------------------------------------------------------------------

# PyTorch/XLA takes an empty list of dimensions at its word; to eager it means all of them.


@_lowers("sum.dim_IntList")
def _sum(node: Node, self: Any, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return aten.sum.dim_IntList(self, dim or list(range(self.ndim)), keepdim, dtype=dtype)


@_lowers("mean.dim")
def _mean(node: Node, self: Any, dim: Any, keepdim: bool, dtype: Any) -> torch.Tensor:
    return aten.mean.dim(self, dim or list(range(self.ndim)), keepdim, dtype=dtype)


@_lowers("amax.default", "amin.default")
def _extreme(node: Node, self: Any, dim: Any, keepdim: bool) -> torch.Tensor:
    function = aten.amax.default if node["op"] == "aten.amax.default" else aten.amin.default
    return function(self, dim or list(range(self.ndim)), keepdim)


# --- views and casts -------------------------------------------------------------------------


@_lowers("view.dtype")
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
    target = xb.Op.from_torch_type(dtype)
    return _xla("view_dtype", lambda x: x.bitcast(target), self).reshape(sizes)


@_lowers("as_strided.default", "as_strided_copy.default")
def _as_strided(
    node: Node, self: torch.Tensor, size: Any, stride: Any, offset: int | None = None
) -> torch.Tensor:
    # The strides count in eager's storage, whose order of dimensions the node carries.
    flat = self.permute(node["storage_order"]).reshape(-1)
    places = torch.full((), offset or 0, dtype=torch.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [count if i == axis else 1 for i in range(len(size))]
        places = places + (torch.arange(count) * step).reshape(shape)
    return flat[places.to(torch_xla.device())]


# --- scattering ------------------------------------------------------------------------------

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
    kind = xb.mkshape(xb.Op.from_torch_type(base.dtype), ())
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

    return _xla(f"scatter_{reduce}", scatter, base, where, source.reshape(-1))


@_lowers("scatter_reduce.two")
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
