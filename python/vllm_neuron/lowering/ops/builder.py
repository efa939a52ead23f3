"""What an own lowering works with: the node's arguments and short names for StableHLO ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlib.mlir import ir

__all__ = ["Builder"]


class Builder:
    """Arguments of one node.

    Args:
        node: entry of the graph message.
        values: StableHLO values of the node's tensor operands by number.
    """

    def __init__(self, node: Mapping[str, Any], values: Mapping[int, ir.Value]) -> None:
        self.node = node
        self.values = values
