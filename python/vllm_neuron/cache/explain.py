"""Why a look-up missed: the factors of its key against those of the nearest entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_neuron.cache import keys
from vllm_neuron.cache.tiers import Tiers

__all__ = ["MissReasons"]

#: Most differences that a reason names.
MOST_NAMED = 4


class MissReasons:
    """Explains the misses of one kind of key.

    Args:
        tiers: where the other entries are.
        kind: of the entries.
    """

    def __init__(self, tiers: Tiers, kind: str) -> None:
        self._tiers = tiers
        self._kind = kind
        self._known: list[tuple[dict[str, Any], dict[str, Any]]] | None = None

    def why(self, factors: Mapping[str, Any], *, bucket: str) -> str:
        """Say in words what differs from the nearest entry, one of the same bucket if there is."""
        if self._known is None:
            self._known = list(self._tiers.described(self._kind))
        if not self._known:
            return "the cache is empty"
        same_bucket = [known for record, known in self._known if record.get("bucket") == bucket]
        nearest = min(
            (
                keys.differing_factors(known, factors)
                for known in same_bucket or [known for _, known in self._known]
            ),
            key=len,
        )
        if not nearest:
            return "its entry was removed or set aside"
        more = f"; and {len(nearest) - MOST_NAMED} more" if nearest[MOST_NAMED:] else ""
        return "; ".join(nearest[:MOST_NAMED]) + more
