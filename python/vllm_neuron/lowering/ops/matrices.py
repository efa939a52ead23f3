"""Factors of matrices and triangular systems.

Eager's contract: cholesky reads the lower triangle only, and its `info` is 0 where the matrix is
positive definite; here it is 1 where it is not, without saying which minor is at fault. A
triangular solver reads one triangle, and not the diagonal if that is said to be 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir.dialects import stablehlo

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.registry import lowers


def _adjoint(b: Builder, tensor: Tensor) -> Tensor:
    last = tensor.rank - 1
    return b.transpose(tensor, [*range(last - 1), last, last - 1])


@lowers("linalg_cholesky_ex.default")
def cholesky(b: Builder) -> Sequence[Tensor]:
    """The triangular factor and whether there is one."""
    matrix, upper = b.tensor(0), bool(b.arg(1))
    info_dtype, info_shape = b.specs[1]
    if matrix.size == 0:
        return matrix, b.constant(0, info_dtype, info_shape)
    factor = Tensor(stablehlo.cholesky(matrix.value, lower=True), b.dtype, b.shape)
    rows, columns = (b.iota(factor.rank - axis, factor.shape) for axis in (2, 1))
    zero = b.constant(0, b.dtype, b.shape)
    broken = b.convert(b.is_nan(factor), info_dtype)
    info = b.reduce(
        [broken],
        [b.constant(0, info_dtype)],
        [factor.rank - 2, factor.rank - 1],
        lambda inner, pair: [inner.maximum(*pair)],
    )[0]
    factor = b.select(b.compare("GE", rows, columns), factor, zero)
    return (_adjoint(b, factor) if upper else factor), info


@lowers("linalg_solve_triangular.default")
def solve_triangular(b: Builder) -> Tensor:
    """X with A X = B, or X A = B unless `left`."""
    matrix, right = b.tensor(0), b.tensor(1)
    upper, left, unit = bool(b.arg(2)), b.arg(3) is not False, bool(b.arg(4))
    if 0 in b.shape:
        return b.constant(0, b.dtype, b.shape)
    batch = b.shape[:-2]
    matrix = b.expand(matrix, (*batch, *matrix.shape[-2:]))
    solved = stablehlo.triangular_solve(
        matrix.value,
        b.expand(right, b.shape).value,
        left_side=left,
        lower=not upper,
        unit_diagonal=unit,
        transpose_a=stablehlo.TransposeAttr.get("NO_TRANSPOSE"),
    )
    return Tensor(solved, b.dtype, b.shape)
