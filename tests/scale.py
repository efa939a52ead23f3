"""How much a run does: `TEST_SCALE` is 0.2 in `make check`, 25 in `make nightly`, else 1."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("TEST_SCALE", "1"))


def scaled(count: int) -> int:
    """Return how often to do what a run of all tests does `count` times; at least once."""
    return max(1, round(count * SCALE))
