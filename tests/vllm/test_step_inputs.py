"""The arrays of one bucket: what is set, and that padding is padding again after each call."""

from __future__ import annotations

import numpy as np

from vllm_neuron.vllm.step_inputs import EncoderInputs, StepInputs

BLOCK = 4


def values(inputs):
    return [tensor.tolist() for tensor in inputs.tensors]


def test_prefill_sets_a_chunk_and_pads_the_rest():
    inputs = StepInputs(1, 6, 3, block_size=BLOCK)
    blocks = np.array([7, 5, 9, 0], np.int32)
    inputs.fill_prefill(np.array([11, 12, 13, 14, 15, 16], np.int32), 2, blocks)
    assert values(inputs) == [
        [11, 12, 13, 14, 15, 16],
        [2, 3, 4, 5, 6, 7],
        [30, 31, 20, 21, 22, 23],
        [[7, 5, 9]],
        [5],
    ]
    inputs.fill_prefill(np.array([17, 18], np.int32), 8, blocks)
    assert values(inputs) == [
        [17, 18, 0, 0, 0, 0],
        [8, 9, 0, 0, 0, 0],
        [36, 37, 0, 0, 0, 0],
        [[7, 5, 9]],
        [1],
    ]


def test_decode_sets_rows_and_pads_the_rest():
    inputs = StepInputs(3, 1, 2, block_size=BLOCK)
    blocks = np.array([[3, 0, 0], [8, 6, 0], [2, 4, 0]], np.int32)
    tokens, positions = np.array([21, 22, 23], np.int32), np.array([1, 7, 4], np.int32)
    inputs.fill_decode(tokens, positions, blocks)
    assert values(inputs) == [
        [21, 22, 23],
        [1, 7, 4],
        [13, 27, 16],
        [[3, 0], [8, 6], [2, 4]],
        [0, 1, 2],
    ]
    inputs.fill_decode(tokens[:1], positions[:1], blocks[:1])
    assert values(inputs) == [
        [21, 0, 0],
        [1, 0, 0],
        [13, 0, 0],
        [[3, 0], [0, 0], [0, 0]],
        [0, 1, 2],
    ]
    inputs.fill_decode(tokens[:0], positions[:0], blocks[:0])
    assert values(inputs)[:4] == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [[0, 0]] * 3]


def test_verify_sets_some_tokens_of_each_row_and_pads_the_rest():
    inputs = StepInputs(3, 3, 2, block_size=BLOCK, all_logits=True)
    blocks = np.array([[3, 5, 0], [8, 6, 0]], np.int32)
    tokens = np.array([[21, 22, 23], [31, 99, 99]], np.int32)
    starts, counts = np.array([2, 7], np.int32), np.array([3, 1])
    inputs.fill_verify(tokens, starts, counts, blocks)
    assert values(inputs) == [
        [21, 22, 23, 31, 0, 0, 0, 0, 0],
        [2, 3, 4, 7, 0, 0, 0, 0, 0],
        [14, 15, 20, 27, 0, 0, 0, 0, 0],
        [[3, 5], [8, 6], [0, 0]],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    inputs.fill_verify(tokens[1:], starts[1:], counts[1:], blocks[1:])
    assert values(inputs)[:4] == [
        [31, 0, 0, 0, 0, 0, 0, 0, 0],
        [7, 0, 0, 0, 0, 0, 0, 0, 0],
        [27, 0, 0, 0, 0, 0, 0, 0, 0],
        [[8, 6], [0, 0], [0, 0]],
    ]


def test_an_encoder_takes_a_whole_sequence():
    inputs = EncoderInputs(4)
    assert values(inputs) == [[0] * 4, [0] * 4, [1]]
    inputs.fill(np.array([11, 12, 13, 14], np.int32))
    assert values(inputs) == [[11, 12, 13, 14], [0, 1, 2, 3], [4]]
    inputs.fill(np.array([15, 16], np.int32))
    assert values(inputs) == [[15, 16, 0, 0], [0, 1, 0, 0], [2]]


def test_tensors_share_the_arrays():
    inputs = StepInputs(2, 1, 2, block_size=BLOCK)
    inputs.input_ids[0] = 9
    assert inputs.tensors[0].tolist() == [9, 0]
    assert [str(tensor.dtype) for tensor in inputs.tensors] == ["torch.int64"] * 5


def test_slots_of_adapters_are_those_of_the_last_call():
    inputs = StepInputs(3, 1, 2, block_size=BLOCK)
    assert inputs.lora_slots.tolist() == [-1, -1, -1]
    inputs.fill_lora_slots(np.array([2, -1, 0]))
    assert inputs.lora_slots.tolist() == [2, -1, 0]
    inputs.fill_lora_slots(np.array([1]))
    assert inputs.lora_slots.tolist() == [1, -1, -1]
    assert len(inputs.tensors) == 5
