"""Elementwise arithmetic: PyTorch/XLA rounds, shifts, compares and clamps otherwise than eager."""

from __future__ import annotations

from collections.abc import Callable
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
)

# PyTorch/XLA divides integers as floats, floors where eager corrects a rounded quotient, takes
# bytes for signed and shifts them logically, and clamps infinity to the largest finite number.


def _terms(
    node: Node, left: Any, right: Any, *, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands in the dtype that eager computes in, rounded to the result's dtype before.

    PyTorch/XLA computes with numbers in float64. With `exact`, a second operand that is a number or
    of rank 0 is not rounded to a narrow result's dtype, as in eager's product and quotient.
    """
    result = getattr(torch, node["results"][0][1])
    compute = torch.float32 if result in (torch.float16, torch.bfloat16) else result

    def term(value: Any, kept: bool) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return full(value, compute if kept else result).to(compute)
        return value.to(compute) if kept and not value.ndim else value.to(result).to(compute)

    return term(left, False), term(right, exact)


def _scaled(node: Node, tensor: torch.Tensor, alpha: Any) -> torch.Tensor:
    if alpha is None or alpha == 1:
        return tensor
    return tensor * full(alpha, getattr(torch, node["results"][0][1])).to(tensor.dtype)


@lowers("add.Tensor", "add.Scalar")
def _add(node: Node, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    left, right = _terms(node, self, other)
    return left + _scaled(node, right, alpha)


@lowers("sub.Tensor", "sub.Scalar")
def _sub(node: Node, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    left, right = _terms(node, self, other)
    return left - _scaled(node, right, alpha)


@lowers("rsub.Tensor", "rsub.Scalar")
def _rsub(node: Node, self: Any, other: Any, alpha: Any) -> torch.Tensor:
    left, right = _terms(node, self, other)
    return right - _scaled(node, left, alpha)


@lowers("mul.Tensor", "mul.Scalar")
def _mul(node: Node, self: Any, other: Any) -> torch.Tensor:
    left, right = _terms(node, self, other, exact=True)
    return left * right


@lowers("div.Tensor", "div.Scalar")
def _true_divide(node: Node, self: Any, other: Any) -> torch.Tensor:
    left, right = _terms(node, self, other, exact=True)
    return left / right


def _truncated_quotient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # XLA's integer division truncates.
    return apply_xla("divide", lambda x, y: x / y, left, right)


def _truncated_remainder(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # XLA's remainder has the sign of the dividend and is exact.
    return apply_xla("remainder", lambda x, y: x % y, left, right)


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
    # copysign(0, left / right), which crashes PyTorch/XLA.
    signed_zero = torch.where(left / right < 0, full(-0.0, left.dtype), full(0.0, left.dtype))
    floored = torch.where(quotient != 0, floored, signed_zero)
    return torch.where(right == 0, left / right, floored)


@lowers("div.Tensor_mode", "div.Scalar_mode")
def _div(node: Node, self: Any, other: Any, rounding_mode: str | None) -> torch.Tensor:
    if rounding_mode is None:
        return aten.div.Tensor(self, other)
    left, right = torch.broadcast_tensors(*_terms(node, self, other, exact=True))
    if rounding_mode == "floor":
        return _floored_quotient(left, right)
    return (
        torch.trunc(left / right) if left.is_floating_point() else _truncated_quotient(left, right)
    )


@lowers("floor_divide.default", "floor_divide.Scalar")
def _floor_divide(node: Node, self: Any, other: Any) -> torch.Tensor:
    return _floored_quotient(*torch.broadcast_tensors(*_terms(node, self, other, exact=True)))


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(node: Node, self: Any, other: Any) -> torch.Tensor:
    return _floored_remainder(*torch.broadcast_tensors(*_terms(node, self, other)))


@lowers("fmod.Tensor", "fmod.Scalar")
def _fmod(node: Node, self: Any, other: Any) -> torch.Tensor:
    return _truncated_remainder(*torch.broadcast_tensors(*_terms(node, self, other)))


_SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")


@lowers(
    *(f"bitwise_left_shift.{name}" for name in _SHIFTS),
    *(f"bitwise_right_shift.{name}" for name in _SHIFTS),
    "__lshift__.Scalar",
    "__lshift__.Tensor",
    "__rshift__.Scalar",
    "__rshift__.Tensor",
)
def _shift(node: Node, self: Any, amount: Any) -> torch.Tensor:
    value, amount = operands(self, amount)
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
        sign = torch.where(value < 0, full(-1, value.dtype), full(0, value.dtype))
        # The power of the last place is negative.
        out_of_range = out_of_range | (amount.to(torch.int64) == bits - 1)
    return torch.where(out_of_range, sign, _floored_quotient(value, power))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@lowers(*(f"{name}.{kind}" for name in _COMPARISONS for kind in ("Tensor", "Scalar")))
def _compare(node: Node, self: Any, other: Any) -> torch.Tensor:
    common = getattr(torch, node["common"])
    left, right = operands(self, other, dtype=common)
    if common in (torch.uint8, torch.bool):
        left, right = left.to(torch.int32), right.to(torch.int32)
    name = node["op"].split(".")[1]
    return getattr(aten, name).Tensor(left, right)


@lowers("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default")
def _clamp(node: Node, self: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    if node["op"] == "aten.clamp_max.default":
        low, high = None, low
    if low is not None:
        self = torch.maximum(*operands(self, low))
    return self if high is None else torch.minimum(*operands(self, high))


@lowers("pow.Tensor_Scalar")
def _pow(node: Node, self: torch.Tensor, exponent: Any) -> torch.Tensor:
    # The exponents that eager computes otherwise (aten/src/ATen/native/cpu/PowKernel.cpp).
    if self.is_floating_point():
        special: dict[Any, Callable[[], torch.Tensor]] = {
            0.5: lambda: torch.sqrt(self),
            -0.5: lambda: torch.rsqrt(self),
            2: lambda: self * self,
            3: lambda: self * self * self,
            -1: lambda: torch.reciprocal(self),
            -2: lambda: torch.reciprocal(self * self),
        }
        if exponent in special:
            return special[exponent]()
    return aten.pow.Tensor_Scalar(self, exponent)


def _is_negative(self: torch.Tensor) -> torch.Tensor:
    if not self.is_floating_point():
        return self < 0
    return (self < 0) | ((self == 0) & (torch.reciprocal(self) < 0))


@lowers("signbit.default")
def _signbit(node: Node, self: torch.Tensor) -> torch.Tensor:
    return _is_negative(self)


@lowers("copysign.Tensor", "copysign.Scalar")
def _copysign(node: Node, self: Any, other: Any) -> torch.Tensor:
    magnitude, sign = torch.broadcast_tensors(*_terms(node, self, other))
    return torch.where(_is_negative(sign), -torch.abs(magnitude), torch.abs(magnitude))


@lowers("fmax.default", "fmin.default")
def _number_extreme(node: Node, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    combine = torch.maximum if node["op"] == "aten.fmax.default" else torch.minimum
    left, right = operands(self, other)
    if not left.is_floating_point():
        return combine(left, right)
    chosen = torch.where(torch.isnan(right), left, combine(left, right))
    return torch.where(torch.isnan(left), right, chosen)


@lowers("hypot.default")
def _hypot(node: Node, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    left, right = (torch.abs(item) for item in operands(self, other))
    longer, shorter = torch.maximum(left, right), torch.minimum(left, right)
    ratio = shorter / longer
    length = torch.where(longer == 0, longer, longer * torch.sqrt(ratio * ratio + 1))
    infinite = torch.isinf(left) | torch.isinf(right)
    return torch.where(infinite, full(float("inf"), length.dtype), length)


@lowers("exp2.default")
def _exp2(node: Node, self: torch.Tensor) -> torch.Tensor:
    return torch.pow(full(2.0, self.dtype), self)
