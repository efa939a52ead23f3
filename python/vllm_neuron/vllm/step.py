"""The functions that are compiled for the buckets: one step of a decoder or of an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import vllm.forward_context as forward_context
from vllm.v1.attention.backend import AttentionMetadata

from vllm_neuron.vllm.attention import EncoderMetadata, KVCache, NeuronAttentionMetadata
from vllm_neuron.vllm.lora_slots import with_slots

__all__ = ["DecoderStep", "EncoderStep"]


class StepContext:
    """What layers read of `vllm.forward_context.ForwardContext` during a step.

    A stand-in of its own because the real one derives from the running configuration what a static
    graph must not contain.
    """

    def __init__(self, layers: Mapping[str, Any], metadata: AttentionMetadata) -> None:
        self.no_compile_layers = layers
        self.attn_metadata = metadata
        self.slot_mapping: dict[str, torch.Tensor] = {}
        self.dp_metadata = None


class ModelStep(torch.nn.Module):
    """What the steps have in common: the model and its attention layers.

    Everything that changes between steps is an argument; the graph depends on shapes only.

    Args:
        model: vLLM's model, a module.
        layers: attention layers by name.
    """

    def __init__(self, model: Any, layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        # A plain dict: registering the layers again would give every weight a second name.
        self.layers = dict(layers)
        windows = {layer.impl.window for layer in layers.values()}
        self.windows = tuple(sorted(windows, key=lambda window: window or 0))

    def hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Runs the model; returns (tokens, hidden)."""
        outer: Any = forward_context._forward_context
        context: Any = StepContext(self.layers, metadata)
        forward_context._forward_context = context
        try:
            return self.model(input_ids, positions)
        finally:
            forward_context._forward_context = outer


class DecoderStep(ModelStep):
    """One step of a decoder: tokens in, KV cache updated in place, logits or hidden states out.

    Args:
        model: vLLM's model, a module.
        layers: attention layers by name, in the order of `kv_caches`.
        block_size: tokens per KV cache block.
        return_logits: whether to return logits; a pooling model has none.
        return_hidden_states: whether to return the hidden state of every token, for pooling or for
            prompt logprobs.
    """

    def __init__(
        self,
        model: Any,
        layers: Mapping[str, Any],
        *,
        block_size: int,
        return_logits: bool,
        return_hidden_states: bool,
    ) -> None:
        super().__init__(model, layers)
        self.layer_names = tuple(layers)
        self.block_size = block_size
        self.return_logits = return_logits
        self.return_hidden_states = return_hidden_states

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        logits_rows: torch.Tensor,
        kv_caches: Sequence[KVCache],
        lora_slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs the model for B sequences of Q tokens each.

        Args:
            input_ids: (B * Q,) int64.
            positions: (B * Q,) int64.
            slot_mapping: (B * Q,) int64, cache row per token; 0 for padding.
            block_tables: (B, N) int64.
            logits_rows: (R,) int64, the rows of `input_ids` whose logits are wanted: one of each
                sequence, or all where draft tokens are verified.
            kv_caches: per layer, key and value cache; updated in place.
            lora_slots: (B,) int64, see `lora_slots.with_slots`; None without adapters.

        Returns:
            Of these what is asked for: logits (R, vocabulary) float32, hidden states
            (B * Q, hidden).
        """
        metadata = NeuronAttentionMetadata.build(
            positions=positions,
            slots=slot_mapping,
            block_tables=block_tables,
            kv_caches=dict(zip(self.layer_names, kv_caches, strict=True)),
            block_size=self.block_size,
            windows=self.windows,
        )
        hidden_states = with_slots(lora_slots, self.hidden_states, input_ids, positions, metadata)
        results: tuple[torch.Tensor, ...] = ()
        if self.return_logits:
            rows = hidden_states.index_select(0, logits_rows)
            results += (with_slots(lora_slots, self.model.compute_logits, rows).float(),)
        if self.return_hidden_states:
            results += (hidden_states,)
        return results


class EncoderStep(ModelStep):
    """A whole sequence through an encoder: tokens in, hidden states out, nothing kept."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, length: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Runs the model for one sequence of Q tokens.

        Args:
            input_ids: (Q,) int64.
            positions: (Q,) int64.
            length: how many of the Q tokens are not padding, (1,) int64.

        Returns:
            Hidden states (Q, hidden).
        """
        metadata = EncoderMetadata.build(
            query_len=input_ids.shape[0], length=length, windows=self.windows
        )
        # vLLM's BERT takes the token types out of the ids in place.
        return (self.hidden_states(input_ids.clone(), positions, metadata),)
