"""Which ATen operators AOTAutograd decomposes before a graph is lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

__all__ = ["decomposition_table"]

aten = torch.ops.aten


@functools.cache
def decomposition_table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """PyTorch's table to its core operators, with this package's own entries on top."""
    return dict(core_aten_decompositions()) | {
        aten.copy.default: _copy,
        aten.empty_permuted.default: _empty_permuted,
        aten.full.default: _full,
        aten.squeeze.dims: _squeeze_dims,
    }


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return src.to(self.dtype).expand(self.shape)


def _empty_permuted(
    size: Sequence[int], physical_layout: Sequence[int], **kwargs: Any
) -> torch.Tensor:
    return aten.empty.memory_format(size, **kwargs)


def _full(size: Sequence[int], fill_value: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
    # torch-mlir takes numbers only.
    if not isinstance(fill_value, bool):
        return NotImplemented
    return aten.full.default(
        size, int(fill_value), dtype=torch.bool if dtype is None else dtype, **kwargs
    )


def _squeeze_dims(self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    squeezed = {index % self.ndim for index in dim if self.shape[index] == 1} if self.ndim else ()
    return self.view([size for index, size in enumerate(self.shape) if index not in squeezed])
