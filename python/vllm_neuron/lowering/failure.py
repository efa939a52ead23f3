"""Why a graph cannot be lowered, as the lowering processes say it among themselves."""

from __future__ import annotations

__all__ = ["LoweringFailure"]


class LoweringFailure(Exception):
    """A graph cannot be lowered; `node` is the index of the node at fault, or None."""

    def __init__(self, reason: str, node: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
