"""Special functions that CHLO knows, and what is computed digit by digit.

Eager's contract: float16 and bfloat16 are computed in float32 and rounded once, integers become
floats. erfinv is infinite at -1 and 1 and NaN beyond; lgamma is infinity at 0, at the negative
integers and at both infinities; digamma is infinite at 0, with the opposite sign, and NaN at the
negative integers and at -infinity. gcd of zeros is 0, and never negative.

CHLO's operations become StableHLO's in `stablehlo_module`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, is_unsigned
from vllm_neuron.lowering.ops.registry import lowers

_INFINITY = float("inf")


def _wide(b: Builder, index: int) -> Tensor:
    """An operand in the compute dtype of the result, expanded to its shape."""
    return b.expand(b.tensor(index, compute_dtype(b.dtype)), b.shape)


def _call(b: Builder, function: Callable[..., ir.Value], *operands: Tensor) -> Tensor:
    return Tensor(function(*(item.value for item in operands)), operands[0].dtype, b.shape)


def _where_equal(b: Builder, operand: Tensor, number: float, yes: Tensor, no: Tensor) -> Tensor:
    there = b.compare("EQ", operand, b.constant(number, operand.dtype, b.shape))
    return b.select(there, yes, no)


@lowers("erfc.default", "special_erfc.default")
def erfc(b: Builder) -> Tensor:
    """1 - erf, without its cancellation."""
    return b.convert(_call(b, chlo.erfc, _wide(b, 0)), b.dtype)


@lowers("erfinv.default")
def erfinv(b: Builder) -> Tensor:
    """The inverse of erf."""
    return b.convert(_call(b, chlo.erf_inv, _wide(b, 0)), b.dtype)


@lowers("lgamma.default")
def lgamma(b: Builder) -> Tensor:
    """Logarithm of the magnitude of the gamma function."""
    operand = _wide(b, 0)
    infinity = b.constant(_INFINITY, operand.dtype, b.shape)
    endless = b.compare("EQ", b.unary("abs", operand), infinity)
    return b.convert(b.select(endless, infinity, _call(b, chlo.lgamma, operand)), b.dtype)


@lowers("digamma.default")
def digamma(b: Builder) -> Tensor:
    """Derivative of lgamma."""
    operand = _wide(b, 0)
    infinity = b.constant(_INFINITY, operand.dtype, b.shape)
    # 1 / -x is infinite with the sign of -x.
    pole = b.binary("divide", b.constant(1, operand.dtype, b.shape), b.negate(operand))
    result = _where_equal(b, operand, 0.0, pole, _call(b, chlo.digamma, operand))
    nothing = b.constant(float("nan"), operand.dtype, b.shape)
    result = _where_equal(b, operand, -_INFINITY, nothing, result)
    return b.convert(_where_equal(b, operand, _INFINITY, infinity, result), b.dtype)


@lowers("polygamma.default")
def polygamma(b: Builder) -> Tensor:
    """The n-th derivative of digamma."""
    if b.arg(0) == 0:
        operand = b.tensor(1, compute_dtype(b.dtype))
        return b.convert(_call(b, chlo.digamma, operand), b.dtype)
    operand = _wide(b, 1)
    order = b.constant(b.arg(0), operand.dtype, b.shape)
    return b.convert(_call(b, chlo.polygamma, order, operand), b.dtype)


@lowers("special_zeta.default")
def zeta(b: Builder) -> Tensor:
    """Hurwitz's zeta function."""
    return b.convert(_call(b, chlo.zeta, _wide(b, 0), _wide(b, 1)), b.dtype)


@lowers("nextafter.default")
def nextafter(b: Builder) -> Tensor:
    """The next number of the dtype from the first operand toward the second."""
    left, right = (b.expand(b.tensor(index, b.dtype), b.shape) for index in (0, 1))
    return _call(b, chlo.next_after, left, right)


@lowers("gcd.default")
def gcd(b: Builder) -> Tensor:
    """The greatest common divisor, by Euclid's algorithm on all elements at once."""
    operands = [b.expand(b.tensor(index, b.dtype), b.shape) for index in (0, 1)]
    if not is_unsigned(b.dtype):
        operands = [b.unary("abs", operand) for operand in operands]
    zero = b.constant(0, b.dtype, b.shape)
    one = b.constant(1, b.dtype, b.shape)

    def goes_on(_: Tensor, rest: Tensor) -> Sequence[Tensor]:
        left = b.compare("NE", rest, zero)
        if not b.shape:
            return [left]
        return b.reduce(
            [left],
            [b.constant(0, "bool")],
            range(left.rank),
            lambda inner, pair: [inner.logical_or(*pair)],
        )

    def step(value: Tensor, rest: Tensor) -> Sequence[Tensor]:
        done = b.compare("EQ", rest, zero)
        remainder = b.binary("remainder", value, b.select(done, one, rest))
        return [b.select(done, value, rest), b.select(done, rest, remainder)]

    types = [operand.value.type for operand in operands]
    loop = stablehlo.WhileOp(types, [operand.value for operand in operands])
    for region, body in zip(loop.operation.regions, (goes_on, step), strict=True):
        block = region.blocks.append(*types)
        with ir.InsertionPoint(block):
            state = [Tensor(value, b.dtype, b.shape) for value in block.arguments]
            stablehlo.return_([result.value for result in body(*state)])
    return Tensor(loop.results[0], b.dtype, b.shape)
