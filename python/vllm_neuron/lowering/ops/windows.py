"""Pooling: folds of windows of the last dimensions.

Eager's contract: windows start at multiples of the stride from the padded border; with ceil_mode
the last one may reach beyond the padding but must start inside. Padding is never the greatest
element, and `max_pool` names the position in the unpadded plane: the first of equal ones, the last
NaN if there is one. `avg_pool` divides by the part of the window that lies within the padded plane,
or within the plane itself without count_include_pad. An adaptive window i of n over size s goes
from floor(i * s / n) to ceil((i + 1) * s / n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, is_float, lowest
from vllm_neuron.lowering.ops.registry import lowers


class _Windows:
    """Where the windows of one pooling node lie, by dimension of the plane."""

    def __init__(self, b: Builder, rank: int, *, dilated: bool) -> None:
        self.sizes = b.tensor(0).shape[-rank:]
        self.kernel = _per_dimension(b.arg(1), rank)
        self.stride = _per_dimension(b.arg(2) or self.kernel, rank)
        self.padding = _per_dimension(b.arg(3) or 0, rank)
        self.dilation = _per_dimension(b.arg(4), rank) if dilated else [1] * rank
        self.count = b.shape[-rank:]

    def beyond(self, dimension: int) -> int:
        """How much padding the last window needs at the high end."""
        reach = (self.count[dimension] - 1) * self.stride[dimension]
        reach += (self.kernel[dimension] - 1) * self.dilation[dimension] + 1
        return reach - self.sizes[dimension] - self.padding[dimension]

    def counted(self, dimension: int, *, include_padding: bool) -> list[int]:
        """How many elements the average of each window is taken over, along one dimension."""
        size, padding = self.sizes[dimension], self.padding[dimension]
        counts = []
        for index in range(self.count[dimension]):
            start = index * self.stride[dimension] - padding
            stop = min(start + self.kernel[dimension], size + padding)
            if not include_padding:
                start, stop = max(start, 0), min(stop, size)
            counts.append(stop - start)
        return counts


def _per_dimension(value: int | Sequence[int], rank: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * rank if len(given) == 1 else given


def _fold(
    b: Builder,
    tensors: Sequence[Tensor],
    initial: Sequence[Tensor],
    windows: _Windows,
    body: object,
) -> list[Tensor]:
    leading = tensors[0].rank - len(windows.sizes)
    pads = [[0, 0]] * leading
    pads += [[windows.padding[index], windows.beyond(index)] for index in range(len(windows.sizes))]
    flat = ",".join(f"[{low}, {high}]" for low, high in pads)
    shape = (*tensors[0].shape[:leading], *windows.count)
    dtypes = [tensor.dtype for tensor in tensors]
    operation = stablehlo.ReduceWindowOp(
        [b.type(dtype, shape) for dtype in dtypes],
        [tensor.value for tensor in tensors],
        [tensor.value for tensor in initial],
        [1] * leading + windows.kernel,
        window_strides=[1] * leading + windows.stride,
        window_dilations=[1] * leading + windows.dilation,
        padding=ir.Attribute.parse(f"dense<[{flat}]> : tensor<{len(pads)}x2xi64>"),
    )
    b.region(operation.operation, dtypes * 2, body)
    return [
        Tensor(value, dtype, shape) for value, dtype in zip(operation.results, dtypes, strict=True)
    ]


@lowers("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def max_pool(b: Builder) -> Sequence[Tensor]:
    """Greatest element of each window and its position in the plane."""
    rank = 2 if "2d" in b.operator else 3
    tensor = b.tensor(0)
    windows = _Windows(b, rank, dilated=True)
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape), b.constant(0, "int64", b.shape)
    key = b.convert(tensor, compute_dtype(tensor.dtype))
    plane = math.prod(windows.sizes)
    places = b.broadcast_in_dim(
        b.reshape(b.iota(0, (plane,)), windows.sizes),
        tensor.shape,
        range(tensor.rank - rank, tensor.rank),
    )

    def better(inner: Builder, pairs: list[Tensor]) -> Sequence[Tensor]:
        old, old_place, new, new_place = pairs
        wins = inner.compare("GT", new, old)
        first = inner.compare("LT", new_place, old_place)
        ties = inner.logical_and(inner.compare("EQ", new, old), first)
        if is_float(old.dtype):
            old_nan, new_nan = inner.is_nan(old), inner.is_nan(new)
            later = inner.compare("GT", new_place, old_place)
            latest = inner.logical_or(inner.logical_not(old_nan), later)
            wins = inner.logical_or(wins, inner.logical_and(new_nan, latest))
        take = inner.logical_or(wins, ties)
        return inner.select(take, new, old), inner.select(take, new_place, old_place)

    # Greater than every position, so that an element equal to the initial value still wins.
    beyond = b.constant(plane, "int64")
    values, positions = _fold(
        b, [key, places], [b.constant(lowest(key.dtype), key.dtype), beyond], windows, better
    )
    return b.convert(values, b.dtype), positions


@lowers("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def avg_pool(b: Builder) -> Tensor:
    """Mean of each window."""
    rank = int(b.operator.partition("avg_pool")[2][0])
    windows = _Windows(b, rank, dilated=False)
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape)
    include = b.arg(5) is not False
    divisor = b.arg(6)
    tensor = b.tensor(0, compute_dtype(b.dtype))
    total = _fold(
        b,
        [tensor],
        [b.constant(0, tensor.dtype)],
        windows,
        lambda inner, pair: [inner.add(*pair)],
    )[0]
    if divisor is not None:
        elements = b.constant(divisor, total.dtype, total.shape)
    else:
        elements = b.constant(1, total.dtype, total.shape)
        for dimension in range(rank):
            counts = windows.counted(dimension, include_padding=include)
            columns = [b.constant(count, total.dtype, (1,)) for count in counts]
            along = [total.rank - rank + dimension]
            spread = b.broadcast_in_dim(b.concatenate(columns, 0), total.shape, along)
            elements = b.multiply(elements, spread)
    return b.convert(b.binary("divide", total, elements), b.dtype)


@lowers("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default")
def adaptive_avg_pool(b: Builder) -> Tensor:
    """Mean of windows that cover the plane evenly."""
    rank = 2 if "2d" in b.operator else 3
    tensor = b.tensor(0, compute_dtype(b.dtype))
    if math.prod(b.shape) == 0:
        return b.constant(0, b.dtype, b.shape)
    for dimension in range(tensor.rank - rank, tensor.rank):
        size, count = tensor.shape[dimension], b.shape[dimension]
        means = []
        for index in range(count):
            start, stop = index * size // count, -(-(index + 1) * size // count)
            part = b.slice(tensor, dimension, start, stop)
            total = b.reduce(
                [part],
                [b.constant(0, part.dtype)],
                [dimension],
                lambda inner, pair: [inner.add(*pair)],
            )[0]
            shape = (*part.shape[:dimension], 1, *part.shape[dimension + 1 :])
            divisor = b.constant(stop - start, part.dtype, shape)
            means.append(b.binary("divide", b.reshape(total, shape), divisor))
        tensor = b.concatenate(means, dimension)
    return b.convert(tensor, b.dtype)
