"""Reading and writing by index tensors.

Eager's contract:
    * `index` and `index_put` and `take` and `put` wrap negative indices; the other operators refuse
      them, so that what happens here does not matter. StableHLO would clamp reads and drop writes.
    * Index tensors are broadcast against each other. Their dimensions take the place of the indexed
      ones if those are adjacent, else they come first.
    * A boolean mask selects in row-major order. Only writes by mask have a static shape.
    * Of several writes to one element the last counts; with accumulate all do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_neuron.lowering.ops.builder import Builder, Refusal, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype
from vllm_neuron.lowering.ops.registry import lowers

__all__ = ["element_indices", "prefix_count", "wrapped"]


def wrapped(b: Builder, indices: Tensor, size: int) -> Tensor:
    """Indices with the size added where they are negative."""
    if indices.dtype not in ("int32", "int64"):
        indices = b.convert(indices, "int64")
    zero = b.constant(0, indices.dtype, indices.shape)
    moved = b.add(indices, b.constant(size, indices.dtype, indices.shape))
    return b.select(b.compare("LT", indices, zero), moved, indices)


def _joined(b: Builder, parts: Sequence[Tensor]) -> Tensor:
    """Index tensors of one shape side by side in a new last dimension."""
    wide = "int64" if any(part.dtype == "int64" for part in parts) else parts[0].dtype
    columns = [b.reshape(b.convert(part, wide), (*part.shape, 1)) for part in parts]
    return b.concatenate(columns, columns[0].rank - 1)


@dataclass(frozen=True, slots=True)
class _Selection:
    """Where `x[indices]` reads.

    Attributes:
        indices: (*broadcast, number of indexed dimensions).
        indexed: the dimensions of x.
        windows: dimensions of the result that hold the dimensions of x that are not indexed.
        shape: shape of the result.
    """

    indices: Tensor
    indexed: tuple[int, ...]
    windows: tuple[int, ...]
    shape: tuple[int, ...]


def _selection(b: Builder, target: Tensor, indices: Sequence[Tensor | None]) -> _Selection:
    indexed = tuple(position for position, index in enumerate(indices) if index is not None)
    given = [index for index in indices if index is not None]
    common = _broadcast_shape([index.shape for index in given])
    parts = [
        b.expand(wrapped(b, index, target.shape[dimension]), common)
        for dimension, index in zip(indexed, given, strict=True)
    ]
    rest = [dimension for dimension in range(target.rank) if dimension not in indexed]
    adjacent = indexed == tuple(range(indexed[0], indexed[-1] + 1))
    place = indexed[0] if adjacent else 0
    sizes = [target.shape[dimension] for dimension in rest]
    windows = [*range(place), *range(place + len(common), len(rest) + len(common))]
    return _Selection(
        _joined(b, parts), indexed, tuple(windows), (*sizes[:place], *common, *sizes[place:])
    )


def _broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)
    )


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(b: Builder) -> Tensor:
    """x[indices]."""
    target, indices = b.tensor(0), b.arg(1)
    if any(item is not None and item.dtype in ("bool", "uint8") for item in indices):
        raise Refusal("reading by a boolean mask has a result whose size depends on its values")
    chosen = _selection(b, target, indices)
    if math.prod(chosen.shape) == 0 or target.size == 0:
        return b.constant(0, b.dtype, b.shape)
    return b.gather(
        target,
        chosen.indices,
        indexed=chosen.indexed,
        offsets=chosen.windows,
        shape=chosen.shape,
    )


@lowers("index_put.default", "_unsafe_index_put.default")
def index_put(b: Builder) -> Tensor:
    """x[indices] = values, or += with accumulate."""
    target, indices, values, accumulate = b.tensor(0), b.arg(1), b.tensor(2), bool(b.arg(3))
    if any(item is not None and item.dtype in ("bool", "uint8") for item in indices):
        return _masked_put(b, target, indices, values, accumulate=accumulate)
    chosen = _selection(b, target, indices)
    if math.prod(chosen.shape) == 0 or target.size == 0:
        return target
    updates = b.expand(b.convert(values, target.dtype), chosen.shape)
    return b.scatter(
        target,
        chosen.indices,
        updates,
        indexed=chosen.indexed,
        windows=chosen.windows,
        combine=(lambda inner, pair: inner.add(*pair)) if accumulate else None,
    )


def _masked_put(
    b: Builder,
    target: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    *,
    accumulate: bool,
) -> Tensor:
    """A write by one mask over the leading dimensions becomes a choice at every element."""
    if len(indices) != 1:
        raise Refusal("writing by a mask together with other indices is not supported")
    mask = b.convert(indices[0], "bool")
    values = b.convert(values, target.dtype)
    rest = target.shape[mask.rank :]
    if values.rank > len(rest) and values.shape[0] != 1:
        # One row of values for each true element of the mask, in order.
        rows = b.expand(values, (values.shape[0], *rest))
        flat = b.reshape(mask, (mask.size,))
        row = b.subtract(prefix_count(b, flat), b.constant(1, "int64", flat.shape))
        taken = _rows(b, rows, b.reshape(row, mask.shape))
    else:
        if values.rank > len(rest):
            values = b.reshape(values, values.shape[1:])
        taken = b.expand(values, target.shape)
    if accumulate:
        taken = b.add(target, taken)
    spread = b.broadcast_in_dim(mask, target.shape, range(mask.rank))
    return b.select(spread, taken, target)


def prefix_count(b: Builder, mask: Tensor) -> Tensor:
    """How many elements of a flat mask are true up to and including each one, int64."""
    if mask.size == 0:
        return b.constant(0, "int64", mask.shape)
    ones = b.convert(mask, "int64")
    zero = b.constant(0, "int64")
    return b.running([ones], [zero], 0, lambda inner, pair: [inner.add(*pair)])[0]


def _rows(b: Builder, rows: Tensor, positions: Tensor) -> Tensor:
    """rows[positions] along the first dimension, clamped to what exists."""
    if positions.size == 0 or rows.size == 0:
        return b.constant(0, rows.dtype, (*positions.shape, *rows.shape[1:]))
    return b.gather(
        rows,
        b.reshape(positions, (*positions.shape, 1)),
        indexed=(0,),
        offsets=range(positions.rank, positions.rank + rows.rank - 1),
        shape=(*positions.shape, *rows.shape[1:]),
    )


@lowers("index_select.default")
def index_select(b: Builder) -> Tensor:
    """Whole slices along one dimension."""
    target, dimension, indices = b.tensor(0), b.arg(1), b.tensor(2)
    if target.rank == 0:
        return target
    dimension %= target.rank
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape)
    return b.gather(
        target,
        b.reshape(indices, (indices.size, 1)),
        indexed=(dimension,),
        offsets=[position for position in range(target.rank) if position != dimension],
        shape=b.shape,
    )


@lowers("embedding.default")
def embedding(b: Builder) -> Tensor:
    """Rows of a table."""
    table, indices = b.tensor(0), b.tensor(1)
    return _rows(b, table, indices)


@lowers("take.default")
def take(b: Builder) -> Tensor:
    """Elements of the flattened tensor."""
    target, indices = b.tensor(0), b.tensor(1)
    return _rows(b, b.reshape(target, (target.size,)), wrapped(b, indices, target.size))


@lowers("put.default")
def put(b: Builder) -> Tensor:
    """Writes into the flattened tensor."""
    target, indices, values, accumulate = b.tensor(0), b.tensor(1), b.tensor(2), bool(b.arg(3))
    if indices.size == 0:
        return target
    positions = b.reshape(wrapped(b, indices, target.size), (indices.size, 1))
    written = b.scatter(
        b.reshape(target, (target.size,)),
        positions,
        b.reshape(values, (indices.size,)),
        indexed=(0,),
        windows=(),
        combine=(lambda inner, pair: inner.add(*pair)) if accumulate else None,
    )
    return b.reshape(written, target.shape)


def element_indices(b: Builder, indices: Tensor, dimension: int) -> Tensor:
    """Full positions of elements whose index along `dimension` is given, (*shape, rank)."""
    indices = indices if indices.dtype == "int32" else b.convert(indices, "int64")
    parts = [
        indices if position == dimension else b.iota(position, indices.shape, indices.dtype)
        for position in range(indices.rank)
    ]
    return _joined(b, parts)


@lowers("gather.default")
def gather(b: Builder) -> Tensor:
    """Elements along one dimension, one index for each."""
    target, dimension, indices = b.tensor(0), b.arg(1), b.tensor(2)
    if target.rank == 0 or indices.rank == 0:
        return b.reshape(target, b.shape)
    if indices.size == 0:
        return b.constant(0, b.dtype, b.shape)
    return b.gather(
        target,
        element_indices(b, indices, dimension % target.rank),
        indexed=range(target.rank),
        offsets=(),
        shape=b.shape,
    )


@lowers("masked_scatter.default")
def masked_scatter(b: Builder) -> Tensor:
    """The source's elements in order where the mask is true."""
    target, mask, source = b.tensor(0), b.tensor(1, "bool"), b.tensor(2)
    if source.size == 0 or target.size == 0:
        return b.expand(target, b.shape)
    target, mask = b.expand(target, b.shape), b.expand(mask, b.shape)
    flat = b.reshape(mask, (mask.size,))
    position = b.subtract(prefix_count(b, flat), b.constant(1, "int64", flat.shape))
    taken = _rows(b, b.reshape(source, (source.size,)), b.reshape(position, b.shape))
    return b.select(mask, b.convert(taken, b.dtype), target)


