"""Draft tokens of a step: which logits are whose, and how many of the drafts are accepted.

Drafts are verified by sampling: the positions of a request are sampled one after the other, as
steps without speculation would, until what is sampled is not the draft whose logits come next. The
proposer is deterministic, so that this is rejection sampling (arXiv 2211.17192): a draft x is
accepted with the target's probability p(x), and what is sampled in place of a rejected one has the
distribution p without x. Unlike vLLM's `vllm.v1.sample.rejection_sampler`, whose kernels need
Triton, it draws the same numbers with drafts and without: a seed gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.structured_output.utils import strip_speculative_padding

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_neuron.vllm.requests import RequestTable
    from vllm_neuron.vllm.sampling import HostSampler

__all__ = ["StepDrafts", "sample_step"]


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The draft tokens that a step verifies, by row of the batch.

    Attributes:
        token_ids: the drafts of each request. The scheduler pads some requests without drafts with
            -1, which is left out here: nothing is run for it.
        first: the row of each request's first logits; those of its drafts follow.
        num_logits: rows of logits. The rows of the scheduler's padding are among them, since the
            grammar masks of structured output have them too; nobody writes or samples them.
        num_tokens: the scheduled tokens that are not drafts, by request id.
    """

    token_ids: list[list[int]]
    first: list[int]
    num_logits: int
    num_tokens: dict[str, int]

    @classmethod
    def of(cls, step: SchedulerOutput, req_ids: Sequence[str]) -> StepDrafts:
        """Reads them from what is scheduled.

        Args:
            step: the scheduler's output.
            req_ids: the requests of the batch, in order.
        """
        counts, scheduled = step.num_scheduled_tokens, step.scheduled_spec_decode_tokens
        if not scheduled:
            rows = len(req_ids)
            return cls([[] for _ in req_ids], list(range(rows)), rows, counts)
        token_ids, first, num_logits = [], [], 0
        num_tokens = dict(counts)
        for req_id in req_ids:
            drafts = scheduled.get(req_id, [])
            num_tokens[req_id] -= len(drafts)
            token_ids.append(strip_speculative_padding(drafts))
            first.append(num_logits)
            num_logits += 1 + len(drafts)
        return cls(token_ids, first, num_logits, num_tokens)

    def merge(self, calls: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
        """Returns the logits of a step, (num_logits, vocabulary); no one else holds their memory.

        Args:
            calls: batch rows and their logits, (len(rows), vocabulary) or, with those of the
                drafts and of padding, (len(rows), positions, vocabulary).
        """
        rows, logits = calls[0]
        if len(calls) == 1 and logits.dim() == 2 and rows == list(range(self.num_logits)):
            return logits
        merged = logits.new_empty(self.num_logits, logits.shape[-1])
        for rows, logits in calls:
            for row, own in zip(rows, logits, strict=True):
                first, count = self.first[row], len(self.token_ids[row]) + 1
                merged[first : first + count] = own[:count] if own.dim() == 2 else own
        return merged

    def count_nans(self, logits: torch.Tensor) -> list[int]:
        """Returns how many NaN the logits of each request hold."""
        nans = logits.isnan().sum(dim=-1).tolist()
        return [
            sum(nans[first : first + len(drafts) + 1])
            for first, drafts in zip(self.first, self.token_ids, strict=True)
        ]


def sample_step(
    sampler: HostSampler,
    table: RequestTable,
    logits: torch.Tensor,
    drafts: StepDrafts,
    *,
    partial: Sequence[int],
) -> tuple[list[list[int]], LogprobsLists | None]:
    """Samples a step and records the tokens in the table.

    Args:
        sampler: vLLM's sampler.
        table: the requests; its batch is that of the step.
        logits: (drafts.num_logits, vocabulary) float32; may be overwritten.
        drafts: the draft tokens of the step.
        partial: batch rows that get no token.

    Returns:
        The tokens of each request, and their logprobs if anybody wants them.
    """
    batch = table.batch
    sampled: list[list[int]] = [[] for _ in drafts.token_ids]
    logprobs: list[LogprobsTensors] = []
    live = [row for row in range(len(sampled)) if row not in partial]
    position = 0
    while live:
        if position:
            # To the logits processors this is a step like any other.
            batch.refresh_metadata()
        # The sampler draws for every row; a row without a token must not advance its seed.
        idle = [row for row in batch.generators if row not in live]
        states = [batch.generators[row].get_state() for row in idle]
        found = sampler(
            _at(position, logits, drafts) if drafts.num_logits > len(sampled) else logits,
            batch.sampling_metadata,
        )
        for row, state in zip(idle, states, strict=True):
            batch.generators[row].set_state(state)
        if found.logprobs_tensors is not None:
            logprobs.append(found.logprobs_tensors)
        token_ids = found.sampled_token_ids.flatten().tolist()
        for row in live:
            sampled[row].append(token_ids[row])
            table.append_tokens(row, [token_ids[row]])
        live = [
            row
            for row in live
            if drafts.token_ids[row][position : position + 1] == sampled[row][-1:]
        ]
        position += 1
    return sampled, _in_order(logprobs, [len(tokens) for tokens in sampled])


def _at(position: int, logits: torch.Tensor, drafts: StepDrafts) -> torch.Tensor:
    """Returns the logits of one position of every request, in memory of their own.

    Of a request with fewer positions it is the last one.
    """
    rows = [
        first + min(position, len(own))
        for first, own in zip(drafts.first, drafts.token_ids, strict=True)
    ]
    return logits[rows]


def _in_order(found: Sequence[LogprobsTensors], counts: Sequence[int]) -> LogprobsLists | None:
    """Returns logprobs in the order of requests and, within one, of positions.

    Args:
        found: by position, each with a row per request.
        counts: tokens of each request.
    """
    if len(found) < 2:
        return found[0].tolists() if found else None
    parts = [tensors.tolists() for tensors in found]
    rows = [(at, row) for row, count in enumerate(counts) for at in range(count)]
    token_ids, values, ranks = (
        np.stack([parts[at][field][row] for at, row in rows]) for field in range(3)
    )
    return LogprobsLists(token_ids, values, ranks, [0, *accumulate(counts)])
