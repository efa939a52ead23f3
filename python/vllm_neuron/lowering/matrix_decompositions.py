"""Inverses, determinants and solutions of linear systems, written with operators that lower.

Gaussian elimination with partial pivoting, as LAPACK's getrf does it: among equal pivots the first
row, and a column whose pivot is 0 is left alone and named in `info`. It is unrolled, one step per
row, so that there is a bound on the rows. Eager raises for a singular matrix where a compiled graph
cannot; its result then holds infinities or NaN, and `*_ex` operators say so in `info`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MATRICES"]

aten = torch.ops.aten

# About twelve operators are written per row.
_MAX_ROWS = 64

_Tensors = tuple[torch.Tensor, ...]


def _unrolls(matrix: torch.Tensor) -> bool:
    square = matrix.shape[-1] == matrix.shape[-2]
    real = matrix.dtype in (torch.float32, torch.float64)
    return square and real and matrix.shape[-1] <= _MAX_ROWS


def _eliminate(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both factors in one matrix, the row swapped at each step (from 1), and the row order."""
    size = matrix.shape[-1]
    rows = torch.arange(size, device=matrix.device)
    order = rows.expand(matrix.shape[:-1])
    pivots = []
    for step in range(size):
        chosen = matrix[..., step:, step].abs().argmax(-1, keepdim=True) + step
        pivots.append(chosen)
        swapped = torch.where(rows == step, chosen, torch.where(rows == chosen, step, rows))
        order = order.gather(-1, swapped)
        matrix = matrix.gather(-2, swapped.unsqueeze(-1).expand(matrix.shape))
        upper, lower = matrix[..., : step + 1, :], matrix[..., step + 1 :, :]
        pivot = upper[..., step:, step : step + 1]
        column = lower[..., step : step + 1]
        factor = torch.where(pivot == 0, column, column / pivot)
        rest = lower[..., step + 1 :] - factor * upper[..., step:, step + 1 :]
        lower = torch.cat([lower[..., :step], factor, rest], -1)
        matrix = torch.cat([upper, lower], -2)
    swaps = torch.cat(pivots, -1) + 1 if pivots else order
    return matrix, swaps.to(torch.int32), order


def _info(factors: torch.Tensor) -> torch.Tensor:
    """The first column (from 1) whose pivot is 0, or 0."""
    zero = factors.diagonal(dim1=-2, dim2=-1) == 0
    if not zero.shape[-1]:
        return zero.new_zeros(zero.shape[:-1], dtype=torch.int32)
    first = zero.to(torch.int8).argmax(-1) + 1
    return torch.where(zero.any(-1), first, 0).to(torch.int32)


def _solved(factors: torch.Tensor, order: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    batch = torch.broadcast_shapes(factors.shape[:-2], right.shape[:-2])
    right = right.expand(*batch, *right.shape[-2:])
    factors = factors.expand(*batch, *factors.shape[-2:])
    rows = order.unsqueeze(-1).expand(right.shape)
    right = right.gather(-2, rows)
    half = torch.linalg.solve_triangular(factors, right, upper=False, unitriangular=True)
    return torch.linalg.solve_triangular(factors, half, upper=True)


def _inverse(A: torch.Tensor, *, check_errors: bool = False) -> _Tensors:
    if not _unrolls(A):
        return NotImplemented
    factors, _, order = _eliminate(A)
    unit = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand(A.shape)
    return _solved(factors, order, unit), _info(factors)


def _solve(
    A: torch.Tensor, B: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> _Tensors:
    if not _unrolls(A):
        return NotImplemented
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    right = B.unsqueeze(-1) if vector else B
    factors, swaps, order = _eliminate(A if left else A.mT)
    result = _solved(factors, order, right if left or vector else right.mT)
    if not left and not vector:
        result = result.mT
    return result.squeeze(-1) if vector else result, factors, swaps, _info(factors)


def _sign_and_diagonal(A: torch.Tensor) -> tuple[_Tensors, torch.Tensor, torch.Tensor]:
    factors, swaps, _ = _eliminate(A)
    steps = torch.arange(1, A.shape[-1] + 1, device=A.device)
    odd = (swaps != steps).sum(-1) % 2 == 1
    sign = torch.where(odd, -1.0, 1.0).to(A.dtype)
    return (factors, swaps), sign, factors.diagonal(dim1=-2, dim2=-1)


def _det(A: torch.Tensor) -> _Tensors:
    if not _unrolls(A):
        return NotImplemented
    factored, sign, diagonal = _sign_and_diagonal(A)
    return sign * diagonal.prod(-1), *factored


def _slogdet(A: torch.Tensor) -> _Tensors:
    if not _unrolls(A):
        return NotImplemented
    factored, sign, diagonal = _sign_and_diagonal(A)
    return sign * diagonal.sign().prod(-1), diagonal.abs().log().sum(-1), *factored


def _lu_factor(A: torch.Tensor, *, pivot: bool = True, check_errors: bool = False) -> _Tensors:
    if not _unrolls(A) or not pivot:
        return NotImplemented
    factors, swaps, _ = _eliminate(A)
    return factors, swaps, _info(factors)


def _lu(A: torch.Tensor, *, pivot: bool = True) -> _Tensors:
    if not _unrolls(A) or not pivot:
        return NotImplemented
    factors, _, order = _eliminate(A)
    unit = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    rows = torch.arange(A.shape[-1], device=A.device)
    permutation = (order.unsqueeze(-2) == rows.unsqueeze(-1)).to(A.dtype)
    return permutation, factors.tril(-1) + unit, factors.triu()


def _cholesky(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return torch.linalg.cholesky_ex(self, upper=upper)[0]


def _cholesky_solve(self: torch.Tensor, input2: torch.Tensor, upper: bool = False) -> torch.Tensor:
    batch = torch.broadcast_shapes(self.shape[:-2], input2.shape[:-2])
    right = self.expand(*batch, *self.shape[-2:])
    lower = (input2.mT if upper else input2).expand(*batch, *input2.shape[-2:])
    half = torch.linalg.solve_triangular(lower, right, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def _cholesky_inverse(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    unit = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
    return _cholesky_solve(unit, self, upper)


MATRICES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
    aten._linalg_solve_ex.default: _solve,
    aten.cholesky.default: _cholesky,
    aten.cholesky_inverse.default: _cholesky_inverse,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.linalg_inv_ex.default: _inverse,
    aten.linalg_lu.default: _lu,
    aten.linalg_lu_factor_ex.default: _lu_factor,
}
