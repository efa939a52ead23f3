"""The attention backend against a dense reference: windows, soft cap, groups, padding, garbage."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.attention import (
    EncoderMetadata,
    NeuronAttention,
    NeuronAttentionMetadata,
    storage_dtype,
)

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
NUM_BLOCKS = 32


def reference(query, keys, values, positions, *, window, soft_cap, sinks):
    """Attention of one sequence, (Q, heads, D) over (S, kv_heads, D), in float32."""
    group = HEADS // KV_HEADS
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,shd->hqs", query.float(), keys) / math.sqrt(DIM)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = positions[:, None] - torch.arange(len(keys))[None]
    hidden = (distance < 0) | (distance >= (window or len(keys) + 1))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqs,shd->qhd", weights, values)


def attend(
    starts, query_len, blocks_per_row, *, dtype, garbage, window=None, soft_cap=None, sinks=None
):
    """Runs sequences of `starts` cached tokens and one padded row; returns outputs, references."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    batch = len(starts) + 1
    caches = [
        torch.full((NUM_BLOCKS, BLOCK, KV_HEADS, DIM), garbage, dtype=dtype) for _ in range(2)
    ]
    tokens = [noise(batch * query_len, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tables = torch.zeros(batch, blocks_per_row, dtype=torch.int64)
    positions = torch.zeros(batch * query_len, dtype=torch.int64)
    slots = torch.zeros(batch * query_len, dtype=torch.int64)
    free = iter(torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1)
    expected = []
    for row, start in enumerate(starts):
        now = slice(row * query_len, (row + 1) * query_len)
        end = start + query_len
        for index in range(-(-end // BLOCK)):
            tables[row, index] = next(free)
        where = torch.arange(end)
        rows = tables[row][where // BLOCK] * BLOCK + where % BLOCK
        history = [noise(start, KV_HEADS, DIM) for _ in range(2)]
        for cache, old in zip(caches, history, strict=True):
            cache.view(-1, KV_HEADS, DIM)[rows[:start]] = old
        positions[now], slots[now] = where[start:], rows[start:]
        keys, values = (
            torch.cat([old, new[now]]) for old, new in zip(history, tokens[1:], strict=True)
        )
        query = tokens[0][now]
        expected.append(
            reference(
                query,
                keys,
                values,
                where[start:],
                window=window,
                soft_cap=soft_cap,
                sinks=sinks,
            )
        )

    stored = storage_dtype(dtype)
    kv_caches = {"layer": tuple(cache.view(stored) for cache in caches)}
    metadata = NeuronAttentionMetadata.build(
        positions=positions,
        slots=slots,
        block_tables=tables,
        kv_caches=kv_caches,
        block_size=BLOCK,
        windows=(window,),
    )
    layer = SimpleNamespace(layer_name="layer", kv_cache_torch_dtype=dtype)
    attention = NeuronAttention(
        HEADS,
        DIM,
        DIM**-0.5,
        num_kv_heads=KV_HEADS,
        sliding_window=window,
        logits_soft_cap=soft_cap,
        sinks=sinks,
    )
    output = torch.empty(batch * query_len, HEADS, DIM, dtype=dtype)
    before = [cache.clone() for cache in caches]
    attention.forward(layer, *tokens, torch.empty(0), metadata, output)
    written = torch.unique(slots)
    for cache, old in zip(caches, before, strict=True):
        changed = (cache != old).flatten(1).view(NUM_BLOCKS * BLOCK, -1).any(-1)
        changed &= ~(cache.isnan() & old.isnan()).view(NUM_BLOCKS * BLOCK, -1).all(-1)
        assert set(changed.nonzero().flatten().tolist()) <= set(written.tolist())
    return output.float(), torch.cat(expected)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(("starts", "query_len"), [([0, 1, 3, 4, 17], 1), ([0], 9), ([6], 7)])
def test_equals_dense_attention(starts, query_len, window, soft_cap, garbage):
    output, expected = attend(
        starts,
        query_len,
        6,
        dtype=torch.float32,
        garbage=garbage,
        window=window,
        soft_cap=soft_cap,
    )
    live = len(expected)
    torch.testing.assert_close(output[:live], expected, rtol=1e-5, atol=1e-5)
    assert output[live:].isfinite().all(), "the padded row"


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_their_share_of_the_softmax(window):
    sinks = torch.linspace(-2, 3, HEADS)
    output, expected = attend(
        [3, 9], 4, 6, dtype=torch.float32, garbage=math.nan, window=window, sinks=sinks
    )
    torch.testing.assert_close(output[: len(expected)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_stored_as_bits(dtype):
    output, expected = attend([3, 9], 1, 6, dtype=dtype, garbage=math.nan)
    torch.testing.assert_close(output[: len(expected)], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("garbage", [0.0, math.nan])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("length", [1, 5, 9])
def test_an_encoder_sees_what_follows_and_no_padding(length, window, garbage):
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(9, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    for rows in (query, key, value):
        rows[length:] = garbage
    metadata = EncoderMetadata.build(
        query_len=9, length=torch.tensor([length]), windows=(None, window)
    )
    attention = NeuronAttention(
        HEADS,
        DIM,
        DIM**-0.5,
        num_kv_heads=KV_HEADS,
        sliding_window=window,
        attn_type="encoder_only",
    )
    output = torch.empty(9, HEADS, DIM)
    attention.forward(None, query, key, value, torch.empty(0), metadata, output)

    group = HEADS // KV_HEADS
    keys, values = (x[:length].repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,shd->hqs", query[:length], keys) / math.sqrt(DIM)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    scores = scores.masked_fill(distance.abs() >= (window or length), -torch.inf)
    expected = torch.einsum("hqs,shd->qhd", scores.softmax(-1), values)
    torch.testing.assert_close(output[:length], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("ALiBi", {"alibi_slopes": [0.5] * HEADS}),
        ("attention type encoder_decoder", {"attn_type": "encoder_decoder"}),
        ("a KV cache shared between layers", {"kv_sharing_target_layer_name": "layer"}),
        ("KV cache dtype int8_per_token_head", {"kv_cache_dtype": "int8_per_token_head"}),
        ("attention with use_direct_call", {"use_direct_call": True}),
    ],
)
def test_what_is_not_implemented_is_refused_at_load(feature, options):
    with pytest.raises(ConfigurationError) as caught:
        NeuronAttention(HEADS, DIM, 1.0, **options)
    assert str(caught.value) == (
        f"This model cannot be served on Neuron: {feature} is not implemented in the plugin's "
        "attention backend. Choose another model or setting."
    )
