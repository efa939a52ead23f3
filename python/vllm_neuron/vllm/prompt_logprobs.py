"""Log-probabilities of prompt tokens, gathered while the prompt is prefilled in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_neuron.vllm.sampling import HostSampler

__all__ = ["PromptLogprobs"]

LOGITS_ROWS = 256  # rows per projection: bounds the logits held at once (50k words: 50 MB)


class PromptLogprobs:
    """The requests that still want prompt logprobs, and their partial results.

    The projection to the vocabulary runs on the host, from the hidden states that every prefill
    graph returns: the feature is rare and would otherwise cost each server one more graph.

    Args:
        compute_logits: the model's projection, hidden states (R, hidden) to (R, vocabulary).
        sampler: gathers the top tokens and ranks.
        return_logits: report raw logits instead of log-probabilities (vLLM's `logprobs_mode`).
    """

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        sampler: HostSampler,
        *,
        return_logits: bool,
    ) -> None:
        self._compute_logits = compute_logits
        self._sampler = sampler
        self._return_logits = return_logits

    @staticmethod
    def wanted(state: CachedRequestState) -> bool:
        """Returns whether a prefill of this request must return its hidden states."""
        params = state.sampling_params
        return (
            params is not None
            and params.prompt_logprobs is not None
            and state.num_computed_tokens < state.num_prompt_tokens
            and not state.output_token_ids
        )

    def collect(
        self, state: CachedRequestState, hidden_states: torch.Tensor, vocab_size: int
    ) -> LogprobsTensors | None:
        """Adds one chunk of a prompt.

        Args:
            state: the request, `num_computed_tokens` still that before the chunk.
            hidden_states: of the chunk's tokens, (n, hidden).
            vocab_size: number of logprobs that -1 stands for.

        Returns:
            The logprobs of the whole prompt, if this chunk completes it.
        """
        params, prompt = state.sampling_params, state.prompt_token_ids
        assert params is not None
        assert params.prompt_logprobs is not None
        assert prompt is not None
        count = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
        result = state.in_progress_prompt_logprobs_cpu
        if result is None:
            result = LogprobsTensors.empty_cpu(len(prompt) - 1, count + 1)
            state.in_progress_prompt_logprobs_cpu = result
        start = state.num_computed_tokens
        # The hidden state of a position scores the next token; the last one is sampled, not scored.
        end = min(start + len(hidden_states), len(prompt) - 1)
        for first in range(start, end, LOGITS_ROWS):
            rows = slice(first, min(first + LOGITS_ROWS, end))
            logits = self._compute_logits(hidden_states[rows.start - start : rows.stop - start])
            logits = logits.float()
            scores = logits if self._return_logits else self._sampler.compute_logprobs(logits)
            targets = torch.tensor(prompt[rows.start + 1 : rows.stop + 1])
            found = self._sampler.score(scores, count, targets)
            result.logprob_token_ids[rows] = found.logprob_token_ids
            result.logprobs[rows] = found.logprobs
            result.selected_token_ranks[rows] = found.selected_token_ranks
        if start + len(hidden_states) < len(prompt):
            return None
        state.in_progress_prompt_logprobs_cpu = None
        return result
