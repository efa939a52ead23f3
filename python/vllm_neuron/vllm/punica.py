"""The arithmetic of LoRA adapters in a static graph, in the place of vLLM's Punica kernels.

The adapters of all slots are inputs of every graph, with the rank padded to `--max-lora-rank`, and
so is the slot of each sequence. A graph of one sequence cuts the adapter of its slot out of them:
2 * tokens * rank * (inputs + outputs) operations per layer, however many slots there are. A graph
of more sequences multiplies with the adapters of all slots at once, one matrix for A and one for B,
and masks by slot in between: `--max-loras` times the operations, but each adapter is read once and
nothing is copied. See docs/how-to-serve-lora-adapters.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from vllm_neuron.vllm.lora_slots import slots_of_step

__all__ = ["AdapterStack", "NeuronPunicaWrapper", "stacked_a", "stacked_b"]


class AdapterStack:
    """One matrix, A or B, of the adapters in all slots.

    vLLM's layers write an adapter into a tensor with the slots in front; they do so through a view
    of `flat`, which is the input of the graphs and has the form of a linear layer's weight.

    Attributes:
        flat: the memory: A as (slots * rank, inputs), B as (outputs, slots * rank).
        view: the same memory as vLLM indexes it: (slots, 1, rank, inputs), (slots, 1, outputs,
            rank).
        slots: how many adapters there is room for.
        rank: rows of A, columns of B per slot.
    """

    def __init__(self, flat: torch.Tensor, view: torch.Tensor, *, rank: int) -> None:
        self.flat = flat
        self.view = view
        self.slots = view.shape[0]
        self.rank = rank

    @property
    def shape(self) -> torch.Size:
        """The shape of `view`."""
        return self.view.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the adapters."""
        return self.flat.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.view[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.view[index] = value


def stacked_a(like: torch.Tensor) -> AdapterStack:
    """Returns zeros in the place of vLLM's tensor (slots, 1, rank, inputs)."""
    slots, _, rank, inputs = like.shape
    flat = like.new_zeros(slots * rank, inputs)
    return AdapterStack(flat, flat.view(like.shape), rank=rank)


def stacked_b(like: torch.Tensor) -> AdapterStack:
    """Returns zeros in the place of vLLM's tensor (slots, 1, outputs, rank)."""
    slots, _, outputs, rank = like.shape
    flat = like.new_zeros(outputs, slots * rank)
    view = flat.view(outputs, slots, rank).permute(1, 0, 2).unsqueeze(1)
    return AdapterStack(flat, view, rank=rank)


class NeuronPunicaWrapper(PunicaWrapperBase):
    """What vLLM's layers with adapters call; `lora_slots` tells the slots.

    Functional, as `NeuronPlatform.can_update_inplace` says: each method returns its result.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not the base class's: its tensors describe a batch to kernels that compute in place.
        #: Rows of the embedding of one slot, if the embedding has adapters.
        self.vocabulary = 0

    @property
    def _embeddings_indices(self) -> _EmbeddingOffsets:
        # Read by VocabParallelEmbeddingWithLoRA, as [:number of tokens].
        return _EmbeddingOffsets(self.vocabulary)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns y + x A' B' * scale, with an A and a B for each slice of the outputs.

        Args:
            y: (T, outputs).
            x: (T, inputs).
            lora_a_stacked: an `AdapterStack` per slice.
            lora_b_stacked: likewise.
            scale: 1 in vLLM, which multiplies an adapter's scale into its B.
            output_slices: outputs of each slice.
            buffer: not used.
            kwargs: not used.
        """
        slots = slots_of_step()
        added = [
            _expand(_shrink(x, a, slots), b, slots)
            for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
        ]
        delta = added[0] if len(added) == 1 else torch.cat(added, dim=-1)
        return _sum(y, delta, scale)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns logits with adapters added; y may have more columns, which pad the vocabulary."""
        slots = slots_of_step()
        delta = _expand(_shrink(x, lora_a_stacked, slots), lora_b_stacked, slots)
        padded = F.pad(delta, (0, y.shape[-1] - delta.shape[-1]))
        return _sum(y, padded, scale)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: Any,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns y + x B'; x (T, rank) are the rows of A that the token ids and slots chose."""
        slots = slots_of_step()
        if not _cuts(slots, lora_b_stacked):
            x = x.repeat(1, lora_b_stacked.slots)
        return y + _expand(x, lora_b_stacked, slots).to(y.dtype)

    def apply_lora_full_linear(self, *args: Any, **kwargs: Any) -> None:
        """Raises: NotImplementedError: always; only pooling models have classification heads."""
        raise NotImplementedError("LoRA adapters of classification heads are not supported")

    def add_shrink(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raises: NotImplementedError: always; only fully sharded adapters need it alone."""
        raise NotImplementedError("--fully-sharded-loras is not supported on Neuron")

    def add_expand(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raises: NotImplementedError: always; only fully sharded adapters need it alone."""
        raise NotImplementedError("--fully-sharded-loras is not supported on Neuron")


class _EmbeddingOffsets:
    """By how many rows the A of a token's slot lies behind the first, for any number of tokens."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __getitem__(self, tokens: slice) -> torch.Tensor:
        return _per_token(slots_of_step(), tokens.stop).clamp(min=0) * self._vocabulary


def _cuts(slots: torch.Tensor, stack: AdapterStack) -> bool:
    """Whether the adapter of the only sequence is cut out of the stack."""
    return slots.shape[0] == 1 and stack.slots > 1


def _per_token(slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the slot of each token, (tokens,); each sequence has equally many."""
    sequences = slots.shape[0]
    # Fewer: vLLM's Transformers backend has all tokens in one row, which is counted as one.
    if tokens <= sequences:
        return slots
    return slots.unsqueeze(1).expand(sequences, tokens // sequences).reshape(tokens)


def _shrink(x: torch.Tensor, a: AdapterStack, slots: torch.Tensor) -> torch.Tensor:
    """Returns x A', (T, rank) of the one slot or (T, slots * rank) of all."""
    weight = a.flat
    if _cuts(slots, a):
        weight = weight.view(a.slots, a.rank, -1).index_select(0, slots.clamp(min=0))[0]
    return F.linear(x.to(weight.dtype), weight)


def _expand(shrunk: torch.Tensor, b: AdapterStack, slots: torch.Tensor) -> torch.Tensor:
    """Returns what sequences' own adapters make of `_shrink`'s result, (T, outputs)."""
    weight = b.flat
    if _cuts(slots, b):
        own = slots >= 0
        weight = weight.view(-1, b.slots, b.rank).index_select(1, slots.clamp(min=0))[:, 0]
    else:
        columns = torch.arange(b.slots).unsqueeze(1).expand(b.slots, b.rank).reshape(-1)
        own = _per_token(slots, shrunk.shape[0]).unsqueeze(1) == columns
    # Not a product with 0 or 1, which would let another adapter's infinity through.
    return F.linear(torch.where(own, shrunk.to(weight.dtype), 0), weight)


def _sum(y: torch.Tensor, delta: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns y + delta * scale in y's dtype."""
    return y + (delta if scale == 1 else delta * scale).to(y.dtype)
