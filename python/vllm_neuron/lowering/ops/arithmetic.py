"""Elementwise arithmetic, comparison, logic, bits and casts.

Eager's contract:
    * Operands are promoted to one dtype, float16 and bfloat16 then computed in float32 and rounded
      once per operator. Numbers are rounded to the narrow dtype first, but for the second operand
      of a product or quotient (`opmath` in aten/src/ATen/native/cpu/BinaryOpsKernel.cpp).
    * `remainder` and `//` take the sign of the divisor, `fmod` and truncating division that of the
      dividend. Integers wrap around.
    * Comparisons with NaN are false except `!=`. maximum, minimum and clamp propagate NaN.
    * A shift by the width or more gives 0, or the sign when an integer is shifted right.
"""

from __future__ import annotations

from typing import Any

from vllm_neuron.lowering.ops.builder import Builder, Refusal, Tensor
from vllm_neuron.lowering.ops.dtypes import bits, compute_dtype, is_complex, is_float, is_unsigned
from vllm_neuron.lowering.ops.registry import lowers


def _operand(b: Builder, index: int, *, exact: bool = False) -> Tensor:
    """An operand in the compute dtype of the result, expanded to its shape.

    It is rounded to the result's dtype first, unless `exact` and it is a number or of rank 0.
    """
    value = b.arg(index)
    wide = compute_dtype(b.dtype)
    if exact and (not isinstance(value, Tensor) or value.rank == 0):
        tensor = b.tensor(index, wide)
    else:
        tensor = b.convert(b.tensor(index, b.dtype), wide)
    return b.expand(tensor, b.shape)


