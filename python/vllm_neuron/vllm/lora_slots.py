"""Which adapter each sequence of a step uses, handed from a step to the layers that add it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

__all__ = ["NO_ADAPTER", "slots_of_step", "with_slots"]

NO_ADAPTER: Final = -1
"""The slot of a sequence that uses the base model, as in vLLM's own kernels."""

_Result = TypeVar("_Result")

# vLLM's layers with adapters get activations only, as they do from attention's forward context.
_slots: torch.Tensor | None = None


def with_slots(slots: torch.Tensor | None, function: Callable[..., _Result], *args: Any) -> _Result:
    """Returns what `function` makes of `args`, with adapters added.

    Args:
        slots: per sequence the slot of its adapter or `NO_ADAPTER`, (B,) int64; None on a server
            without adapters. The rows of activations are those of the B sequences, one sequence
            after the other, equally many each.
        function: runs layers of the model.
        args: its arguments.
    """
    global _slots
    outer = _slots
    _slots = slots
    try:
        return function(*args)
    finally:
        _slots = outer


def slots_of_step() -> torch.Tensor:
    """Returns the `slots` of the innermost `with_slots` that is running.

    Raises:
        RuntimeError: none is.
    """
    if _slots is None:
        raise RuntimeError("a layer with adapters ran outside of with_slots()")
    return _slots
