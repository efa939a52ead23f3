"""The function that is compiled for every bucket: one step of a decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import vllm.forward_context as forward_context

from vllm_neuron.vllm.attention import KVCache, NeuronAttentionMetadata

__all__ = ["DecoderStep"]


class StepContext:
    """What layers read of `vllm.forward_context.ForwardContext` during a step.

    A stand-in of its own because the real one derives from the running configuration what a static
    graph must not contain.
    """

    def __init__(self, layers: Mapping[str, Any], metadata: NeuronAttentionMetadata) -> None:
        self.no_compile_layers = layers
        self.attn_metadata = metadata
        self.slot_mapping: dict[str, torch.Tensor] = {}
        self.dp_metadata = None


class DecoderStep(torch.nn.Module):
    """One step of a decoder: tokens in, KV cache updated in place, logits out.

    Everything that changes between steps is an argument; the graph depends on shapes only.

    Args:
        model: vLLM's model, a module.
        layers: attention layers by name, in the order of `kv_caches`.
        block_size: tokens per KV cache block.
        return_hidden_states: also return the hidden state of every token (prefill: prompt
            logprobs need them).
    """

    def __init__(
        self,
        model: Any,
        layers: Mapping[str, Any],
        *,
        block_size: int,
        return_hidden_states: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.layer_names = tuple(layers)
        # A plain dict: registering the layers again would give every weight a second name.
        self.layers = dict(layers)
        self.block_size = block_size
        self.return_hidden_states = return_hidden_states
        windows = {layer.impl.window for layer in layers.values()}
        self.windows = tuple(sorted(windows, key=lambda window: window or 0))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        logits_rows: torch.Tensor,
        kv_caches: Sequence[KVCache],
    ) -> tuple[torch.Tensor, ...]:
        """Runs the model for B sequences of Q tokens each.

        Args:
            input_ids: (B * Q,) int64.
            positions: (B * Q,) int64.
            slot_mapping: (B * Q,) int64, cache row per token; 0 for padding.
            block_tables: (B, N) int64.
            logits_rows: (B,) int64, the row of `input_ids` whose logits are wanted.
            kv_caches: per layer, key and value cache; updated in place.

        Returns:
            Logits (B, vocabulary) float32 and, if asked for, hidden states (B * Q, hidden).
        """
        metadata = NeuronAttentionMetadata.build(
            positions=positions,
            slots=slot_mapping,
            block_tables=block_tables,
            kv_caches=dict(zip(self.layer_names, kv_caches, strict=True)),
            block_size=self.block_size,
            windows=self.windows,
        )
        outer: Any = forward_context._forward_context
        context: Any = StepContext(self.layers, metadata)
        forward_context._forward_context = context
        try:
            hidden_states = self.model(input_ids, positions)
            rows = hidden_states.index_select(0, logits_rows)
            logits = self.model.compute_logits(rows).float()
        finally:
            forward_context._forward_context = outer
        return (logits, hidden_states) if self.return_hidden_states else (logits,)
