"""How much a run of the tests does: `TEST_SCALE=25` is what `make nightly` asks for."""

from __future__ import annotations

import os

SCALE = int(os.environ.get("TEST_SCALE", "1"))


def scaled(count: int) -> int:
    """Return how often to do what a plain run does `count` times."""
    return count * SCALE
