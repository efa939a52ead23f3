"""The calls that a comparison makes: prompts in chunks, then all sequences together."""

import pytest
import torch

from vllm_neuron.comparison.calls import Schedule
from vllm_neuron.comparison.taps import decoder_layers
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.buckets import Buckets

BUCKETS = Buckets(
    prefill=(4, 8), decode=(1, 4), kv_segments=(), contexts=(8,), max_model_len=16,
    prefill_origin="explicit",
)  # fmt: skip


def test_prompts_are_prefilled_in_chunks_and_decoded_together():
    schedule = Schedule([[5, 6, 7], list(range(20, 30))], BUCKETS, block_size=4)
    assert (schedule.max_blocks, schedule.num_blocks) == (4, 9)
    calls = schedule.prefills()
    assert [(c.bucket, c.tokens, c.prompts, c.gives_tokens) for c in calls] == [
        ("prefill_s4", 3, (0,), True),
        ("prefill_s8", 8, (1,), False),
        ("prefill_s4", 2, (1,), True),
    ]
    ids, positions, slots, tables, rows = calls[2].inputs
    assert ids.tolist() == [28, 29, 0, 0]
    assert positions.tolist() == [8, 9, 0, 0]
    assert tables.tolist() == [[5, 6, 7, 8]]
    # The third block of the second prompt, which is block 7; padding goes to slot 0.
    assert slots.tolist() == [28, 29, 0, 0]
    assert rows.tolist() == [1]
    schedule.append([0, 1], [8, 30])
    call = schedule.decode()
    # The longest sequence has 11 tokens, more than the context bucket of 8.
    assert (call.bucket, call.sequences, call.gives_tokens) == ("decode_b4", 2, True)
    assert call.inputs[0].tolist() == [8, 30, 0, 0]
    assert call.inputs[1].tolist() == [3, 10, 0, 0]
    assert all(tensor.dtype == torch.int64 for tensor in call.inputs)


def test_the_context_bucket_is_the_servers():
    schedule = Schedule([[1, 2, 3]], BUCKETS, block_size=4)
    schedule.append([0], [4])
    call = schedule.decode()
    assert call.bucket == "decode_b1_ctx8"
    assert call.inputs[3].tolist() == [[1, 2]]


def test_decoder_layers_by_their_attention():
    names = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    assert decoder_layers(names) == ["model.layers.0", "model.layers.1"]
    assert decoder_layers(["transformer.h.10.attn.attn"]) == ["transformer.h.10"]
    with pytest.raises(ConfigurationError, match="not part of a numbered decoder layer"):
        decoder_layers(["encoder.attn"])
