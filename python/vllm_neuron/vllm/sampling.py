"""vLLM's sampler on the host, without torch.compile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config.model import LogprobsMode
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

__all__ = ["HostSampler"]


def _eager() -> AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager")


class HostSampler(Sampler):
    """Sampler whose ranking of logprobs runs eagerly.

    vLLM wraps the ranking in torch.compile: the first request for logprobs would start Dynamo (2 to
    9 seconds), and a server compiles nothing while serving.
    """

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: LogprobsMode | None = None,
    ) -> SamplerOutput:
        """Samples as vLLM's sampler does; logits are (rows, vocabulary) and may be overwritten."""
        ranked = sampling_metadata.max_num_logprobs is not None
        with _eager() if ranked or sampling_metadata.logprob_token_ids else nullcontext():
            return super().forward(
                logits, sampling_metadata, predict_bonus_token, logprobs_mode_override
            )

    def score(
        self, scores: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """Returns the top tokens of each row of `scores` and the rank of the given token.

        Args:
            scores: (rows, vocabulary) float32.
            num_logprobs: top tokens wanted.
            token_ids: (rows,) int64.
        """
        with _eager():
            return self.gather_logprobs(scores, num_logprobs, token_ids)

    def warm_up(self, vocab_size: int) -> None:
        """Samples once with and once without randomness, filters, penalties and logprobs."""
        for greedy in (True, False):
            row = torch.ones(1)
            self.forward(
                torch.zeros(1, vocab_size),
                SamplingMetadata(
                    temperature=None if greedy else row,
                    all_greedy=greedy,
                    all_random=not greedy,
                    top_p=None if greedy else row * 0.9,
                    top_k=None if greedy else row.int(),
                    generators={0: torch.Generator().manual_seed(0)},
                    max_num_logprobs=1,
                    no_penalties=greedy,
                    prompt_token_ids=None if greedy else torch.zeros(1, 1, dtype=torch.int64),
                    frequency_penalties=row,
                    presence_penalties=row,
                    repetition_penalties=row,
                    output_token_ids=[[]],
                    allowed_token_ids_mask=None,
                    bad_words_token_ids={},
                    logitsprocs=LogitsProcessors(),
                ),
            )
