"""Indexing by an integer tensor of rank 0: read, written, and changed through the view."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.parity import Step, assert_parity
from vllm_neuron.capture import capture
from vllm_neuron.errors import CaptureError
from vllm_neuron.lowering.native import NativeLowering


@pytest.fixture(scope="module")
def equal():
    with NativeLowering() as lowering:
        yield lambda function, *args: assert_parity(lowering, Step(function), args)


def tensor() -> torch.Tensor:
    return torch.arange(72.0).reshape(4, 6, 3)


@pytest.mark.parametrize(("i", "j"), ((2, 0), (-1, -2)))
def test_reads_of_every_place_in_a_key(equal, i, j):
    equal(
        lambda x, i, j: (x[i], x[i, j], x[:, i], x[..., j], x[i, ..., j], x[None, i], x[i, 1:3]),
        tensor(),
        torch.tensor(i),
        torch.tensor(j),
    )


def test_an_index_beside_index_tensors_and_numbers(equal):
    i, several = torch.tensor(1), torch.tensor([0, 2, 2])
    equal(lambda x, i, k: (x[i, :, k], x[k, i], x[k, :, i], x[1, i], x[i][k]), tensor(), i, several)


def test_a_computed_index(equal):
    equal(lambda x, i: x[i - 1] + x[i + 1], tensor(), torch.tensor(1, dtype=torch.int32))


def test_writes_reach_the_tensor_at_once(equal):
    def step(x, i, j, row):
        x[i] = row
        x[i] += 1
        x[j, :, i] = 9
        x[j].mul_(2)
        view = x[i, j]
        view.add_(x[0, 0])
        x[:, j][0] = 5
        return x.sum(0)

    equal(step, tensor(), torch.tensor(2), torch.tensor(-1), torch.ones(6, 3))


def test_a_view_read_after_its_tensor_changed_is_refused():
    def step(x, i):
        view = x[i]
        x.zero_()
        return view + 1

    with pytest.raises(CaptureError, match="values of tensors"):
        capture(Step(step), (tensor(), torch.tensor(1)), bucket="test")


def test_the_value_of_a_scalar_tensor_never_becomes_a_constant():
    scale = torch.tensor(0.3, dtype=torch.float64)
    with pytest.raises(CaptureError, match="reads the value of the tensor"):
        capture(Step(lambda x, s: torch.add(x, x, alpha=s)), (tensor(), scale), bucket="test")


def test_torch_compile_gathers_by_an_index_that_is_an_input():
    compiled = torch.compile(Step(lambda x, i: x[i] * 2), backend="neuron_native", fullgraph=True)
    x = tensor()
    for index in (1, 3, -1):
        assert torch.equal(compiled(x, torch.tensor(index)), x[index] * 2)
