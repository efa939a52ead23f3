"""The host arrays of one bucket's step arguments, filled anew for every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_neuron.vllm.lora_slots import NO_ADAPTER

__all__ = ["EncoderInputs", "StepInputs"]

Array = npt.NDArray[np.int64]


class StepInputs:
    """Arguments of DecoderStep for B sequences of Q tokens, except the KV caches.

    Padding is token 0 at position 0 written to slot 0, in a sequence whose blocks are all 0: it
    reads and writes vLLM's null block only.

    Args:
        batch: B.
        query_len: Q.
        num_blocks: block table entries per sequence N.
        block_size: tokens per block.
        all_logits: whether the logits of all tokens are wanted, not of one per sequence.

    Attributes:
        tensors: the arguments in order.
        lora_slots: the slot of each sequence's adapter (B,), an argument of its own on a server
            with adapters.
    """

    def __init__(
        self,
        batch: int,
        query_len: int,
        num_blocks: int,
        *,
        block_size: int,
        all_logits: bool = False,
    ) -> None:
        tokens = batch * query_len
        self.batch = batch
        self.query_len = query_len
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.input_ids: Array = np.zeros(tokens, np.int64)
        self.positions: Array = np.zeros(tokens, np.int64)
        self.slots: Array = np.zeros(tokens, np.int64)
        self.block_tables: Array = np.zeros((batch, num_blocks), np.int64)
        # Decode: the row of each sequence. Prefill (B = 1): set by fill_prefill.
        self.logits_rows: Array = np.arange(tokens if all_logits else batch, dtype=np.int64)
        self.lora_slots = torch.full((batch,), NO_ADAPTER, dtype=torch.int64)
        self.tensors = tuple(
            torch.from_numpy(array)
            for array in (
                self.input_ids,
                self.positions,
                self.slots,
                self.block_tables,
                self.logits_rows,
            )
        )

    def fill_prefill(
        self, token_ids: npt.NDArray[np.int32], start: int, blocks: npt.NDArray[np.int32]
    ) -> None:
        """Sets one sequence's chunk of n <= Q tokens.

        Args:
            token_ids: the chunk, (n,).
            start: position of its first token.
            blocks: the sequence's block table, (>= N,); 0 beyond its end.
        """
        count = len(token_ids)
        positions = np.arange(start, start + count)
        self.input_ids[:count] = token_ids
        self.positions[:count] = positions
        self.slots[:count] = self._slots(blocks[positions // self.block_size], positions)
        for array in (self.input_ids, self.positions, self.slots):
            array[count:] = 0
        self.block_tables[0] = blocks[: self.num_blocks]
        self.logits_rows[0] = count - 1

    def fill_decode(
        self,
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        blocks: npt.NDArray[np.int32],
    ) -> None:
        """Sets n <= B sequences of one token each.

        Args:
            token_ids: (n,).
            positions: (n,).
            blocks: block tables, (n, >= N); 0 beyond each sequence's end.
        """
        count = len(token_ids)
        own = blocks[np.arange(count), positions // self.block_size]
        self.input_ids[:count] = token_ids
        self.positions[:count] = positions
        self.slots[:count] = self._slots(own, positions)
        self.block_tables[:count] = blocks[:, : self.num_blocks]
        for array in (self.input_ids, self.positions, self.slots, self.block_tables):
            array[count:] = 0

    def fill_verify(
        self,
        token_ids: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
    ) -> None:
        """Sets n <= B sequences of 1 to Q tokens each; the rest of a sequence's Q is padding.

        Args:
            token_ids: (n, Q); what is beyond a sequence's count is not looked at.
            starts: position of each sequence's first token, (n,).
            counts: tokens of each sequence, (n,).
            blocks: block tables, (n, >= N); 0 beyond each sequence's end.
        """
        offsets = np.arange(self.query_len)
        real = offsets < counts[:, None]
        positions = np.where(real, starts[:, None] + offsets, 0)
        own = np.take_along_axis(blocks, positions // self.block_size, axis=1)
        rows = token_ids.size
        self.input_ids[:rows] = np.where(real, token_ids, 0).ravel()
        self.positions[:rows] = positions.ravel()
        self.slots[:rows] = np.where(real, self._slots(own, positions), 0).ravel()
        self.block_tables[: len(blocks)] = blocks[:, : self.num_blocks]
        for array in (self.input_ids, self.positions, self.slots):
            array[rows:] = 0
        self.block_tables[len(blocks) :] = 0

    def fill_lora_slots(self, slots: Array) -> None:
        """Sets the adapters of n <= B sequences.

        Args:
            slots: (n,).
        """
        self.lora_slots[: len(slots)] = torch.from_numpy(slots)
        self.lora_slots[len(slots) :] = NO_ADAPTER

    def _slots(self, blocks: npt.NDArray[np.int32], positions: npt.NDArray[Any]) -> Array:
        return blocks.astype(np.int64) * self.block_size + positions % self.block_size


class EncoderInputs:
    """Arguments of EncoderStep for a sequence of Q tokens; padding is token 0 at position 0.

    Args:
        query_len: Q.
    """

    batch = 1

    def __init__(self, query_len: int) -> None:
        self.input_ids: Array = np.zeros(query_len, np.int64)
        self.positions: Array = np.zeros(query_len, np.int64)
        self.length: Array = np.ones(1, np.int64)
        self.tensors = tuple(
            torch.from_numpy(array) for array in (self.input_ids, self.positions, self.length)
        )

    def fill(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Sets a sequence of n tokens, 1 <= n <= Q.

        Args:
            token_ids: (n,).
        """
        count = len(token_ids)
        self.input_ids[:count] = token_ids
        self.positions[:count] = np.arange(count)
        for array in (self.input_ids, self.positions):
            array[count:] = 0
        self.length[0] = count
