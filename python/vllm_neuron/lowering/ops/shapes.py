"""Slices, joins, padding, strided views and new tensors.

Eager's contract: bounds of a slice are wrapped once when negative and then clamped to the
dimension; a tensor of shape (0,) joins with anything; a strided view counts in the storage of a
tensor, which must be the whole storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, is_float
from vllm_neuron.lowering.ops.registry import lowers


def _bounds(size: int, start: Any, stop: Any) -> tuple[int, int]:
    start = 0 if start is None else start
    stop = size if stop is None else stop
    start = min(max(start + size if start < 0 else start, 0), size)
    stop = min(max(stop + size if stop < 0 else stop, start), size)
    return start, stop


@lowers("slice.Tensor")
def slice_tensor(b: Builder) -> Tensor:
    """A range of one dimension."""
    tensor = b.tensor(0)
    dimension = (b.arg(1) or 0) % tensor.rank
    start, stop = _bounds(tensor.shape[dimension], b.arg(2), b.arg(3))
    return b.slice(tensor, dimension, start, stop, b.arg(4) or 1)


@lowers("slice_scatter.default")
def slice_scatter(b: Builder) -> Tensor:
    """The tensor with a range of one dimension replaced."""
    tensor, source = b.tensor(0), b.tensor(1, b.dtype)
    dimension = (b.arg(2) or 0) % tensor.rank
    size, step = tensor.shape[dimension], b.arg(5) or 1
    start, stop = _bounds(size, b.arg(3), b.arg(4))
    shape = list(tensor.shape)
    shape[dimension] = -(-(stop - start) // step)
    return _replace(b, tensor, b.expand(source, shape), dimension, start, step)


@lowers("select_scatter.default")
def select_scatter(b: Builder) -> Tensor:
    """The tensor with one element of one dimension replaced."""
    tensor, source = b.tensor(0), b.tensor(1, b.dtype)
    dimension = b.arg(2) % tensor.rank
    shape = list(tensor.shape)
    index = b.arg(3) % shape[dimension]
    shape[dimension] = 1
    return _replace(b, tensor, b.reshape(source, shape), dimension, index, 1)


def _replace(
    b: Builder, tensor: Tensor, source: Tensor, dimension: int, start: int, step: int
) -> Tensor:
    """Write `source` at start, start + step, ... of a dimension."""
    size, count = tensor.shape[dimension], source.shape[dimension]
    if source.size == 0:
        return tensor
    if count == size:
        return source
    if step == 1:
        parts = [
            b.slice(tensor, dimension, 0, start),
            source,
            b.slice(tensor, dimension, start + count, size),
        ]
        return b.concatenate([part for part in parts if part.size], dimension)
    positions = b.iota(0, (count, 1))
    positions = b.multiply(positions, b.constant(step, "int64", positions.shape))
    positions = b.add(positions, b.constant(start, "int64", positions.shape))
    windows = [position for position in range(tensor.rank) if position != dimension]
    return b.scatter(tensor, positions, source, indexed=(dimension,), windows=windows)


@lowers("select.int")
def select(b: Builder) -> Tensor:
    """One element of one dimension, which goes away."""
    tensor = b.tensor(0)
    dimension = b.arg(1) % tensor.rank
    index = b.arg(2) % tensor.shape[dimension]
    return b.reshape(b.slice(tensor, dimension, index, index + 1), b.shape)


@lowers("unbind.int")
def unbind(b: Builder) -> Sequence[Tensor]:
    """Every element of one dimension."""
    tensor = b.tensor(0)
    dimension = (b.arg(1) or 0) % tensor.rank
    return [
        b.reshape(b.slice(tensor, dimension, index, index + 1), b.specs[index][1])
        for index in range(tensor.shape[dimension])
    ]


@lowers("split_with_sizes.default", "split.Tensor")
def split(b: Builder) -> Sequence[Tensor]:
    """Pieces along one dimension."""
    tensor = b.tensor(0)
    dimension = (b.arg(2) or 0) % tensor.rank
    pieces, start = [], 0
    for _, shape in b.specs:
        pieces.append(b.slice(tensor, dimension, start, start + shape[dimension]))
        start += shape[dimension]
    return pieces


@lowers("cat.default")
def cat(b: Builder) -> Tensor:
    """One after the other."""
    tensors = [b.convert(tensor, b.dtype) for tensor in b.arg(0) if tensor.shape != (0,)]
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape)
    dimension = (b.arg(1) or 0) % len(b.shape)
    return b.concatenate([tensor for tensor in tensors if tensor.size], dimension)


@lowers("constant_pad_nd.default")
def constant_pad(b: Builder) -> Tensor:
    """Pad, or crop where negative; pairs start at the last dimension."""
    tensor, amounts = b.tensor(0), b.arg(1)
    low, high = [0] * tensor.rank, [0] * tensor.rank
    for pair in range(len(amounts) // 2):
        low[-1 - pair], high[-1 - pair] = amounts[2 * pair], amounts[2 * pair + 1]
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape)
    return b.pad(tensor, low, high, b.constant(b.arg(2) or 0, b.dtype))


@lowers("flip.default")
def flip(b: Builder) -> Tensor:
    """Mirrored dimensions."""
    tensor = b.tensor(0)
    return b.reverse(tensor, [dimension % tensor.rank for dimension in b.arg(1)])


@lowers("unfold.default")
def unfold(b: Builder) -> Tensor:
    """Windows along one dimension, in a new last dimension."""
    tensor, dimension, size, step = b.tensor(0), b.arg(1), b.arg(2), b.arg(3)
    if tensor.rank == 0:
        return b.reshape(tensor, b.shape)
    dimension %= tensor.rank
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape)
    count = b.shape[dimension]
    starts = b.multiply(b.iota(0, (count, size)), b.constant(step, "int64", (count, size)))
    positions = b.reshape(b.add(starts, b.iota(1, (count, size))), (count, size, 1))
    before = list(range(dimension))
    after = list(range(dimension + 1, tensor.rank))
    shape = (*tensor.shape[:dimension], count, size, *tensor.shape[dimension + 1 :])
    offsets = [*before, *(position + 1 for position in after)]
    windows = b.gather(tensor, positions, indexed=(dimension,), offsets=offsets, shape=shape)
    return b.transpose(windows, [*before, dimension, *offsets[dimension:], dimension + 1])


def _strided_positions(
    b: Builder, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    positions = b.constant(offset, "int64", size)
    for dimension, step in enumerate(stride):
        along = b.iota(dimension, size)
        positions = b.add(positions, b.multiply(along, b.constant(step, "int64", size)))
    return b.reshape(positions, (*size, 1))


@lowers("as_strided.default", "as_strided_copy.default")
def as_strided(b: Builder) -> Tensor:
    """Elements of the storage at given strides."""
    tensor, size, stride = b.tensor(0), b.arg(1), b.arg(2)
    if math.prod(size) == 0:
        return b.constant(0, b.dtype, b.shape)
    flat = b.reshape(b.transpose(tensor, b.storage_order), (tensor.size,))
    positions = _strided_positions(b, size, stride, b.arg(3) or 0)
    return b.gather(flat, positions, indexed=(0,), offsets=(), shape=b.shape)


@lowers("as_strided_scatter.default")
def as_strided_scatter(b: Builder) -> Tensor:
    """The tensor with elements of its storage at given strides replaced."""
    tensor, source, size, stride = b.tensor(0), b.tensor(1), b.arg(2), b.arg(3)
    if source.size == 0:
        return tensor
    stored = b.transpose(tensor, b.storage_order)
    flat = b.reshape(stored, (tensor.size,))
    positions = _strided_positions(b, size, stride, b.arg(4) or 0)
    written = b.scatter(flat, positions, source, indexed=(0,), windows=())
    back = sorted(range(tensor.rank), key=lambda dimension: b.storage_order[dimension])
    return b.transpose(b.reshape(written, stored.shape), back)


def _diagonal(b: Builder, tensor: Tensor, first: int) -> tuple[Tensor, list[int], int]:
    """Positions of a diagonal, the two dimensions it runs through, and its length.

    The arguments offset, dim1 and dim2 start at `first`.
    """
    offset, one, two = b.arg(first) or 0, b.arg(first + 1) or 0, b.arg(first + 2)
    one, two = one % tensor.rank, (1 if two is None else two) % tensor.rank
    rows, columns = tensor.shape[one] + min(offset, 0), tensor.shape[two] - max(offset, 0)
    count = max(min(rows, columns), 0)
    along = b.iota(0, (count, 1))
    row = b.add(along, b.constant(max(-offset, 0), "int64", along.shape))
    column = b.add(along, b.constant(max(offset, 0), "int64", along.shape))
    return b.concatenate([row, column], 1), [one, two], count


@lowers("diagonal.default")
def diagonal(b: Builder) -> Tensor:
    """A diagonal of two dimensions, in a new last dimension."""
    tensor = b.tensor(0)
    positions, dimensions, count = _diagonal(b, tensor, 1)
    if count == 0 or tensor.size == 0:
        return b.constant(0, b.dtype, b.shape)
    offsets = range(tensor.rank - 2)
    return b.gather(tensor, positions, indexed=dimensions, offsets=offsets, shape=b.shape)


@lowers("diagonal_scatter.default")
def diagonal_scatter(b: Builder) -> Tensor:
    """The tensor with a diagonal replaced."""
    tensor, source = b.tensor(0), b.tensor(1, b.dtype)
    positions, dimensions, count = _diagonal(b, tensor, 2)
    if count == 0 or tensor.size == 0:
        return tensor
    windows = range(tensor.rank - 2)
    return b.scatter(tensor, positions, source, indexed=dimensions, windows=windows)


@lowers("full.default", "full_like.default", "scalar_tensor.default", "empty.memory_format")
def full(b: Builder) -> Tensor:
    """One number everywhere; what is left uninitialised is 0."""
    name = b.operator.split(".")[1]
    value = {"empty": 0, "scalar_tensor": b.arg(0)}.get(name, b.arg(1))
    return b.constant(value, b.dtype, b.shape)


@lowers("arange.start_step")
def arange(b: Builder) -> Tensor:
    """start, start + step, ..."""
    start, step = b.arg(0), 1 if b.arg(2) is None else b.arg(2)
    if b.shape == (0,):
        return b.constant(0, b.dtype, b.shape)
    # As eager's kernel: integers exactly; floats as start + step * i in double precision, narrow
    # ones in single precision (at::acc_type in aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp).
    floats = is_float(b.dtype) or any(isinstance(item, float) for item in (start, step))
    wide = "float64" if floats else "int64"
    if compute_dtype(b.dtype) != b.dtype:
        wide = "float32"
    counted = b.multiply(b.iota(0, b.shape, wide), b.constant(step, wide, b.shape))
    return b.convert(b.add(counted, b.constant(start, wide, b.shape)), b.dtype)


@lowers("copy.default")
def copy(b: Builder) -> Tensor:
    """The source in the shape and dtype of the first tensor."""
    return b.expand(b.tensor(1, b.dtype), b.shape)
