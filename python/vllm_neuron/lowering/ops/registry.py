"""The table of own lowerings by ATen operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import is_complex

__all__ = ["Lowering", "lowers", "lowers_complex", "own_lowering"]

Lowering = Callable[[Builder], Tensor | Sequence[Tensor]]

_LOWERINGS: dict[str, Lowering] = {}
# For operators that torch-mlir lowers well unless a tensor is complex.
_COMPLEX_LOWERINGS: dict[str, Lowering] = {}


def own_lowering(node: Mapping[str, Any]) -> Lowering | None:
    """The own lowering of a node of a graph message, or None if torch-mlir lowers it."""
    found = _LOWERINGS.get(node["op"])
    if found is None and any(is_complex(dtype) for dtype in node["dtypes"]):
        found = _COMPLEX_LOWERINGS.get(node["op"])
    return found


def lowers(*operators: str) -> Callable[[Lowering], Lowering]:
    """Register the decorated function for the named operators of the `aten` namespace."""
    return _register(_LOWERINGS, operators)


def lowers_complex(*operators: str) -> Callable[[Lowering], Lowering]:
    """The same for nodes that take or give a complex tensor."""
    return _register(_COMPLEX_LOWERINGS, operators)


def _register(
    table: dict[str, Lowering], operators: Sequence[str]
) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        for operator in operators:
            name = f"aten.{operator}"
            if name in table:
                raise ValueError(f"{name} is registered twice")
            table[name] = function
        return function

    return register
