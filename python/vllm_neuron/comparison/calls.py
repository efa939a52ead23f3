"""The calls of buckets that serving some prompts takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_neuron.vllm.buckets import Buckets, decode_label, prefill_label
from vllm_neuron.vllm.step_inputs import StepInputs

__all__ = ["Call", "Schedule"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a bucket.

    Attributes:
        bucket: its name, as in a server's log.
        inputs: the step arguments before the KV caches.
        tokens: rows of `input_ids` that are no padding; they come first.
        sequences: rows of the logits that are no padding.
        prompts: which prompts it is about.
        gives_tokens: whether its logits are those of a next token, not of the middle of a prompt.
    """

    bucket: str
    inputs: tuple[torch.Tensor, ...]
    tokens: int
    sequences: int
    prompts: tuple[int, ...]
    gives_tokens: bool

    @property
    def is_prefill(self) -> bool:
        """Whether it computes a part of a prompt."""
        return self.bucket.startswith("prefill")


class Schedule:
    """Prefills each prompt, in chunks if need be, then decodes all of them together.

    Args:
        prompts: token ids, at most as many as the largest decode bucket has rows.
        buckets: the server's.
        block_size: tokens per KV cache block.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], buckets: Buckets, *, block_size: int
    ) -> None:
        self._sequences = [list(prompt) for prompt in prompts]
        self._buckets = buckets
        self._block_size = block_size
        self.max_blocks = -(-buckets.max_model_len // block_size)
        #: Blocks of the KV caches: vLLM's null block, and all that the prompts could take.
        self.num_blocks = 1 + len(prompts) * self.max_blocks
        blocks = np.arange(1, self.num_blocks, dtype=np.int32)
        self._tables = blocks.reshape(len(prompts), self.max_blocks)

    def prefills(self) -> list[Call]:
        """The calls that compute the prompts, one prompt after the other."""
        calls = []
        largest = self._buckets.prefill[-1]
        for index, sequence in enumerate(self._sequences):
            for start in range(0, len(sequence), largest):
                chunk = np.array(sequence[start : start + largest], np.int32)
                size = self._buckets.prefill_for(len(chunk))
                inputs = StepInputs(1, size, self.max_blocks, block_size=self._block_size)
                inputs.fill_prefill(chunk, start, self._tables[index])
                calls.append(
                    Call(
                        prefill_label(size),
                        inputs.tensors,
                        tokens=len(chunk),
                        sequences=1,
                        prompts=(index,),
                        gives_tokens=start + len(chunk) == len(sequence),
                    )
                )
        return calls

    def append(self, prompts: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a token to each of some sequences."""
        for index, token in zip(prompts, tokens, strict=True):
            self._sequences[index].append(token)

    def decode(self) -> Call:
        """The call that computes the last token of every sequence."""
        positions = np.array([len(sequence) - 1 for sequence in self._sequences], np.int32)
        context = self._buckets.context_for(int(positions.max()))
        size = self._buckets.decode_for(len(positions))
        blocks = self.max_blocks if context is None else -(-context // self._block_size)
        inputs = StepInputs(size, 1, blocks, block_size=self._block_size)
        last = np.array([sequence[-1] for sequence in self._sequences], np.int32)
        inputs.fill_decode(last, positions, self._tables)
        count = len(positions)
        return Call(
            decode_label(size, context),
            inputs.tensors,
            tokens=count,
            sequences=count,
            prompts=tuple(range(count)),
            gives_tokens=True,
        )
