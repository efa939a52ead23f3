"""Steps in the shapes of serving that no operator's own test has, against eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lowering.parity import Step, assert_parity
from vllm_neuron.lowering.native import NativeLowering

INF = math.inf
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def lowering():
    with NativeLowering() as lowering:
        yield lowering


@pytest.fixture
def equal(lowering):
    torch.manual_seed(0)
    return lambda step, *args, **tolerance: assert_parity(
        lowering, step if isinstance(step, nn.Module) else Step(step), args, **tolerance
    )


def test_attention_with_rows_that_see_nothing_and_more_keys_than_queries(equal):
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 3)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    mask[1] = False
    attend = F.scaled_dot_product_attention

    def compute(query, key, value, mask):
        added = torch.zeros(5, 7).masked_fill(~mask, -INF)
        return (
            attend(query, key, value, attn_mask=mask, enable_gqa=True, scale=0.2),
            attend(query, key, value, attn_mask=added, enable_gqa=True),
            attend(query, key, value, is_causal=True, enable_gqa=True),
            attend(key, query[:, :2], query[:, :2], is_causal=True),
            attend(query[0, 0], key[0, 0], value[0, 0]),
            (query @ key.repeat_interleave(2, 1).mT).masked_fill(~mask, -INF).softmax(-1),
        )

    equal(compute, query, key, value, mask, **CLOSE)


def test_writes_to_a_paged_cache_through_views(equal):
    def by_slot(cache, slots, rows):
        flat = cache.view(2, -1, 2, 8)
        flat[0][slots] = rows
        flat[1].index_copy_(0, slots, -rows)
        return cache.sum((0, 2, 3, 4))

    def by_block_and_offset(cache, slots, rows):
        block = torch.where(slots >= 0, slots // 4, cache.shape[0] - 1)
        cache.permute(0, 2, 1, 3)[block, slots % 4] = rows
        cache.index_put_((slots // 4, slots.remainder(4)), rows[:, :1].expand(-1, 4, -1))
        return cache[block, :, slots % 4]

    rows = torch.randn(3, 2, 8)
    equal(by_slot, torch.zeros(2, 4, 4, 2, 8), torch.tensor([5, 0, 15]), rows, **CLOSE)
    cache = torch.zeros(6, 4, 4, 8)
    equal(by_block_and_offset, cache, torch.tensor([3, -1, 9]), torch.randn(3, 4, 8), **CLOSE)


def test_copies_and_swaps_of_blocks_within_one_cache(equal):
    def move(cache, pairs):
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
        kept = cache[2].clone()
        cache[2] = cache[5]
        cache[5] = kept
        cache[torch.tensor([1, 2, 3])] = cache[torch.tensor([0, 1, 2])]
        cache.add_(cache.flip(0))
        cache[::2] = cache[1::2]
        return cache.sum()

    equal(move, torch.arange(24.0).reshape(6, 4), torch.tensor([[0, 3], [1, 4]]))


def test_verification_of_drafted_tokens(equal):
    def verify(draft, target):
        accepted = (draft == target[:, :-1]).long().cumprod(-1).sum(-1)
        following = target.gather(1, accepted[:, None])
        kept = torch.arange(target.shape[1]) < accepted[:, None]
        tokens = torch.where(kept, F.pad(draft, (0, 1), value=-1), -1)
        return accepted, tokens.scatter(1, accepted[:, None], following)

    draft = torch.tensor([[1, 2, 3], [4, 9, 6], [0, 0, 0]])
    equal(verify, draft, torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7], [1, 0, 0, 0]]))


def test_tokens_sorted_by_expert_with_experts_that_have_none(equal):
    def dispatch(x, ids, weights):
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(5, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
        ends = counts.cumsum(0)
        expert = torch.searchsorted(ends, torch.arange(flat.numel()), right=True)
        rows = torch.einsum("td,tdh->th", x[order // 2], weights[expert])
        summed = rows[order.argsort(stable=True)].view(-1, 2, 6).sum(1)
        return summed, torch.zeros(4, 6).index_add_(0, order // 2, rows), counts, ends

    ids = torch.tensor([[0, 3], [3, 4], [0, 0], [3, 1]])
    equal(dispatch, torch.randn(4, 8), ids, torch.randn(5, 8, 6), **CLOSE)


class Ring(nn.Module):
    """A ring buffer with its position, and the state of a causal convolution."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ring", torch.zeros(2, 3, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.register_buffer("state", torch.zeros(2, 4, 3))
        self.convolution = nn.Conv1d(4, 4, 4, groups=4)

    def forward(self, x):
        self.ring[:, (self.position % 3).view(1)] = x[:, None]
        self.position.add_(1)
        window = torch.cat([self.state, x[:, :, None]], -1)
        self.state.copy_(window[..., 1:])
        return self.ring.mean(1), F.silu(self.convolution(window))[..., 0]


def test_states_are_carried(equal):
    ring = Ring()
    for _ in range(2):
        equal(ring, torch.randn(2, 4), **CLOSE)
    assert ring.position == 2


def test_nibbles_and_bits(equal):
    def unpack(words, octets, signed):
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        return (
            (words[:, None] >> shifts) & 15,
            torch.stack([octets & 15, octets >> 4], -1).view(-1).to(torch.int8) - 8,
            (signed << 4) >> 4,
            signed >> 4,
            words.view(torch.float32).view(torch.int32),
            words.view(torch.uint8).sum(),
            ((words.long() & 0xFFFFFFFF) << 20) >> 3,
        )

    words = torch.randint(-(2**31), 2**31 - 1, (4,), dtype=torch.int32) | 0x40000000
    octets = torch.randint(0, 256, (8,), dtype=torch.uint8)
    words = words & ~0x3F800000
    equal(unpack, words, octets, octets.view(torch.int8))


class Wired(nn.Module):
    """Hooks, a parametrisation, shared layers and autocast."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.shared, nn.ReLU(), self.shared])
        self.named = nn.ModuleDict({"x": self.shared, "y": nn.Sequential(nn.Tanh(), self.shared)})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.normed.register_forward_pre_hook(lambda module, args: args[0] * 2)
        self.normed.register_forward_hook(lambda module, args, result: result + 1)
        self.chain = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for layer in self.named.values():
            x = x + layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.shared(x)
            with torch.autocast("cpu", enabled=False):
                high = self.shared(x)
        return self.normed(x), low.float(), high, self.chain(x), F.linear(x, self.shared.weight[:2])


def test_modules_wired_in_other_ways(equal):
    equal(Wired(), torch.randn(3, 4), rtol=2**-7, atol=2**-7)


def test_maps_over_rows_and_derivatives(equal):
    func = torch.func

    def compute(x):
        return (
            torch.vmap(lambda row: row.softmax(0))(x),
            torch.vmap(lambda one, two: one @ two, in_dims=(1, None))(x, x[:, 0]),
            func.grad(lambda y: y.sin().sum())(x),
            func.jvp(lambda y: y**3, (x,), (torch.ones_like(x),)),
            func.jacrev(lambda y: y * y)(x[0]),
        )

    equal(compute, torch.randn(3, 4), **CLOSE)
