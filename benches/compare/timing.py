"""Interleaved timing, and one row of a comparison."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Operation = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        operation: what is measured.
        reference: whose way of doing it.
        ours_s: seconds of ours, the median of the rounds.
        reference_s: seconds of the reference, or None when the goal is a time.
        goal: what is to be reached, for people.
        is_met: whether it is, in this run.
    """

    operation: str
    reference: str
    ours_s: float
    reference_s: float | None
    goal: str
    is_met: bool | None

    @property
    def ratio(self) -> float | None:
        """How many times as long the reference takes."""
        return None if self.reference_s is None else self.reference_s / self.ours_s

    def cells(self) -> tuple[str, ...]:
        """Return the row for a table."""
        ratio = "" if self.ratio is None else f"{self.ratio:,.2f}x"
        met = {None: "", True: "yes", False: "NO"}[self.is_met]
        reference = "" if self.reference_s is None else seconds(self.reference_s)
        return (
            self.operation, self.reference, seconds(self.ours_s), reference, ratio, self.goal, met,
        )  # fmt: skip


def faster(operation: str, reference: str, ours: float, theirs: float, goal: float | None) -> Row:
    """Return a row whose goal is that the reference takes `goal` times as long, or none."""
    text = "" if goal is None else f">= {goal:g}x"
    is_met = None if goal is None else theirs / ours >= goal
    return Row(operation, reference, ours, theirs, text, is_met)


def within(operation: str, reference: str, ours: float, theirs: float, factor: float) -> Row:
    """Return a row whose goal is that ours takes at most `factor` times as long."""
    return Row(operation, reference, ours, theirs, f"<= {factor:g}x of it", ours / theirs <= factor)


def at_most(operation: str, ours: float, limit: float) -> Row:
    """Return a row whose goal is a time in seconds."""
    return Row(operation, "", ours, None, f"<= {seconds(limit)}", ours <= limit)


def seconds(value: float) -> str:
    """Return a time with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def interleaved(
    operations: Mapping[str, Operation], *, rounds: int, calls: int = 1
) -> dict[str, float]:
    """Return the median seconds of one call of each, all of them run once per round in turn.

    Args:
        operations: what is called, by name.
        rounds: how often each is measured.
        calls: calls per measurement, for operations near the clock's resolution.
    """
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for operation in operations.values():
        operation()
    for _ in range(rounds):
        for name, operation in operations.items():
            start = time.perf_counter()
            for _ in range(calls):
                operation()
            taken[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in taken.items()}
