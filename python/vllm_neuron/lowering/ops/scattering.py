"""scatter and its reductions.

Eager's contract: element i of the source goes to the position that index i names along one
dimension; only the part of the source that the index covers is used; without a reduction the last
write counts. `include_self=False` leaves the old value of a written element out of the reduction,
and `mean` divides by the number of values taken in, rounding down for integers.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_neuron.lowering.ops.builder import Builder, Refusal, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, highest, is_float, lowest
from vllm_neuron.lowering.ops.indexing import element_indices
from vllm_neuron.lowering.ops.registry import lowers

_Combine = Callable[[Builder, list[Tensor]], Tensor]

_COMBINE: dict[str, _Combine] = {
    "sum": lambda b, pair: b.add(*pair),
    "add": lambda b, pair: b.add(*pair),
    "mean": lambda b, pair: b.add(*pair),
    "prod": lambda b, pair: b.multiply(*pair),
    "multiply": lambda b, pair: b.multiply(*pair),
    "amax": lambda b, pair: b.maximum(*pair),
    "amin": lambda b, pair: b.minimum(*pair),
}


def _write(
    b: Builder,
    target: Tensor,
    dimension: int,
    indices: Tensor,
    source: Tensor,
    combine: _Combine | None,
) -> Tensor:
    shape = target.shape
    if target.rank == 0:
        target, indices, source = (b.reshape(item, (1,)) for item in (target, indices, source))
    elif indices.rank == 0:
        indices, source = b.reshape(indices, (1,)), b.reshape(source, (1,))
    if indices.size == 0:
        return b.reshape(target, shape)
    for position, size in enumerate(indices.shape):
        if source.shape[position] != size:
            source = b.slice(source, position, 0, size)
    written = b.scatter(
        target,
        element_indices(b, indices, dimension % target.rank),
        source,
        indexed=range(target.rank),
        windows=(),
        combine=combine,
    )
    return b.reshape(written, shape)


def _source(b: Builder, indices: Tensor) -> Tensor:
    value = b.arg(3)
    if isinstance(value, Tensor):
        return b.convert(value, b.dtype)
    return b.constant(value, b.dtype, indices.shape)


@lowers(
    "scatter.src",
    "scatter.value",
    "scatter.reduce",
    "scatter.value_reduce",
    "scatter_add.default",
)
def scatter(b: Builder) -> Tensor:
    """Writes, adds or multiplies along one dimension."""
    indices = b.tensor(2)
    reduction = "add" if b.operator.startswith("aten.scatter_add") else b.arg(4)
    combine = _COMBINE[reduction] if reduction is not None else None
    return _write(b, b.tensor(0), b.arg(1), indices, _source(b, indices), combine)


@lowers("scatter_reduce.two")
def scatter_reduce(b: Builder) -> Tensor:
    """Reduces along one dimension."""
    return _reduce(b, b.arg(4), include_self=b.arg(5) is not False)


@lowers("index_reduce.default")
def index_reduce(b: Builder) -> Tensor:
    """Reduces whole slices along one dimension."""
    target, source = b.tensor(0), b.tensor(3)
    dimension = b.arg(1) % max(target.rank, 1)
    indices = b.broadcast_in_dim(b.tensor(2), source.shape, [dimension])
    return _reduce(b, b.arg(4), include_self=b.arg(5) is not False, indices=indices)


def _reduce(
    b: Builder, reduction: str, *, include_self: bool, indices: Tensor | None = None
) -> Tensor:
    if reduction not in _COMBINE:
        raise Refusal(f"the reduction {reduction!r} is unknown")
    target, dimension = b.tensor(0), b.arg(1)
    indices = b.tensor(2) if indices is None else indices
    source = b.tensor(3)
    wide = compute_dtype(b.dtype)
    start, values = b.convert(target, wide), b.convert(source, wide)
    if not include_self:
        neutral = {
            "sum": 0,
            "mean": 0,
            "prod": 1,
            "amax": lowest(wide),
            "amin": highest(wide),
        }[reduction]
        touched = _touched(b, target, dimension, indices)
        start = b.select(touched, b.constant(neutral, wide, start.shape), start)
    result = _write(b, start, dimension, indices, values, _COMBINE[reduction])
    if reduction == "mean":
        ones = b.constant(1, wide, indices.shape)
        count = b.constant(1 if include_self else 0, wide, start.shape)
        count = _write(b, count, dimension, indices, ones, _COMBINE["sum"])
        count = b.maximum(count, b.constant(1, wide, count.shape))
        result = _divided(b, result, count)
    return b.convert(result, b.dtype)


def _touched(b: Builder, target: Tensor, dimension: int, indices: Tensor) -> Tensor:
    nothing = b.constant(0, "bool", target.shape)
    return _write(b, nothing, dimension, indices, b.constant(1, "bool", indices.shape), None)


def _divided(b: Builder, total: Tensor, count: Tensor) -> Tensor:
    quotient = b.binary("divide", total, count)
    if is_float(total.dtype):
        return quotient
    zero = b.constant(0, total.dtype, total.shape)
    rest = b.binary("remainder", total, count)
    below = b.logical_and(b.compare("NE", rest, zero), b.compare("LT", total, zero))
    return b.select(below, b.subtract(quotient, b.constant(1, total.dtype, total.shape)), quotient)