def _operands(b: Builder, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    return _operand(b, 0), _operand(b, 1, exact=exact)


def _narrow(b: Builder, tensor: Tensor) -> Tensor:
    return b.convert(tensor, b.dtype)


def _scaled(b: Builder, tensor: Tensor, alpha: Any) -> Tensor:
    if alpha is None or alpha == 1:
        return tensor
    factor = b.convert(b.constant(alpha, b.dtype, tensor.shape), tensor.dtype)
    return b.multiply(tensor, factor)


@lowers("add.Tensor", "add.Scalar")
def add(b: Builder) -> Tensor:
    """Self + alpha * other."""
    left, right = _operands(b)
    return _narrow(b, b.add(left, _scaled(b, right, b.arg(2))))


@lowers("sub.Tensor", "sub.Scalar")
def sub(b: Builder) -> Tensor:
    """Self - alpha * other."""
    left, right = _operands(b)
    return _narrow(b, b.subtract(left, _scaled(b, right, b.arg(2))))


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(b: Builder) -> Tensor:
    """Other - alpha * self."""
    left, right = _operands(b)
    return _narrow(b, b.subtract(right, _scaled(b, left, b.arg(2))))


@lowers("mul.Tensor", "mul.Scalar")
def mul(b: Builder) -> Tensor:
    """Product."""
    return _narrow(b, b.multiply(*_operands(b, exact=True)))


@lowers("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(b: Builder) -> Tensor:
    """True division: integers become floats."""
    return _narrow(b, b.binary("divide", *_operands(b, exact=True)))


@lowers("div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "floor_divide.Scalar")
def div_mode(b: Builder) -> Tensor:
    """Division rounded toward zero or down."""
    left, right = _operands(b, exact=True)
    mode = "floor" if b.arg(2) is None else b.arg(2)
    if mode == "trunc":
        quotient = b.binary("divide", left, right)
        return _narrow(b, _trunc(b, quotient) if is_float(quotient.dtype) else quotient)
    return _narrow(b, _floor_divide(b, left, right))


def _signs_differ(b: Builder, left: Tensor, right: Tensor) -> Tensor:
    zero = b.constant(0, left.dtype, left.shape)
    return b.compare("NE", b.compare("LT", left, zero), b.compare("LT", right, zero))


def _wrong_sign(b: Builder, rest: Tensor, divisor: Tensor) -> Tensor:
    """Where a C remainder is not zero and has not the sign of the divisor."""
    zero = b.constant(0, rest.dtype, rest.shape)
    return b.logical_and(b.compare("NE", rest, zero), _signs_differ(b, rest, divisor))


def _floor_divide(b: Builder, left: Tensor, right: Tensor) -> Tensor:
    quotient = b.binary("divide", left, right)
    if is_unsigned(left.dtype):
        return quotient
    rest = b.binary("remainder", left, right)
    one = b.constant(1, left.dtype, left.shape)
    adjust = _wrong_sign(b, rest, right)
    if not is_float(left.dtype):
        return b.select(adjust, b.subtract(quotient, one), quotient)
    # As c10::div_floor_floating (c10/util/generic_math.h), which is exact where a/b rounds up.
    exact = b.binary("divide", b.subtract(left, rest), right)
    exact = b.select(adjust, b.subtract(exact, one), exact)
    floored = b.unary("floor", exact)
    half = b.constant(0.5, left.dtype, left.shape)
    rounded = b.select(
        b.compare("GT", b.subtract(exact, floored), half), b.add(floored, one), floored
    )
    zero = b.constant(0, left.dtype, left.shape)
    signed_zero = b.multiply(quotient, zero)
    result = b.select(b.compare("NE", exact, zero), rounded, signed_zero)
    return b.select(b.compare("EQ", right, zero), quotient, result)


@lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(b: Builder) -> Tensor:
    """Modulus with the sign of the divisor."""
    left, right = _operands(b)
    rest = b.binary("remainder", left, right)
    if is_unsigned(left.dtype):
        return rest
    adjusted = b.select(_wrong_sign(b, rest, right), b.add(rest, right), rest)
    return _narrow(b, adjusted)


@lowers("fmod.Tensor", "fmod.Scalar")
def fmod(b: Builder) -> Tensor:
    """Modulus with the sign of the dividend."""
    return _narrow(b, b.binary("remainder", *_operands(b)))


@lowers("maximum.default")
def maximum(b: Builder) -> Tensor:
    """Greater of two."""
    return _narrow(b, b.maximum(*_operands(b)))


@lowers("fmax.default")
def fmax(b: Builder) -> Tensor:
    """Greater of two; a number wins over NaN."""
    left, right = _operands(b)
    return _narrow(b, _prefer_numbers(b, left, right, b.maximum(left, right)))


@lowers("fmin.default")
def fmin(b: Builder) -> Tensor:
    """Lesser of two; a number wins over NaN."""
    left, right = _operands(b)
    return _narrow(b, _prefer_numbers(b, left, right, b.minimum(left, right)))


def _prefer_numbers(b: Builder, left: Tensor, right: Tensor, both: Tensor) -> Tensor:
    if not is_float(both.dtype):
        return both
    return b.select(b.is_nan(left), right, b.select(b.is_nan(right), left, both))


@lowers("minimum.default")
def minimum(b: Builder) -> Tensor:
    """Lesser of two."""
    return _narrow(b, b.minimum(*_operands(b)))


@lowers(
    "clamp.default",
    "clamp.Tensor",
    "clamp_min.default",
    "clamp_min.Tensor",
    "clamp_max.default",
    "clamp_max.Tensor",
)
def clamp(b: Builder) -> Tensor:
    """min(max(self, low), high); the upper bound wins when the bounds cross."""
    result = _operand(b, 0)
    upper_first = b.operator.startswith("aten.clamp_max")
    if b.arg(1) is not None:
        bound = _operand(b, 1)
        result = b.minimum(result, bound) if upper_first else b.maximum(result, bound)
    if not upper_first and b.arg(2) is not None:
        result = b.minimum(result, _operand(b, 2))
    return _narrow(b, result)


def _comparison(b: Builder, direction: str) -> Tensor:
    wide = compute_dtype(b.common)
    operands = []
    for index in range(2):
        tensor = b.convert(b.tensor(index, b.common), wide)
        operands.append(b.expand(tensor, b.shape))
    return b.compare(direction, *operands)


for _name, _direction in {
    "eq": "EQ",
    "ne": "NE",
    "lt": "LT",
    "le": "LE",
    "gt": "GT",
    "ge": "GE",
}.items():
    lowers(f"{_name}.Tensor", f"{_name}.Scalar")(
        lambda b, direction=_direction: _comparison(b, direction)
    )


@lowers("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(b: Builder) -> Tensor:
    """Self where the condition holds, else other."""
    condition = b.expand(b.tensor(0, "bool"), b.shape)
    yes, no = (b.expand(b.tensor(index, b.dtype), b.shape) for index in (1, 2))
    return b.select(condition, yes, no)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(b: Builder) -> Tensor:
    """The value where the mask holds, else self."""
    mask = b.expand(b.tensor(1, "bool"), b.shape)
    value = b.expand(b.tensor(2, b.dtype), b.shape)
    return b.select(mask, value, b.expand(b.tensor(0, b.dtype), b.shape))


@lowers("logical_and.default")
def logical_and(b: Builder) -> Tensor:
    """Both are not zero."""
    return b.logical_and(*(b.expand(b.tensor(i, "bool"), b.shape) for i in (0, 1)))


@lowers("logical_or.default")
def logical_or(b: Builder) -> Tensor:
    """One is not zero."""
    return b.logical_or(*(b.expand(b.tensor(i, "bool"), b.shape) for i in (0, 1)))


@lowers("logical_xor.default")
def logical_xor(b: Builder) -> Tensor:
    """Just one is not zero."""
    return b.binary("xor", *(b.expand(b.tensor(i, "bool"), b.shape) for i in (0, 1)))


@lowers("logical_not.default")
def logical_not(b: Builder) -> Tensor:
    """Is zero."""
    return b.logical_not(b.tensor(0, "bool"))


@lowers("bitwise_not.default")
def bitwise_not(b: Builder) -> Tensor:
    """Complement of every bit."""
    return b.logical_not(b.tensor(0))


def _bitwise(name: str, operation: str) -> None:
    lowers(f"bitwise_{name}.Tensor", f"bitwise_{name}.Scalar", f"bitwise_{name}.Scalar_Tensor")(
        lambda b: b.binary(operation, *_operands(b))
    )
    lowers(f"__{name}__.Tensor", f"__{name}__.Scalar")(lambda b: b.binary(operation, *_operands(b)))


_bitwise("and", "and_")
_bitwise("or", "or_")
_bitwise("xor", "xor")


@lowers(
    "__lshift__.Tensor",
    "__lshift__.Scalar",
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
)
def shift_left(b: Builder) -> Tensor:
    """Shift toward the high bits."""
    value, amount, outside = _shift_operands(b)
    shifted = b.binary("shift_left", value, amount)
    return b.select(outside, b.constant(0, b.dtype, b.shape), shifted)


@lowers(
    "__rshift__.Tensor",
    "__rshift__.Scalar",
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
)
def shift_right(b: Builder) -> Tensor:
    """Shift toward the low bits; the sign comes in from above."""
    value, amount, outside = _shift_operands(b)
    if is_unsigned(b.dtype):
        shifted = b.binary("shift_right_logical", value, amount)
        return b.select(outside, b.constant(0, b.dtype, b.shape), shifted)
    last = b.constant(bits(b.dtype) - 1, b.dtype, b.shape)
    return b.binary("shift_right_arithmetic", value, b.select(outside, last, amount))


def _shift_operands(b: Builder) -> tuple[Tensor, Tensor, Tensor]:
    value, amount = _operands(b)
    zero = b.constant(0, b.dtype, b.shape)
    width = b.constant(bits(b.dtype), b.dtype, b.shape)
    outside = b.logical_or(b.compare("LT", amount, zero), b.compare("GE", amount, width))
    return value, amount, outside


@lowers("abs.default")
def absolute(b: Builder) -> Tensor:
    """Magnitude; the least integer stays negative."""
    tensor = b.tensor(0)
    if is_unsigned(tensor.dtype):
        return tensor
    return b.unary("abs", tensor, b.dtype)


@lowers("sign.default", "sgn.default")
def sign(b: Builder) -> Tensor:
    """-1, 0 or 1; 0 for NaN."""
    tensor = b.tensor(0)
    if is_complex(tensor.dtype):
        return b.unary("sign", tensor)
    zero = b.constant(0, tensor.dtype, tensor.shape)
    positive = b.convert(b.compare("GT", tensor, zero), tensor.dtype)
    if is_unsigned(tensor.dtype):
        return positive
    return b.subtract(positive, b.convert(b.compare("LT", tensor, zero), tensor.dtype))


@lowers("isnan.default")
def isnan(b: Builder) -> Tensor:
    """Is not a number."""
    tensor = b.tensor(0)
    if not is_float(tensor.dtype):
        return b.constant(0, "bool", b.shape)
    return b.is_nan(tensor)


@lowers("isinf.default")
def isinf(b: Builder) -> Tensor:
    """Is infinity of either sign."""
    tensor = b.tensor(0)
    if not is_float(tensor.dtype):
        return b.constant(0, "bool", b.shape)
    tensor = b.convert(tensor, compute_dtype(tensor.dtype))
    infinity = b.constant(float("inf"), tensor.dtype, tensor.shape)
    return b.compare("EQ", b.unary("abs", tensor), infinity)


def _trunc(b: Builder, tensor: Tensor) -> Tensor:
    # ceil keeps the sign of what becomes zero.
    zero = b.constant(0, tensor.dtype, tensor.shape)
    below = b.compare("LT", tensor, zero)
    return b.select(below, b.unary("ceil", tensor), b.unary("floor", tensor))


@lowers("trunc.default")
def trunc(b: Builder) -> Tensor:
    """Round toward zero."""
    tensor = b.tensor(0)
    if not is_float(tensor.dtype):
        return tensor
    return _narrow(b, _trunc(b, b.convert(tensor, compute_dtype(tensor.dtype))))


@lowers("_to_copy.default")
def to_copy(b: Builder) -> Tensor:
    """Cast."""
    return b.convert(b.tensor(0), b.dtype)


@lowers("view.dtype")
def view_dtype(b: Builder) -> Tensor:
    """The bits of the last dimension as another dtype."""
    tensor = b.tensor(0)
    if "bool" in (tensor.dtype, b.dtype):
        if bits(tensor.dtype) + bits(b.dtype) != 9:
            raise Refusal(f"the bits of {tensor.dtype} cannot be read as {b.dtype}")
        return b.convert(tensor, b.dtype)
    old, new = bits(tensor.dtype), bits(b.dtype)
    if old == new:
        return b.bitcast(tensor, b.dtype, b.shape)
    if old > new:
        return b.reshape(b.bitcast(tensor, b.dtype, (*tensor.shape, old // new)), b.shape)
    grouped = b.reshape(tensor, (*b.shape, new // old))
    return b.bitcast(grouped, b.dtype, b.shape)
