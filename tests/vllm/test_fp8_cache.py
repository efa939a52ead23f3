"""KV caches of fp8: what is written, what is read back, and that it lowers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.lowering.parity import assert_parity, lowering_of
from vllm_neuron.route import Route
from vllm_neuron.vllm.attention import FP8_CACHE_DTYPES, NeuronAttention, NeuronAttentionMetadata

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 8, 4, 6
#: Keys beyond 448 * 0.0051 are cut off in e4m3. No quotient lies midway between two numbers.
KEY_SCALE, VALUE_SCALE = 0.0051, 0.0193


class Attend(torch.nn.Module):
    """Attention of `tokens` tokens of one sequence that begins at `start`, blocks 3, 5, 1."""

    def __init__(self, kv_cache_dtype: str, *, start: int, tokens: int) -> None:
        super().__init__()
        self.attention = NeuronAttention(
            HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, kv_cache_dtype=kv_cache_dtype
        )
        self.register_buffer("_k_scale", torch.tensor(KEY_SCALE))
        self.register_buffer("_v_scale", torch.tensor(VALUE_SCALE))
        self.layer_name = "layer"
        positions = torch.arange(start, start + tokens)
        tables = torch.tensor([[3, 5, 1]])
        self.register_buffer("positions", positions)
        self.register_buffer("tables", tables)
        self.register_buffer("slots", tables[0][positions // BLOCK] * BLOCK + positions % BLOCK)

    def forward(self, query, key, value, key_cache, value_cache):
        metadata = NeuronAttentionMetadata.build(
            positions=self.positions,
            slots=self.slots,
            block_tables=self.tables,
            kv_caches={"layer": (key_cache, value_cache)},
            block_size=BLOCK,
            windows=(None,),
        )
        output = torch.empty_like(query)
        return self.attention.forward(self, query, key, value, torch.empty(0), metadata, output)


def cached(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What a cache gives back, number by number: the nearest that it can hold."""
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    numbers = bits[bits.isfinite()].unique()
    distance = (rows.float().unsqueeze(-1) / scale - numbers).abs()
    return numbers[distance.argmin(-1)] * scale


def noise(tokens: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + heads)
    return (torch.randn(tokens, heads, DIM, generator=generator) * 1.5).to(dtype)


def caches(garbage: int = 0) -> list[torch.Tensor]:
    return [torch.full((BLOCKS, BLOCK, KV_HEADS, DIM), garbage, dtype=torch.uint8) for _ in "kv"]


@pytest.mark.parametrize("name", sorted(FP8_CACHE_DTYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attends_to_what_the_cache_can_hold(name, dtype):
    # 0x7f is NaN in both formats: what a padded row reads must not matter.
    kept = caches(garbage=0x7F)
    key, value = (noise(10, KV_HEADS, dtype) for _ in "kv")
    value = value.flip(0)
    query = noise(10, HEADS, dtype)
    outputs = []
    for start, end in ((0, 7), (7, 8), (8, 10)):
        now = slice(start, end)
        step = Attend(name, start=start, tokens=end - start)
        outputs.append(step(query[now], key[now], value[now], *kept))
    fp8 = FP8_CACHE_DTYPES[name]
    keys = cached(key, KEY_SCALE, fp8)
    values = cached(value, VALUE_SCALE, fp8).to(dtype).float()
    assert name == "fp8_e5m2" or keys.abs().max() == pytest.approx(448 * KEY_SCALE)
    group = HEADS // KV_HEADS
    scores = torch.einsum("qhd,shd->hqs", query.float(), keys.repeat_interleave(group, 1))
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    weights = (scores / math.sqrt(DIM)).masked_fill(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqs,shd->qhd", weights, values.repeat_interleave(group, 1))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(torch.cat(outputs).float(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_lowers_to_the_same_bits(name):
    step = Attend(name, start=2, tokens=3)
    arguments = (
        *(noise(3, heads, torch.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)),
        *caches(),
    )
    with lowering_of(Route.NATIVE) as lowering:
        assert_parity(lowering, step, arguments, rtol=1e-5, atol=1e-5)


def test_a_layer_has_its_own_scales():
    step = Attend("fp8", start=0, tokens=2)
    other = SimpleNamespace(layer_name="layer", _k_scale=torch.tensor(1.0), _v_scale=step._v_scale)
    key = noise(2, KV_HEADS, torch.float32)
    written = []
    for layer in (step, other):
        kept = caches()
        step.attention.forward(
            layer,
            noise(2, HEADS, torch.float32),
            key,
            key,
            torch.empty(0),
            NeuronAttentionMetadata.build(
                positions=step.positions,
                slots=step.slots,
                block_tables=step.tables,
                kv_caches={"layer": tuple(kept)},
                block_size=BLOCK,
                windows=(None,),
            ),
            torch.empty(2, HEADS, DIM),
        )
        written.append(kept[0].view(torch.float8_e4m3fn)[3, :2].float())
    torch.testing.assert_close(written[1], cached(key, 1.0, torch.float8_e4m3fn))
    torch.testing.assert_close(written[0] * KEY_SCALE, cached(key, KEY_SCALE, torch.float8_e4m3fn))
