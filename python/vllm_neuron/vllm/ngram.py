"""Draft tokens by n-gram lookup: what followed the last tokens when they occurred before.

The same drafts as vLLM's `vllm.v1.spec_decode.ngram_proposer` (0.32), whose search is compiled by
Numba, a package that the plugin does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

__all__ = ["NgramProposer", "continuation"]

Tokens = npt.NDArray[np.int32]


def continuation(tokens: Tokens, *, shortest: int, longest: int, count: int) -> list[int]:
    """Returns the tokens after the first earlier occurrence of the longest known ending.

    An ending is the last n tokens, `shortest` <= n <= `longest`; an occurrence may overlap it.

    Args:
        tokens: the sequence so far, (n,).
        shortest: least tokens of an ending, at least 1.
        longest: most tokens of an ending.
        count: most tokens to return; fewer if the occurrence is close to the end.
    """
    last = len(tokens) - 1
    if last < shortest or count <= 0:
        return []
    # Where an occurrence of the last `length` tokens ends, ascending.
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = 1
    while len(ends) and length < longest:
        inside = ends[ends >= length]
        longer = inside[tokens[inside - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < shortest:
        return []
    start = int(ends[0]) + 1
    return tokens[start : start + count].tolist()


class NgramProposer:
    """Proposes draft tokens for the requests of a batch.

    Args:
        config: the speculative configuration of method `ngram`; vLLM has filled in its defaults.
        max_model_len: longest sequence in tokens.
    """

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None
        self._shortest = config.prompt_lookup_min
        self._longest = config.prompt_lookup_max
        self._count = config.num_speculative_tokens
        self._max_model_len = max_model_len

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        token_ids: Tokens,
        lengths: npt.NDArray[np.int32],
        *,
        limit: int,
    ) -> list[list[int]]:
        """Returns the draft tokens of each request, none for one that sampled nothing.

        Args:
            sampled: what the step sampled, by request.
            token_ids: sequences with what was sampled, (>= requests, max_model_len).
            lengths: their lengths, (>= requests,).
            limit: the scheduler's limit of draft tokens of a request.
        """
        most = min(self._count, limit)
        drafts = []
        for row, tokens in enumerate(sampled):
            length = int(lengths[row])
            drafts.append(
                continuation(
                    token_ids[row, :length],
                    shortest=self._shortest,
                    longest=self._longest,
                    count=min(most, self._max_model_len - length),
                )
                if tokens
                else []
            )
        return drafts
