"""The table of own operators, and what they are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_builder as xb

__all__ = ["Node", "apply_xla", "aten", "full", "lowers", "operands", "own_operator", "xla_type"]

aten = torch.ops.aten

# Takes the node of the graph message and the operator's arguments.
Operator = Callable[..., Any]
Node = Mapping[str, Any]

# What xla_builder's own table leaves out.
_FLOAT8_TYPES = {torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2"}

_OPERATORS: dict[str, Operator] = {}


def own_operator(name: str) -> Operator | None:
    """The own form of an operator, or None where PyTorch/XLA's lowering is right."""
    return _OPERATORS.get(name)


def lowers(*names: str) -> Callable[[Operator], Operator]:
    """Register the decorated function for the named operators of the `aten` namespace."""

    def register(function: Operator) -> Operator:
        for name in names:
            _OPERATORS[f"aten.{name}"] = function
        return function

    return register


def xla_type(dtype: torch.dtype) -> str:
    """The name of a dtype in XLA's shapes (primitive_util.cc)."""
    return _FLOAT8_TYPES.get(dtype) or xb.Op.from_torch_type(dtype)


def apply_xla(name: str, function: Callable[..., xb.Op], *tensors: torch.Tensor) -> torch.Tensor:
    """Apply a function of XLA operations to lazy tensors."""
    shapes = [xb.mkshape(xla_type(t.dtype), tuple(t.shape)) for t in tensors]
    computation = xb.create_computation(name, function, shapes)
    (result,) = xb.xla_computation_as_func(computation, f"xla::{name}")(list(tensors))
    return result


def full(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A number as a lazy tensor of rank 0."""
    return torch.full((), value, dtype=dtype, device=torch_xla.device())


def operands(*values: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Tensors and numbers as tensors of one dtype and shape, the ones that eager computes with."""
    if dtype is None:
        dtype = torch.result_type(*values)
    tensors = [v.to(dtype) if isinstance(v, torch.Tensor) else full(v, dtype) for v in values]
    return list(torch.broadcast_tensors(*tensors))
