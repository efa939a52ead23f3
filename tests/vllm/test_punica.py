"""The arithmetic of LoRA adapters against one product per sequence."""

from __future__ import annotations

import pytest
import torch

from vllm_neuron.vllm.lora_slots import slots_of_step, with_slots
from vllm_neuron.vllm.punica import NeuronPunicaWrapper, stacked_a, stacked_b

RANK, INPUTS, OUTPUTS = 4, 6, (5, 3)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacks(slots, outputs, *, seed=0):
    """An A and a B per slice, written as vLLM's layers write them; the first slot has less rank."""
    a = tuple(stacked_a(torch.zeros(slots, 1, RANK, INPUTS)) for _ in outputs)
    b = tuple(stacked_b(torch.zeros(slots, 1, size, RANK)) for size in outputs)
    for part, (one, other) in enumerate(zip(a, b, strict=True)):
        for slot in range(slots):
            rank = 2 if slot == 0 else RANK
            one[slot] = 1  # left behind by an earlier adapter
            one[slot] = 0
            at = seed + 10 * slot + part
            one[slot, 0, :rank, :INPUTS].copy_(random(rank, INPUTS, seed=at))
            other[slot, 0, : outputs[part], :rank].copy_(random(outputs[part], rank, seed=at + 99))
    return a, b


def expected(y, x, a, b, slots):
    """What each sequence's own adapter adds."""
    per_sequence = len(x) // len(slots)
    result = y.clone()
    for sequence, slot in enumerate(slots):
        if slot < 0:
            continue
        rows = slice(sequence * per_sequence, (sequence + 1) * per_sequence)
        deltas = [
            x[rows] @ one.view[slot, 0].T @ other.view[slot, 0].T
            for one, other in zip(a, b, strict=True)
        ]
        result[rows] += torch.cat(deltas, dim=1)
    return result


BATCHES = [
    ([-1], 1),
    ([2], 1),
    ([0], 5),
    ([-1], 5),
    ([1, -1, 0, 2, 1], 1),
    ([2, 0], 3),
    ([-1] * 4, 1),
]


@pytest.mark.parametrize(("slots", "tokens"), BATCHES)
@pytest.mark.parametrize("count", [1, 3])
def test_linear(slots, tokens, count):
    slots = [min(slot, count - 1) for slot in slots]
    wrapper = NeuronPunicaWrapper(16, max_batches=4, device="cpu")
    a, b = stacks(count, OUTPUTS)
    rows = len(slots) * tokens
    x, y = random(rows, INPUTS, seed=1), random(rows, sum(OUTPUTS), seed=2)
    before = y.clone()
    result = with_slots(torch.tensor(slots), wrapper.add_lora_linear, y, x, a, b, 1.0, OUTPUTS)
    torch.testing.assert_close(result, expected(y, x, a, b, slots))
    assert torch.equal(y, before)
    without = [row for row in range(rows) if slots[row // tokens] < 0]
    assert torch.equal(result[without], y[without]), "without an adapter nothing is rounded"


@pytest.mark.parametrize("slots", [[1], [1, -1, 0]])
def test_logits_with_padding_of_the_vocabulary(slots):
    wrapper = NeuronPunicaWrapper(16, max_batches=4, device="cpu")
    (a,), (b,) = stacks(2, (7,))
    x, y = random(len(slots), INPUTS, seed=1), random(len(slots), 8, seed=2)
    result = with_slots(torch.tensor(slots), wrapper.add_lora_logits, y, x, a, b, 1.0)
    right = y.clone()
    right[:, :7] = expected(y[:, :7], x, (a,), (b,), slots)
    torch.testing.assert_close(result, right)


@pytest.mark.parametrize(("slots", "tokens"), [([1], 4), ([-1], 4), ([1, -1, 0], 1), ([0, 1], 2)])
def test_embedding(slots, tokens):
    """As VocabParallelEmbeddingWithLoRA calls it."""
    vocabulary, width = 9, 5
    wrapper = NeuronPunicaWrapper(16, max_batches=4, device="cpu")
    wrapper.vocabulary = vocabulary
    a = random(2, vocabulary, RANK)
    b = stacked_b(torch.zeros(2, 1, width, RANK))
    b[:, 0] = random(2, width, RANK, seed=5)
    ids = torch.arange(len(slots) * tokens) % vocabulary
    y = random(len(ids), width, seed=6)

    def layer(y):
        rows = (ids + wrapper._embeddings_indices[: len(ids)]).expand(len(ids))
        return wrapper.add_lora_embedding(y, a.view(-1, RANK)[rows], b, add_input=True)

    result = with_slots(torch.tensor(slots), layer, y)
    for row, token in enumerate(ids):
        slot = slots[row // tokens]
        added = a[slot, token] @ b.view[slot, 0].T if slot >= 0 else torch.zeros(width)
        torch.testing.assert_close(result[row], y[row] + added)


def test_embedding_of_tokens_in_one_row():
    """As the Transformers backend has them: (1, tokens), one token for each sequence."""
    wrapper = NeuronPunicaWrapper(16, max_batches=4, device="cpu")
    wrapper.vocabulary = 9
    ids = torch.tensor([[3, 5, 3]])

    def rows(ids):
        return ids + wrapper._embeddings_indices[: ids.shape[0]]

    assert with_slots(torch.tensor([1, -1, 0]), rows, ids).tolist() == [[12, 5, 3]]


def test_an_overflow_in_another_slot_reaches_nobody_else():
    wrapper = NeuronPunicaWrapper(16, max_batches=4, device="cpu")
    a, b = stacks(2, OUTPUTS)
    a[0][0] = float("inf")
    x, y = random(3, INPUTS, seed=1), random(3, sum(OUTPUTS), seed=2)
    arguments = (wrapper.add_lora_linear, y, x, a, b, 1.0, OUTPUTS)
    result = with_slots(torch.tensor([1, -1, 0]), *arguments)
    assert torch.isfinite(result[:2]).all()
    assert not torch.isfinite(result[2]).all()


def test_adapters_have_a_dtype_of_their_own():
    wrapper = NeuronPunicaWrapper(16, max_batches=4, device="cpu")
    a, b = stacks(2, (4,))
    for stack in (*a, *b):
        stack.flat = stack.flat.bfloat16()
    x, y = random(2, INPUTS, seed=1), random(2, 4, seed=2)
    slots = torch.tensor([0, 1])
    result = with_slots(slots, wrapper.add_lora_linear, y, x, a, b, 1.0, (4,))
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected(y, x, a, b, [0, 1]), rtol=0.05, atol=0.05)


def test_slots_end_with_the_call():
    slots = torch.tensor([0])
    assert with_slots(slots, lambda: with_slots(None, lambda: 1) + len(slots_of_step())) == 2
    with pytest.raises(RuntimeError, match="outside of with_slots"):
        slots_of_step()