@lowers("nonzero_static.default")
def nonzero_static(b: Builder) -> Tensor:
    """Positions of the elements that are not zero, cut or filled to a given number."""
    tensor, size, fill = b.tensor(0), b.arg(1), b.arg(2)
    if size == 0 or tensor.rank == 0 or tensor.size == 0:
        return b.constant(-1 if fill is None else fill, b.dtype, b.shape)
    flat = b.reshape(b.convert(tensor, "bool"), (tensor.size,))
    place = b.subtract(prefix_count(b, flat), b.constant(1, "int64", flat.shape))
    # A place beyond the end is dropped by scatter.
    outside = b.constant(size, "int64", flat.shape)
    place = b.reshape(b.select(flat, place, outside), (tensor.size, 1))
    columns = []
    for dimension in range(tensor.rank):
        counted = b.reshape(b.iota(dimension, tensor.shape), (tensor.size,))
        column = b.constant(-1 if fill is None else fill, "int64", (size,))
        column = b.scatter(column, place, counted, indexed=(0,), windows=())
        columns.append(b.reshape(column, (size, 1)))
    return b.concatenate(columns, 1)


@lowers("index_add.default")
def index_add(b: Builder) -> Tensor:
    """Adds alpha times slices of the source along one dimension."""
    return _index_write(b, lambda inner, pair: inner.add(*pair), alpha=b.arg(4))


@lowers("index_copy.default")
def index_copy(b: Builder) -> Tensor:
    """Replaces slices along one dimension."""
    return _index_write(b, None, alpha=None)


def _index_write(b: Builder, combine: object, *, alpha: object) -> Tensor:
    target, dimension, indices, source = b.tensor(0), b.arg(1), b.tensor(2), b.tensor(3)
    shape = target.shape
    if target.rank == 0:
        target, source = b.reshape(target, (1,)), b.reshape(source, (1,))
        dimension = 0
    if indices.size == 0 or source.size == 0:
        return b.reshape(target, shape)
    dimension %= target.rank
    # float16 and bfloat16 sums are rounded after every addition, as eager's are.
    if alpha is not None and alpha != 1:
        wide = b.convert(source, compute_dtype(source.dtype))
        source = b.convert(
            b.multiply(wide, b.constant(alpha, wide.dtype, wide.shape)), source.dtype
        )
    written = b.scatter(
        target,
        b.reshape(indices, (indices.size, 1)),
        source,
        indexed=(dimension,),
        windows=[position for position in range(target.rank) if position != dimension],
        combine=combine,
    )
    return b.reshape(written, shape)
