"""Why a look-up missed: the factors of its key against those of the nearest entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_neuron.cache import keys
from vllm_neuron.cache.entries import EntryKind

if TYPE_CHECKING:
    from vllm_neuron import _core
    from vllm_neuron.cache.tiers import Tiers

__all__ = ["Miss", "MissReasons"]

#: Most reasons that a log line names.
MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Miss:
    """A look-up that found nothing, and why.

    Attributes:
        key: what was looked for.
        reasons: each in words; at least one.
    """

    key: _core.Key
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.reasons) - MOST_NAMED
        return "; ".join(self.reasons[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


class MissReasons:
    """Explains the misses of one kind of key.

    Args:
        tiers: where the other entries are.
        kind: of the entries.
    """

    def __init__(self, tiers: Tiers, kind: EntryKind) -> None:
        self._tiers = tiers
        self._kind = kind
        self._known: list[tuple[dict[str, Any], dict[str, Any]]] | None = None

    def explain(self, key: _core.Key, factors: Mapping[str, Any], *, bucket: str) -> Miss:
        """Say what differs from the nearest entry, one of the same bucket if there is."""
        if self._known is None:
            self._known = list(self._tiers.described(self._kind))
        if not self._known:
            return Miss(key, ("the cache is empty",))
        same_bucket = [known for record, known in self._known if record.get("bucket") == bucket]
        nearest = min(
            (
                keys.differing_factors(known, factors)
                for known in same_bucket or [known for _, known in self._known]
            ),
            key=len,
        )
        return Miss(key, tuple(nearest) or ("its entry was removed or set aside",))
