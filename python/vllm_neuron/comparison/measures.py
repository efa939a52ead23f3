"""How far two tensors are apart, and when that is too far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

__all__ = ["DEFAULT_TOLERANCES", "Difference", "NextTokens", "difference", "largest"]

DEFAULT_TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative difference beyond which a route parts from eager, by the dtype of the model.

Routes add in other orders and round once where eager rounds twice, and each layer adds its share.
docs/how-to-compare-routes.md has the reasons.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of two tensors.

    Attributes:
        absolute: the largest of |found - expected|.
        relative: that, divided by the largest |expected|. Not element by element: beside large
            elements a small one is made of their rounding errors.
    """

    absolute: float = 0.0
    relative: float = 0.0

    def exceeds(self, tolerance: float) -> bool:
        """Whether the relative difference is beyond a tolerance."""
        return self.relative > tolerance


def difference(found: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Compare two tensors of one shape; equal infinities and NaN at the same place are equal."""
    if found.shape != expected.shape:
        raise ValueError(f"shapes {tuple(found.shape)} and {tuple(expected.shape)} differ")
    if not found.numel():
        return Difference()
    left, right = found.double(), expected.double()
    apart = (left - right).abs()
    apart[(left == right) | (left.isnan() & right.isnan())] = 0.0
    absolute = apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
    finite = right[right.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    if absolute == 0.0:
        return Difference()
    return Difference(absolute, absolute / scale if scale else float("inf"))


def largest(items: Iterable[Difference]) -> Difference:
    """The largest absolute and the largest relative difference among some, each by itself."""
    found = list(items)
    return Difference(
        max((item.absolute for item in found), default=0.0),
        max((item.relative for item in found), default=0.0),
    )


@dataclass(slots=True)
class NextTokens:
    """What the differences mean for the next token.

    Attributes:
        compared: distributions of a next token.
        agreeing: those whose most likely token is the same.
        divergences: KL(eager || route) of each in nats.
    """

    compared: int = 0
    agreeing: int = 0
    divergences: list[float] = field(default_factory=list)

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Count logits (rows, vocabulary)."""
        self.compared += len(expected)
        self.agreeing += int((found.argmax(-1) == expected.argmax(-1)).sum())
        ours, theirs = found.double().log_softmax(-1), expected.double().log_softmax(-1)
        # A token that both exclude (-inf) adds nothing.
        terms = torch.where(theirs == -torch.inf, 0.0, theirs.exp() * (theirs - ours))
        self.divergences += terms.sum(-1).nan_to_num(nan=float("inf")).clamp(min=0.0).tolist()
