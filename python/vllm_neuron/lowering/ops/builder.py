"""What an own lowering works with: typed tensors, the node's arguments, StableHLO by short names.

Values keep their torch dtype, since StableHLO's types alone do not say how eager treats them.
Methods broadcast nothing and convert nothing unless they say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from vllm_neuron.lowering.ops.constants import splat
from vllm_neuron.lowering.ops.dtypes import (
    E4M3_MAX,
    ELEMENT_TYPES,
    bits,
    is_complex,
    is_float,
    is_unsigned,
)

__all__ = ["Builder", "Refusal", "Tensor"]


class Refusal(Exception):
    """The operator cannot be lowered with these operands; the text says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A StableHLO value with its torch dtype and static shape."""

    value: ir.Value
    dtype: str
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Builder:
    """Emits the operations of one node at the current insertion point.

    Args:
        node: entry of the graph message.
        values: the node's tensor operands by number.

    Attributes:
        specs: dtype and shape of each result, None for a result that is no tensor.
    """

    def __init__(self, node: Mapping[str, Any], values: Mapping[int, Tensor]) -> None:
        self._node = node
        self._values = values
        self.specs = [
            None if result is None else (result[1], tuple(result[2])) for result in node["results"]
        ]

    # --- the node ---------------------------------------------------------------------------

    @property
    def operator(self) -> str:
        """The node's ATen operator."""
        return self._node["op"]

    @property
    def dtype(self) -> str:
        """Dtype of the first result."""
        return self.specs[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.specs[0][1]

    @property
    def common(self) -> str:
        """The dtype that eager promotes the operands of this operator to."""
        return self._node["common"]

    @property
    def storage_order(self) -> list[int]:
        """Dimensions of a strided view's tensor, from the slowest in memory to the fastest."""
        return self._node["storage_order"]

    def arg(self, index: int) -> Any:
        """Argument in schema order: a `Tensor`, number, str, None, dtype name or list of these.

        A number passed for a tensor stays a number.
        """
        arguments = self._node["args"]
        return self._decode(arguments[index]) if index < len(arguments) else None

    def _decode(self, argument: list[Any]) -> Any:
        kind, *rest = argument
        if kind == "value":
            return self._values[rest[0]]
        if kind == "none":
            return None
        if kind == "list":
            return [self._decode(item) for item in rest[1]]
        if kind == "float":
            return float.fromhex(rest[0])
        if kind == "complex":
            return complex(*(float.fromhex(part) for part in rest))
        if kind == "scalar_tensor":
            return self._decode(rest)
        return rest[0]

    def tensor(self, index: int, dtype: str | None = None) -> Tensor:
        """Argument as a tensor, converted to `dtype`; a number becomes one of rank 0."""
        value = self.arg(index)
        if not isinstance(value, Tensor):
            return self.constant(value, dtype or self.dtype)
        return value if dtype is None else self.convert(value, dtype)

    # --- constants and types ----------------------------------------------------------------

    def type(self, dtype: str, shape: Sequence[int]) -> ir.RankedTensorType:
        """The StableHLO type of a tensor."""
        return ir.RankedTensorType.get(list(shape), ir.Type.parse(ELEMENT_TYPES[dtype]))

    def constant(self, value: Any, dtype: str, shape: Sequence[int] = ()) -> Tensor:
        """A tensor that holds one number everywhere; it is rounded to `dtype` once."""
        shape = tuple(shape)
        kind = self.type(dtype, shape)
        if is_complex(dtype):
            number, part = complex(value), "float32" if dtype == "complex64" else "float64"
            # jaxlib's bindings cannot hold a complex literal.
            real, imaginary = (
                self.constant(item, part, shape) for item in (number.real, number.imag)
            )
            return Tensor(stablehlo.complex(real.value, imaginary.value), dtype, shape)
        return Tensor(stablehlo.constant(splat(value, dtype, kind)), dtype, shape)

    def iota(self, dimension: int, shape: Sequence[int], dtype: str = "int64") -> Tensor:
        """Counts along one dimension."""
        shape = tuple(shape)
        return Tensor(stablehlo.iota(self.type(dtype, shape), dimension), dtype, shape)

    # --- casts ------------------------------------------------------------------------------

    def convert(self, tensor: Tensor, dtype: str) -> Tensor:
        """Eager's cast.

        To bool by `!= 0`, to float8_e4m3fn with saturation, from floats to integers as x86 does it.
        """
        if tensor.dtype == dtype:
            return tensor
        if dtype == "bool":
            return self.compare("NE", tensor, self.constant(0, tensor.dtype, tensor.shape))
        if dtype == "float8_e4m3fn" and is_float(tensor.dtype):
            wide = self.convert(tensor, "float32") if tensor.dtype != "float64" else tensor
            bound = self.constant(E4M3_MAX, wide.dtype, wide.shape)
            tensor = self.maximum(self.minimum(wide, bound), self.negate(bound))
        if is_complex(tensor.dtype) and not is_complex(dtype):
            tensor = self.unary("real", tensor, "float32" if "64" in tensor.dtype else "float64")
            return self.convert(tensor, dtype)
        if is_float(tensor.dtype) and not is_float(dtype) and not is_complex(dtype):
            return self._truncated(tensor, dtype)
        kind = self.type(dtype, tensor.shape)
        return Tensor(stablehlo.convert(kind, tensor.value), dtype, tensor.shape)

    def _truncated(self, tensor: Tensor, dtype: str) -> Tensor:
        """A float as an integer, with what x86's cvttss2si gives where it does not fit.

        int32 and int64 then hold their least value. Narrower integers are the low bits of the
        int32, unsigned ones of 32 and 64 bits those of the int64.
        """
        via = "int64" if dtype in ("int64", "uint32", "uint64") else "int32"
        wide = tensor if tensor.dtype == "float64" else self.convert(tensor, "float32")
        limit = 2.0 ** (bits(via) - 1)
        # In float32, -2**31 - 1 is -2**31; the bound below is that of the truncated value.
        low = -limit if via == "int64" or wide.dtype == "float32" else -limit - 1
        above = self.compare(
            "GE" if low == -limit else "GT", wide, self.constant(low, wide.dtype, wide.shape)
        )
        below = self.compare("LT", wide, self.constant(limit, wide.dtype, wide.shape))
        cut = stablehlo.convert(self.type(via, wide.shape), wide.value)
        least = self.constant(-(1 << (bits(via) - 1)), via, wide.shape)
        whole = self.select(self.logical_and(above, below), Tensor(cut, via, wide.shape), least)
        return self.convert(whole, dtype)

    def bitcast(self, tensor: Tensor, dtype: str, shape: Sequence[int]) -> Tensor:
        """The same bits as another dtype."""
        kind = self.type(dtype, shape)
        return Tensor(stablehlo.bitcast_convert(kind, tensor.value), dtype, tuple(shape))

    # --- elementwise ------------------------------------------------------------------------

    def unary(self, name: str, tensor: Tensor, dtype: str | None = None) -> Tensor:
        """StableHLO's operation `name` on one tensor."""
        dtype = dtype or tensor.dtype
        results = [self.type(dtype, tensor.shape)]
        value = getattr(stablehlo, name)(tensor.value, results=results)
        return Tensor(value, dtype, tensor.shape)

    def binary(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """StableHLO's operation `name` on two tensors of equal type."""
        value = getattr(stablehlo, name)(left.value, right.value)
        return Tensor(value, left.dtype, left.shape)

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """Sum; of booleans: or."""
        return self.binary("or_" if left.dtype == "bool" else "add", left, right)

    def subtract(self, left: Tensor, right: Tensor) -> Tensor:
        """Difference."""
        return self.binary("subtract", left, right)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Product; of booleans: and."""
        return self.binary("and_" if left.dtype == "bool" else "multiply", left, right)

    def maximum(self, left: Tensor, right: Tensor) -> Tensor:
        """Greater of two; NaN wins."""
        return self.binary("or_" if left.dtype == "bool" else "maximum", left, right)

    def minimum(self, left: Tensor, right: Tensor) -> Tensor:
        """Lesser of two; NaN wins."""
        return self.binary("and_" if left.dtype == "bool" else "minimum", left, right)

    def negate(self, tensor: Tensor) -> Tensor:
        """Additive inverse."""
        return self.unary("negate", tensor)

    def logical_not(self, tensor: Tensor) -> Tensor:
        """Complement of every bit."""
        return self.unary("not_", tensor)

    def logical_and(self, *tensors: Tensor) -> Tensor:
        """Conjunction of booleans."""
        result = tensors[0]
        for tensor in tensors[1:]:
            result = self.binary("and_", result, tensor)
        return result

    def logical_or(self, *tensors: Tensor) -> Tensor:
        """Disjunction of booleans."""
        result = tensors[0]
        for tensor in tensors[1:]:
            result = self.binary("or_", result, tensor)
        return result

    def compare(self, direction: str, left: Tensor, right: Tensor) -> Tensor:
        """EQ, NE, LT, LE, GT or GE; false for NaN except NE."""
        kind = "SIGNED"
        if is_float(left.dtype) or is_complex(left.dtype):
            kind = "FLOAT"
        elif is_unsigned(left.dtype):
            kind = "UNSIGNED"
        value = stablehlo.compare(
            left.value,
            right.value,
            stablehlo.ComparisonDirectionAttr.get(direction),
            compare_type=stablehlo.ComparisonTypeAttr.get(kind),
        )
        return Tensor(value, "bool", left.shape)

    def is_nan(self, tensor: Tensor) -> Tensor:
        """Where a float tensor is NaN."""
        return self.compare("NE", tensor, tensor)

    def select(self, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """`yes` where the condition holds, else `no`; all of one shape."""
        return Tensor(stablehlo.select(condition.value, yes.value, no.value), yes.dtype, yes.shape)

    # --- shape ------------------------------------------------------------------------------

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in row-major order."""
        shape = tuple(shape)
        if shape == tensor.shape:
            return tensor
        kind = self.type(tensor.dtype, shape)
        return Tensor(stablehlo.reshape(kind, tensor.value), tensor.dtype, shape)

    def broadcast_in_dim(
        self, tensor: Tensor, shape: Sequence[int], dimensions: Sequence[int]
    ) -> Tensor:
        """Repeat; `dimensions[i]` is where dimension i of the tensor goes."""
        shape = tuple(shape)
        kind = self.type(tensor.dtype, shape)
        value = stablehlo.broadcast_in_dim(kind, tensor.value, list(dimensions))
        return Tensor(value, tensor.dtype, shape)

    def expand(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Eager's broadcasting to `shape`, aligned at the last dimension."""
        if tuple(shape) == tensor.shape:
            return tensor
        offset = len(shape) - tensor.rank
        return self.broadcast_in_dim(tensor, shape, range(offset, len(shape)))

    def transpose(self, tensor: Tensor, permutation: Sequence[int]) -> Tensor:
        """Reorder dimensions."""
        permutation = list(permutation)
        if permutation == list(range(tensor.rank)):
            return tensor
        shape = tuple(tensor.shape[index] for index in permutation)
        return Tensor(stablehlo.transpose(tensor.value, permutation), tensor.dtype, shape)

    def slice(self, tensor: Tensor, dimension: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Elements start, start + step, ... below stop of one dimension; 0 <= start <= stop."""
        starts, strides = [0] * tensor.rank, [1] * tensor.rank
        limits = list(tensor.shape)
        starts[dimension], limits[dimension], strides[dimension] = start, stop, step
        value = stablehlo.slice(tensor.value, starts, limits, strides)
        shape = list(tensor.shape)
        shape[dimension] = -(-(stop - start) // step)
        return Tensor(value, tensor.dtype, tuple(shape))

    def concatenate(self, tensors: Sequence[Tensor], dimension: int) -> Tensor:
        """One after the other; at least one."""
        if len(tensors) == 1:
            return tensors[0]
        value = stablehlo.concatenate([tensor.value for tensor in tensors], dimension)
        shape = list(tensors[0].shape)
        shape[dimension] = sum(tensor.shape[dimension] for tensor in tensors)
        return Tensor(value, tensors[0].dtype, tuple(shape))

    def pad(self, tensor: Tensor, low: Sequence[int], high: Sequence[int], value: Tensor) -> Tensor:
        """Add or, where negative, remove elements at both ends of every dimension."""
        padded = stablehlo.pad(tensor.value, value.value, list(low), list(high), [0] * tensor.rank)
        shape = [size + a + b for size, a, b in zip(tensor.shape, low, high, strict=True)]
        return Tensor(padded, tensor.dtype, tuple(shape))

    def reverse(self, tensor: Tensor, dimensions: Sequence[int]) -> Tensor:
        """Mirror dimensions."""
        return Tensor(stablehlo.reverse(tensor.value, list(dimensions)), tensor.dtype, tensor.shape)

    # --- regions ----------------------------------------------------------------------------

    def region(
        self,
        operation: ir.Operation,
        dtypes: Sequence[str],
        body: Callable[[Builder, list[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Give an operation its region: `body` takes scalars of the dtypes."""
        block = operation.regions[0].blocks.append(*[self.type(dtype, ()) for dtype in dtypes])
        with ir.InsertionPoint(block):
            arguments = [
                Tensor(value, dtype, ())
                for value, dtype in zip(block.arguments, dtypes, strict=True)
            ]
            results = body(self, arguments)
            stablehlo.return_([result.value for result in results])

    def reduce(
        self,
        tensors: Sequence[Tensor],
        initial: Sequence[Tensor],
        dimensions: Sequence[int],
        body: Callable[[Builder, list[Tensor]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """Fold whole dimensions away; `body` takes accumulators and elements."""
        shape = [
            size for index, size in enumerate(tensors[0].shape) if index not in set(dimensions)
        ]
        dtypes = [tensor.dtype for tensor in tensors]
        operation = stablehlo.ReduceOp(
            [self.type(dtype, shape) for dtype in dtypes],
            [tensor.value for tensor in tensors],
            [tensor.value for tensor in initial],
            sorted(dimensions),
        )
        self.region(operation.operation, dtypes * 2, body)
        return [
            Tensor(value, dtype, tuple(shape))
            for value, dtype in zip(operation.results, dtypes, strict=True)
        ]

    def running(
        self,
        tensors: Sequence[Tensor],
        initial: Sequence[Tensor],
        dimension: int,
        body: Callable[[Builder, list[Tensor]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """Fold of all elements up to each one along a dimension, by an associative `body`."""
        rank, length = tensors[0].rank, tensors[0].shape[dimension]
        window, low = [1] * rank, [0] * rank
        window[dimension], low[dimension] = length, length - 1
        padding = [[before, 0] for before in low]
        flat = ",".join(f"[{before}, {after}]" for before, after in padding)
        dtypes = [tensor.dtype for tensor in tensors]
        operation = stablehlo.ReduceWindowOp(
            [self.type(tensor.dtype, tensor.shape) for tensor in tensors],
            [tensor.value for tensor in tensors],
            [tensor.value for tensor in initial],
            window,
            padding=ir.Attribute.parse(f"dense<[{flat}]> : tensor<{rank}x2xi64>"),
        )
        self.region(operation.operation, dtypes * 2, body)
        return [
            Tensor(value, tensor.dtype, tensor.shape)
            for value, tensor in zip(operation.results, tensors, strict=True)
        ]

    def sort(
        self,
        tensors: Sequence[Tensor],
        dimension: int,
        before: Callable[[Builder, list[Tensor]], Tensor],
    ) -> list[Tensor]:
        """Stable sort along a dimension; `before` takes a pair of elements of every tensor."""
        operation = stablehlo.SortOp(
            [self.type(tensor.dtype, tensor.shape) for tensor in tensors],
            [tensor.value for tensor in tensors],
            dimension=dimension,
            is_stable=True,
        )
        dtypes = [tensor.dtype for tensor in tensors for _ in range(2)]
        self.region(operation.operation, dtypes, lambda b, pair: [before(b, pair)])
        return [
            Tensor(value, tensor.dtype, tensor.shape)
            for value, tensor in zip(operation.results, tensors, strict=True)
        ]

    # --- gather and scatter -----------------------------------------------------------------

    def gather(
        self,
        tensor: Tensor,
        indices: Tensor,
        *,
        indexed: Sequence[int],
        offsets: Sequence[int],
        shape: Sequence[int],
    ) -> Tensor:
        """Read one element of each indexed dimension and all of the others.

        Args:
            tensor: where to read.
            indices: integers; the last dimension holds one index for each of `indexed`.
            indexed: dimensions that the indices select from.
            offsets: dimensions of the result that hold the dimensions not indexed.
            shape: shape of the result.
        """
        sizes = [1 if index in set(indexed) else size for index, size in enumerate(tensor.shape)]
        numbers = stablehlo.GatherDimensionNumbers.get(
            list(offsets), sorted(indexed), [], [], list(indexed), indices.rank - 1
        )
        value = stablehlo.gather(tensor.value, indices.value, numbers, sizes)
        return Tensor(value, tensor.dtype, tuple(shape))

    def scatter(
        self,
        tensor: Tensor,
        indices: Tensor,
        updates: Tensor,
        *,
        indexed: Sequence[int],
        windows: Sequence[int],
        combine: Callable[[Builder, list[Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """Write updates where `gather` would read; `combine` takes old and new element."""
        numbers = stablehlo.ScatterDimensionNumbers.get(
            list(windows), sorted(indexed), [], [], list(indexed), indices.rank - 1
        )
        operation = stablehlo.ScatterOp(
            [self.type(tensor.dtype, tensor.shape)],
            [tensor.value],
            indices.value,
            [updates.value],
            numbers,
        )
        self.region(
            operation.operation,
            [tensor.dtype] * 2,
            lambda b, pair: [combine(b, pair) if combine else pair[1]],
        )
        return Tensor(operation.results[0], tensor.dtype, tensor.shape)
