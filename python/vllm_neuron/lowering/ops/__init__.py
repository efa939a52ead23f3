"""StableHLO lowerings of ATen operators that torch-mlir lacks or lowers inexactly.

One file per operator family. They run only in the lowering process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["OWN_LOWERINGS"]

OWN_LOWERINGS: dict[str, Callable[[Any], Any]] = {}
