"""Sorting, selection by rank, and positions of extremes.

Eager's contract:
    * NaN is greater than everything, equal to itself. Zeros of both signs are equal.
    * sort is stable. Where values tie, argmax, argmin, max and min name the first position. topk's
      choice among ties is unspecified; here it is the first positions.
    * searchsorted counts the elements below a value, or not above it when `right` is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, highest, is_float, lowest
from vllm_neuron.lowering.ops.registry import lowers


def _above(b: Builder, left: Tensor, right: Tensor) -> Tensor:
    """Whether left comes after right in ascending order."""
    if not is_float(left.dtype):
        return b.compare("GT", left, right)
    right_is_number = b.logical_not(b.is_nan(right))
    return b.logical_or(
        b.compare("GT", left, right), b.logical_and(b.is_nan(left), right_is_number)
    )


def _sorted(
    b: Builder, tensor: Tensor, dimension: int, *, descending: bool
) -> tuple[Tensor, Tensor]:
    """Values and positions in stable order along a dimension of at least one element."""
    positions = b.iota(dimension, tensor.shape)
    # Eager compares narrow floats by value; in float32 the order is the same.
    key = b.convert(tensor, compute_dtype(tensor.dtype))

    def before(inner: Builder, pair: list[Tensor]) -> Tensor:
        left, right = pair[:2]
        return _above(inner, left, right) if descending else _above(inner, right, left)

    values, places = b.sort([key, positions], dimension, before)
    return b.convert(values, tensor.dtype), places


@lowers("sort.default", "sort.stable")
def sort(b: Builder) -> Sequence[Tensor]:
    """Values and positions."""
    tensor = b.tensor(0)
    shift = 1 if b.operator.endswith("stable") else 0
    dimension, descending = b.arg(1 + shift), bool(b.arg(2 + shift))
    if tensor.size == 0 or tensor.rank == 0:
        return tensor, b.constant(0, "int64", tensor.shape)
    return _sorted(b, tensor, dimension % tensor.rank, descending=descending)


@lowers("argsort.default", "argsort.stable")
def argsort(b: Builder) -> Tensor:
    """Positions in order."""
    return sort(b)[1]


@lowers("topk.default")
def topk(b: Builder) -> Sequence[Tensor]:
    """The k largest or smallest, in order."""
    tensor, k, dimension = b.tensor(0), b.arg(1), b.arg(2)
    largest = b.arg(3) is not False
    if tensor.rank == 0:
        return tensor, b.constant(0, "int64", ())
    dimension %= tensor.rank
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape), b.constant(0, "int64", b.shape)
    values, places = _sorted(b, tensor, dimension, descending=largest)
    return b.slice(values, dimension, 0, k), b.slice(places, dimension, 0, k)


@lowers("kthvalue.default")
def kthvalue(b: Builder) -> Sequence[Tensor]:
    """The k-th smallest value and its position."""
    return _ranked(b, b.tensor(0), b.arg(1) - 1, b.arg(2))


@lowers("median.dim")
def median_dim(b: Builder) -> Sequence[Tensor]:
    """The lower median along a dimension; NaN if there is one."""
    tensor, dimension = b.tensor(0), b.arg(1)
    if tensor.rank == 0:
        return tensor, b.constant(0, "int64", ())
    size = tensor.shape[dimension % tensor.rank]
    values, places = _ranked(b, tensor, (size - 1) // 2, dimension)
    if not is_float(tensor.dtype):
        return values, places
    last, last_place = _first_extreme(b, tensor, dimension % tensor.rank, largest=True)
    broken = b.reshape(b.is_nan(last), values.shape)
    return (
        b.select(broken, b.reshape(last, values.shape), values),
        b.select(broken, b.reshape(last_place, values.shape), places),
    )


@lowers("median.default")
def median(b: Builder) -> Tensor:
    """The lower median of all elements; NaN if there is one."""
    tensor = b.tensor(0)
    flat = b.reshape(tensor, (tensor.size,))
    values, _ = _sorted(b, flat, 0, descending=False)
    middle = b.reshape(b.slice(values, 0, (flat.size - 1) // 2, (flat.size - 1) // 2 + 1), ())
    if not is_float(tensor.dtype):
        return middle
    last = b.reshape(b.slice(values, 0, flat.size - 1, flat.size), ())
    return b.select(b.is_nan(last), last, middle)


def _ranked(b: Builder, tensor: Tensor, rank: int, dimension: int) -> tuple[Tensor, Tensor]:
    if tensor.rank == 0:
        return tensor, b.constant(0, "int64", ())
    dimension %= tensor.rank
    values, places = _sorted(b, tensor, dimension, descending=False)
    return tuple(
        b.reshape(b.slice(item, dimension, rank, rank + 1), b.shape) for item in (values, places)
    )


def _first_extreme(
    b: Builder, tensor: Tensor, dimension: int, *, largest: bool
) -> tuple[Tensor, Tensor]:
    """The greatest or least value along a dimension and its first position; NaN is both."""
    key = b.convert(tensor, compute_dtype(tensor.dtype))
    positions = b.iota(dimension, tensor.shape)
    worst = b.constant(lowest(key.dtype) if largest else highest(key.dtype), key.dtype)
    # Beyond every position, so that an element equal to the initial value still wins.
    beyond = b.constant(tensor.shape[dimension], "int64")

    def better(inner: Builder, pairs: list[Tensor]) -> Sequence[Tensor]:
        old, old_place, new, new_place = pairs
        wins = inner.compare("GT" if largest else "LT", new, old)
        ties = inner.compare("EQ", new, old)
        if is_float(old.dtype):
            old_nan, new_nan = inner.is_nan(old), inner.is_nan(new)
            wins = inner.logical_or(
                inner.logical_and(wins, inner.logical_not(old_nan)),
                inner.logical_and(new_nan, inner.logical_not(old_nan)),
            )
            ties = inner.logical_or(ties, inner.logical_and(old_nan, new_nan))
        earlier = inner.compare("LT", new_place, old_place)
        take = inner.logical_or(wins, inner.logical_and(ties, earlier))
        return inner.select(take, new, old), inner.select(take, new_place, old_place)

    values, places = b.reduce([key, positions], [worst, beyond], [dimension], better)
    return b.convert(values, tensor.dtype), places


def _extreme_position(b: Builder, *, largest: bool) -> Tensor:
    tensor, dimension = b.tensor(0), b.arg(1)
    if tensor.rank == 0:
        return b.constant(0, "int64", b.shape)
    if dimension is None:
        tensor, dimension = b.reshape(tensor, (tensor.size,)), 0
    return b.reshape(
        _first_extreme(b, tensor, dimension % tensor.rank, largest=largest)[1], b.shape
    )


@lowers("argmax.default")
def argmax(b: Builder) -> Tensor:
    """First position of the greatest value."""
    return _extreme_position(b, largest=True)


@lowers("argmin.default")
def argmin(b: Builder) -> Tensor:
    """First position of the least value."""
    return _extreme_position(b, largest=False)


def _extreme(b: Builder, *, largest: bool) -> Sequence[Tensor]:
    tensor, dimension = b.tensor(0), b.arg(1)
    if tensor.rank == 0:
        return tensor, b.constant(0, "int64", ())
    found = _first_extreme(b, tensor, dimension % tensor.rank, largest=largest)
    return tuple(b.reshape(item, b.shape) for item in found)


@lowers("max.dim")
def max_dim(b: Builder) -> Sequence[Tensor]:
    """Greatest value and its first position."""
    return _extreme(b, largest=True)


@lowers("min.dim")
def min_dim(b: Builder) -> Sequence[Tensor]:
    """Least value and its first position."""
    return _extreme(b, largest=False)


@lowers("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(b: Builder) -> Tensor:
    """Where values would be put into sorted sequences."""
    sequence = b.tensor(0)
    right = bool(b.arg(3)) or b.arg(4) == "right"
    values = b.arg(1)
    if not isinstance(values, Tensor):
        values = b.constant(values, sequence.dtype)
    if isinstance(b.arg(5), Tensor):
        sequence = _along_last(b, sequence, b.arg(5))
    return _count_below(b, sequence, values, right=right)


@lowers("bucketize.Tensor", "bucketize.Scalar")
def bucketize(b: Builder) -> Tensor:
    """As searchsorted, with the operands exchanged."""
    values, boundaries = b.arg(0), b.tensor(1)
    if not isinstance(values, Tensor):
        values = b.constant(values, boundaries.dtype)
    return _count_below(b, boundaries, values, right=bool(b.arg(3)))


def _along_last(b: Builder, tensor: Tensor, order: Tensor) -> Tensor:
    parts = [
        order if dimension == tensor.rank - 1 else b.iota(dimension, order.shape)
        for dimension in range(tensor.rank)
    ]
    columns = [b.reshape(b.convert(part, "int64"), (*part.shape, 1)) for part in parts]
    indices = b.concatenate(columns, tensor.rank)
    return b.gather(tensor, indices, indexed=range(tensor.rank), offsets=(), shape=tensor.shape)


def _count_below(b: Builder, sequence: Tensor, values: Tensor, *, right: bool) -> Tensor:
    # Every value is compared with every element: sizes here are tens, and nothing is data-driven.
    wide = "float64" if "float64" in (sequence.dtype, values.dtype) else None
    if wide is None:
        floats = is_float(sequence.dtype) or is_float(values.dtype)
        wide = "float32" if floats else "int64"
    sequence, values = b.convert(sequence, wide), b.convert(values, wide)
    length = sequence.shape[-1]
    if values.size == 0 or length == 0:
        return b.constant(0, b.dtype, b.shape)
    shape = (*values.shape, length)
    leading = range(values.rank - 1) if sequence.rank > 1 else ()
    elements = b.broadcast_in_dim(sequence, shape, [*leading, values.rank])
    spread = b.broadcast_in_dim(values, shape, range(values.rank))
    counted = _above(b, spread, elements)
    if right:
        counted = b.logical_not(_above(b, elements, spread))
    ones = b.convert(counted, b.dtype)
    total: Callable[[Builder, list[Tensor]], Sequence[Tensor]] = lambda inner, pair: [  # noqa: E731
        inner.add(*pair)
    ]
    return b.reduce([ones], [b.constant(0, b.dtype)], [values.rank], total)[0]
