"""Sums, products, means, variances, extremes and truth over dimensions.

Eager's contract: float16 and bfloat16 are accumulated in float32 and rounded once, except in
products. Integers wrap around. The extremes of a row with NaN are NaN. An empty sum is 0, an empty
product 1, an empty mean NaN; `any` of nothing is false, `all` true. The softmax of a row of
-infinity is NaN. A variance with no degree of freedom left is infinity, or NaN if nothing differs
from the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, highest, is_complex, lowest
from vllm_neuron.lowering.ops.registry import lowers


def _dimensions(tensor: Tensor, dimensions: int | Sequence[int] | None) -> list[int]:
    if tensor.rank == 0:
        return []
    if dimensions is None or (not isinstance(dimensions, int) and len(dimensions) == 0):
        return list(range(tensor.rank))
    given = [dimensions] if isinstance(dimensions, int) else dimensions
    return sorted(dimension % tensor.rank for dimension in given)


def _fold(
    b: Builder, tensor: Tensor, dimensions: Sequence[int], initial: object, operation: str
) -> Tensor:
    """Fold in the tensor's dtype, then cast and shape like the result."""
    start = b.constant(initial, tensor.dtype)
    folded = tensor
    if dimensions:
        folded = b.reduce(
            [tensor],
            [start],
            dimensions,
            lambda inner, pair: [getattr(inner, operation)(*pair)],
        )[0]
    return folded


def _result(b: Builder, tensor: Tensor, index: int = 0) -> Tensor:
    dtype, shape = b.specs[index]
    return b.convert(b.reshape(tensor, shape), dtype)


@lowers("sum.default", "sum.dim_IntList")
def total(b: Builder) -> Tensor:
    """Sum in the result's dtype."""
    dimensions = b.arg(1) if b.operator.endswith("IntList") else None
    tensor = b.tensor(0, compute_dtype(b.dtype))
    return _result(b, _fold(b, tensor, _dimensions(tensor, dimensions), 0, "add"))


@lowers("mean.default", "mean.dim")
def mean(b: Builder) -> Tensor:
    """Sum divided by the number of elements."""
    tensor = b.tensor(0, compute_dtype(b.dtype))
    dimensions = _dimensions(tensor, b.arg(1) if b.operator.endswith("dim") else None)
    count = 1
    for dimension in dimensions:
        count *= tensor.shape[dimension]
    folded = _fold(b, tensor, dimensions, 0, "add")
    divisor = b.constant(count, folded.dtype, folded.shape)
    return _result(b, b.binary("divide", folded, divisor))


@lowers("var.correction")
def variance(b: Builder) -> Tensor:
    """Mean of the squared distance from the mean, over the number of elements less a correction."""
    return _result(b, _mean_and_variance(b)[1])


@lowers("var_mean.correction")
def variance_and_mean(b: Builder) -> Sequence[Tensor]:
    """The variance and the mean."""
    mean, squares = _mean_and_variance(b)
    return _result(b, squares), _result(b, mean, 1)


def _mean_and_variance(b: Builder) -> tuple[Tensor, Tensor]:
    tensor = b.tensor(0)
    tensor = b.convert(tensor, compute_dtype(tensor.dtype))
    dimensions = _dimensions(tensor, b.arg(1))
    correction = 1 if b.arg(2) is None else b.arg(2)
    count = 1
    for dimension in dimensions:
        count *= tensor.shape[dimension]
    folded = _fold(b, tensor, dimensions, 0, "add")
    mean = b.binary("divide", folded, b.constant(count, folded.dtype, folded.shape))
    rest = [position for position in range(tensor.rank) if position not in dimensions]
    distance = b.subtract(tensor, b.broadcast_in_dim(mean, tensor.shape, rest))
    if is_complex(tensor.dtype):
        part = "float32" if tensor.dtype == "complex64" else "float64"
        distance = b.unary("abs", distance, part)
    squares = _fold(b, b.multiply(distance, distance), dimensions, 0, "add")
    degrees = b.constant(max(count - correction, 0), squares.dtype, squares.shape)
    return mean, b.binary("divide", squares, degrees)


@lowers("prod.default", "prod.dim_int")
def product(b: Builder) -> Tensor:
    """Product in the result's dtype."""
    dimension = b.arg(1) if b.operator.endswith("dim_int") else None
    tensor = b.tensor(0, b.dtype)
    return _result(b, _fold(b, tensor, _dimensions(tensor, dimension), 1, "multiply"))


@lowers("amax.default", "max.default")
def amax(b: Builder) -> Tensor:
    """Greatest value."""
    tensor = b.tensor(0)
    dimensions = _dimensions(tensor, b.arg(1))
    return _result(b, _fold(b, tensor, dimensions, lowest(tensor.dtype), "maximum"))


@lowers("amin.default", "min.default")
def amin(b: Builder) -> Tensor:
    """Least value."""
    tensor = b.tensor(0)
    dimensions = _dimensions(tensor, b.arg(1))
    return _result(b, _fold(b, tensor, dimensions, highest(tensor.dtype), "minimum"))


@lowers("any.default", "any.dim", "any.dims")
def some(b: Builder) -> Tensor:
    """One is not zero."""
    tensor = b.tensor(0, "bool")
    return _result(b, _fold(b, tensor, _dimensions(tensor, b.arg(1)), 0, "maximum"))


@lowers("all.default", "all.dim", "all.dims")
def every(b: Builder) -> Tensor:
    """None is zero."""
    tensor = b.tensor(0, "bool")
    return _result(b, _fold(b, tensor, _dimensions(tensor, b.arg(1)), 1, "minimum"))


def _shifted(b: Builder) -> tuple[Tensor, int]:
    """The operand less its greatest value along the softmax dimension, in the compute dtype."""
    tensor = b.tensor(0, compute_dtype(b.dtype))
    dimension = b.arg(1) % tensor.rank
    greatest = _along(b, tensor, dimension, lowest(tensor.dtype), "maximum")
    return b.subtract(tensor, greatest), dimension


def _along(b: Builder, tensor: Tensor, dimension: int, initial: object, operation: str) -> Tensor:
    """A fold over one dimension, repeated along it."""
    folded = _fold(b, tensor, [dimension], initial, operation)
    rest = [position for position in range(tensor.rank) if position != dimension]
    return b.broadcast_in_dim(folded, tensor.shape, rest)


@lowers("_softmax.default")
def softmax(b: Builder) -> Tensor:
    """Exponentials that sum to 1 along a dimension."""
    if b.tensor(0).rank == 0:
        shifted = b.subtract(b.tensor(0, b.dtype), b.tensor(0, b.dtype))
        return b.unary("exponential", shifted)
    shifted, dimension = _shifted(b)
    powers = b.unary("exponential", shifted)
    total = _along(b, powers, dimension, 0, "add")
    return b.convert(b.binary("divide", powers, total), b.dtype)


@lowers("_log_softmax.default")
def log_softmax(b: Builder) -> Tensor:
    """Logarithm of the softmax."""
    if b.tensor(0).rank == 0:
        return b.subtract(b.tensor(0, b.dtype), b.tensor(0, b.dtype))
    shifted, dimension = _shifted(b)
    total = _along(b, b.unary("exponential", shifted), dimension, 0, "add")
    return b.convert(b.subtract(shifted, b.unary("log", total)), b.dtype)
