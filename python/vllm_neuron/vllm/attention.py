"""Attention in plain tensor operations of static shape: over a paged KV cache, or of an encoder.

Every layer of a step shares one `NeuronAttentionMetadata` (of an encoder `EncoderMetadata`), built
once from the step's arguments, so that a layer adds only what depends on its own query, key and
value.

Invariants:
    * Padding writes to slot 0 only. Block 0 is vLLM's null block, which no request ever owns.
      Slot -1 would not do: eager PyTorch wraps it to the last row of the cache, StableHLO drops it.
    * A padded or stale row of the gathered cache contributes exactly nothing, whatever it holds:
      its score is replaced before the softmax and its value is zeroed (0 * NaN would be NaN).
    * Every query sees at least position 0, so no softmax row is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from vllm_neuron.errors import ConfigurationError

__all__ = [
    "FP8_CACHE_DTYPES",
    "EncoderMetadata",
    "NeuronAttention",
    "NeuronAttentionBackend",
    "NeuronAttentionMetadata",
    "storage_dtype",
]

KVCache = tuple[torch.Tensor, torch.Tensor]

#: fp8 by vLLM's names of it as KV cache dtype; the caches hold its bits as uint8.
FP8_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass
class NeuronAttentionMetadata(AttentionMetadata):
    """What every attention layer of one step needs.

    Attributes:
        batch: sequences B.
        query_len: query tokens per sequence Q.
        slots: block, and row of the block, that each token is written to, both (B * Q,) int64.
        blocks: block tables in one row, (B * N,) int64 for N blocks per sequence.
        visible: by sliding window in tokens (None: full attention), which keys a query sees,
            (B, 1, Q, S) bool for S = N * block_size.
        live: which gathered rows any query of the sequence may see, (B, S, 1, 1) bool.
        kv_caches: by layer name, key and value cache, each
            (num_blocks, block_size, kv_heads, head_dim).
    """

    batch: int
    query_len: int
    slots: tuple[torch.Tensor, torch.Tensor]
    blocks: torch.Tensor
    visible: dict[int | None, torch.Tensor]
    live: torch.Tensor
    kv_caches: dict[str, KVCache]

    @staticmethod
    def build(
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        kv_caches: dict[str, KVCache],
        block_size: int,
        windows: tuple[int | None, ...],
    ) -> NeuronAttentionMetadata:
        """Computes the parts that are the same in all layers.

        Args:
            positions: position of each token in its sequence, (B * Q,) int64; 0 for padding.
            slots: cache row each token is written to, (B * Q,) int64: block * block_size + row of
                the block.
            block_tables: blocks of each sequence, (B, N) int64; 0 beyond its end.
            kv_caches: as the attribute.
            block_size: tokens per block.
            windows: the distinct sliding windows of the model's layers.
        """
        batch, num_blocks = block_tables.shape
        query_len = positions.shape[0] // batch
        keys = torch.arange(num_blocks * block_size, device=positions.device)
        rows = positions.view(batch, 1, query_len, 1)
        causal = keys <= rows
        visible = {
            window: causal if window is None else causal & (keys > rows - window)
            for window in windows
        }
        last = positions.view(batch, query_len).amax(dim=1)
        return NeuronAttentionMetadata(
            batch=batch,
            query_len=query_len,
            slots=(slots // block_size, slots % block_size),
            blocks=block_tables.reshape(-1),
            visible=visible,
            live=(keys <= last.view(batch, 1)).view(batch, -1, 1, 1),
            kv_caches=kv_caches,
        )


@dataclass
class EncoderMetadata(AttentionMetadata):
    """What every layer of an encoder needs: its keys and values are those of the step itself.

    Attributes:
        batch: sequences B, always 1.
        query_len: tokens per sequence Q.
        visible: by sliding window in tokens (None: full attention), which keys a query sees,
            (1, 1, Q, Q) bool. A window reaches as far ahead as it reaches back.
        live: which rows any query may see, (1, Q, 1, 1) bool.
    """

    batch: int
    query_len: int
    visible: dict[int | None, torch.Tensor]
    live: torch.Tensor

    @staticmethod
    def build(
        *, query_len: int, length: torch.Tensor, windows: tuple[int | None, ...]
    ) -> EncoderMetadata:
        """Computes the parts that are the same in all layers.

        Args:
            query_len: tokens of the step, padding included.
            length: tokens without padding, (1,) int64, at least 1.
            windows: the distinct sliding windows of the model's layers.
        """
        keys = torch.arange(query_len, device=length.device)
        own = (keys < length).view(1, 1, 1, -1)
        # Padded queries see the sequence too, so that no softmax row is empty.
        rows = torch.minimum(keys, length - 1).view(1, 1, -1, 1)
        visible = {
            window: own.expand(1, 1, query_len, query_len)
            if window is None
            else own & ((keys - rows).abs() < window)
            for window in windows
        }
        return EncoderMetadata(
            batch=1, query_len=query_len, visible=visible, live=own.view(1, -1, 1, 1)
        )


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the tensors that hold KV rows of `dtype`.

    16-bit floats are kept as their bits: XLA:CPU has no scatter of bfloat16 and would convert the
    whole cache to float32 and back at every step.
    """
    return torch.int16 if dtype.itemsize == 2 else dtype


class NeuronAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Required by the backend interface; the step module builds the metadata inside the graph."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def build(self, *args: Any, **kwargs: Any) -> NeuronAttentionMetadata:
        """Raises: NotImplementedError: always."""
        raise NotImplementedError("DecoderStep builds NeuronAttentionMetadata inside the graph")


class NeuronAttentionBackend(AttentionBackend):
    """The attention backend that `NeuronPlatform.get_attn_backend_cls` names."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012 - vLLM's form

    @staticmethod
    def get_name() -> str:
        """Returns a member of vLLM's AttentionBackendEnum: the one for backends outside of it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[NeuronAttention]:
        """Returns the class each attention layer instantiates."""
        return NeuronAttention

    @staticmethod
    def get_builder_cls() -> type[NeuronAttentionMetadataBuilder]:
        """Returns the (unused) metadata builder class."""
        return NeuronAttentionMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Returns True: a sink is one more column of the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Returns True: a window is one more comparison in the mask."""
        return True


class NeuronAttention(AttentionImpl[NeuronAttentionMetadata]):
    """Grouped-query attention of one layer of a decoder, or of an encoder without a KV cache.

    Attributes:
        is_encoder: whether a token sees those after it too.

    Raises:
        ConfigurationError: at model load, for a kind of attention that is not implemented.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        unknown = sorted(name for name, value in extra.items() if value is not None)
        for feature, present in (
            ("ALiBi", alibi_slopes is not None),
            (
                f"attention type {attn_type}",
                attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY),
            ),
            ("a KV cache shared between layers", kv_sharing_target_layer_name is not None),
            (
                f"KV cache dtype {kv_cache_dtype}",
                kv_cache_dtype.startswith(("fp8", "int", "nvfp"))
                and kv_cache_dtype not in FP8_CACHE_DTYPES,
            ),
            (f"attention with {', '.join(unknown)}", bool(unknown)),
        ):
            if present:
                raise ConfigurationError(
                    f"This model cannot be served on Neuron: {feature} is not implemented in the "
                    f"plugin's attention backend. Choose another model or setting.",
                    name="model",
                    value=feature,
                )
        self.is_encoder = attn_type == AttentionType.ENCODER_ONLY
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.fp8_dtype = FP8_CACHE_DTYPES.get(kv_cache_dtype)
        self.window = sliding_window
        self.soft_cap = logits_soft_cap or None
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: NeuronAttentionMetadata | EncoderMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends over each sequence's tokens so far, or over all tokens of an encoder's sequence.

        A decoder's key and value are written to the cache first.

        Args:
            layer: the attention layer; its name selects the cache.
            query: (B * Q, heads, head_dim).
            key: (B * Q, kv_heads, head_dim).
            value: (B * Q, kv_heads, value_dim).
            kv_cache: vLLM's attribute of the layer; unused, the caches are step arguments.
            attn_metadata: the step's metadata.
            output: (B * Q, heads, value_dim), written in place.
            output_scale: scale of a quantised output; must be None.
            output_block_scale: likewise.

        Returns:
            `output`.
        """
        step = attn_metadata
        if isinstance(step, EncoderMetadata):
            shape = (step.batch, step.query_len, self.num_kv_heads, -1)
            keys, values = key.view(shape), value.view(shape)
        else:
            key_cache, value_cache = step.kv_caches[layer.layer_name]
            if self.fp8_dtype is None:
                dtype = layer.kv_cache_torch_dtype
                _write(key_cache, step.slots, key.to(dtype))
                _write(value_cache, step.slots, value.to(dtype))
                keys, values = _gather(key_cache, step, dtype), _gather(value_cache, step, dtype)
            else:
                dtype, key_scale, value_scale = self.fp8_dtype, layer._k_scale, layer._v_scale
                _write(key_cache, step.slots, _to_fp8(key, key_scale, dtype))
                _write(value_cache, step.slots, _to_fp8(value, value_scale, dtype))
                keys = _gather(key_cache, step, dtype).float() * key_scale
                values = _gather(value_cache, step, dtype).float() * value_scale
                values = values.to(query.dtype)
        keys, values = _by_head(keys), _by_head(torch.where(step.live, values, 0))

        # The query heads that share a KV head are rows of one matrix product.
        batch, query_len, kv_heads = step.batch, step.query_len, self.num_kv_heads
        group = self.num_heads // kv_heads
        queries = (
            (query.float() * self.scale)
            .view(batch, query_len, kv_heads, group, self.head_size)
            .permute(0, 2, 3, 1, 4)
            .reshape(batch * kv_heads, group * query_len, self.head_size)
        )
        scores = torch.bmm(queries, keys.float().transpose(1, 2))
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        scores = scores.view(batch, self.num_heads, query_len, -1)
        scores = torch.where(step.visible[self.window], scores, float("-inf"))
        weights = self._weights(scores).to(values.dtype)
        attended = torch.bmm(weights.view(batch * kv_heads, group * query_len, -1), values)
        # Contiguous, as `output` is: without the copy that forces, vLLM's view of the result fails.
        attended = (
            attended.view(batch, kv_heads, group, query_len, -1)
            .permute(0, 3, 1, 2, 4)
            .reshape(batch * query_len, -1)
            .view(output.shape)
        )
        output.copy_(attended)
        return output

    def _weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Softmax over the keys and, where the model has one, a sink per head that takes a share.

        Args:
            scores: float32 (B, heads, Q, S).
        """
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _write(
    cache: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor
) -> None:
    """Stores `rows` (T, heads, dim) at `slots` of a paged cache, in place.

    Through a view of the cache as one row per token, XLA would update two copies of it: one for
    the reads of this step, one for the next step.
    """
    cache.index_put_(slots, rows.view(cache.dtype))


def _to_fp8(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows / scale as fp8; what is out of range becomes the largest number (as vLLM's)."""
    largest = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-largest, largest).to(dtype)


def _gather(cache: torch.Tensor, step: NeuronAttentionMetadata, dtype: torch.dtype) -> torch.Tensor:
    """Returns each sequence's rows of a paged cache in order, (B, S, heads, dim)."""
    rows = cache.index_select(0, step.blocks).view(dtype)
    return rows.view(step.batch, -1, *cache.shape[2:])


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """Rearranges (B, S, heads, dim) to (B * heads, S, dim)."""
    return rows.permute(0, 2, 1, 3).flatten(0, 1)
