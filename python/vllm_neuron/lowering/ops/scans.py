"""Running sums, products, sums of exponentials and extremes.

Eager's contract: float16 and bfloat16 are accumulated in float32. cummax and cummin name the last
position of a tie, and from the first NaN on they give NaN with the position of the latest NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, highest, is_float, lowest
from vllm_neuron.lowering.ops.registry import lowers


def _scan(b: Builder, initial: int, operation: str) -> Tensor:
    tensor, dimension = b.tensor(0, compute_dtype(b.dtype)), b.arg(1)
    if tensor.rank and tensor.size:
        tensor = b.running(
            [tensor],
            [b.constant(initial, tensor.dtype)],
            dimension % tensor.rank,
            lambda inner, pair: [getattr(inner, operation)(*pair)],
        )[0]
    return b.convert(tensor, b.dtype)


@lowers("cumsum.default")
def cumsum(b: Builder) -> Tensor:
    """Running sum."""
    return _scan(b, 0, "add")


@lowers("cumprod.default")
def cumprod(b: Builder) -> Tensor:
    """Running product."""
    return _scan(b, 1, "multiply")


@lowers("logcumsumexp.default")
def logcumsumexp(b: Builder) -> Tensor:
    """Logarithm of the running sum of exponentials."""
    tensor, dimension = b.tensor(0, compute_dtype(b.dtype)), b.arg(1)
    if tensor.rank == 0 or tensor.size == 0:
        return b.tensor(0)

    def joined(inner: Builder, pair: list[Tensor]) -> Sequence[Tensor]:
        # The greater one comes out of the logarithm; an infinite one is the result.
        greater = inner.maximum(*pair)
        apart = inner.negate(inner.unary("abs", inner.subtract(*pair)))
        rest = inner.unary("log_plus_one", inner.unary("exponential", apart))
        infinity = inner.constant(float("inf"), greater.dtype)
        endless = inner.compare("EQ", inner.unary("abs", greater), infinity)
        return [inner.select(endless, greater, inner.add(greater, rest))]

    initial = b.constant(lowest(tensor.dtype), tensor.dtype)
    return b.convert(b.running([tensor], [initial], dimension % tensor.rank, joined)[0], b.dtype)


def _running_extreme(b: Builder, *, largest: bool) -> Sequence[Tensor]:
    tensor, dimension = b.tensor(0), b.arg(1)
    if tensor.rank == 0 or tensor.size == 0:
        return tensor, b.constant(0, "int64", tensor.shape)
    dimension %= tensor.rank
    key = b.convert(tensor, compute_dtype(tensor.dtype))
    worst = lowest(key.dtype) if largest else highest(key.dtype)

    def later(inner: Builder, pairs: list[Tensor]) -> Sequence[Tensor]:
        # XLA may fold in any order, so the choice must not depend on which side is the later one.
        left, left_place, right, right_place = pairs
        wins = inner.compare("GT" if largest else "LT", right, left)
        ties = inner.compare("EQ", right, left)
        if is_float(left.dtype):
            left_nan, right_nan = inner.is_nan(left), inner.is_nan(right)
            wins = inner.logical_or(wins, inner.logical_and(right_nan, inner.logical_not(left_nan)))
            ties = inner.logical_or(ties, inner.logical_and(left_nan, right_nan))
        after = inner.compare("GT", right_place, left_place)
        take = inner.logical_or(wins, inner.logical_and(ties, after))
        return inner.select(take, right, left), inner.select(take, right_place, left_place)

    values, places = b.running(
        [key, b.iota(dimension, tensor.shape)],
        [b.constant(worst, key.dtype), b.constant(-1, "int64")],
        dimension,
        later,
    )
    return b.convert(values, tensor.dtype), places


@lowers("cummax.default")
def cummax(b: Builder) -> Sequence[Tensor]:
    """Running greatest value and its position."""
    return _running_extreme(b, largest=True)


@lowers("cummin.default")
def cummin(b: Builder) -> Sequence[Tensor]:
    """Running least value and its position."""
    return _running_extreme(b, largest=False)
