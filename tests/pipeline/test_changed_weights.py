"""Weights that change between the steps of one engine (bugs A20, A22): the next step has them."""

import pytest
import torch
from torch import nn

from tests.pipeline.step_modules import make_pipeline
from tests.stand_ins.compilers import compiler_environment
from tests.stand_ins.runtimes import library_path, runtime_environment
from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler
from vllm_neuron.errors import ExecutionError
from vllm_neuron.pipeline import GraphSpec
from vllm_neuron.runtime.nrt import NrtRuntime
from vllm_neuron.target import TARGETS

ROWS = torch.arange(6.0).reshape(2, 3)


class Tied(nn.Module):
    """Reads two weights, one of them by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(3, 3))
        self.head = self.embedding
        # An address that the emulator cannot share: it copies.
        self.bias = nn.Parameter(torch.arange(4.0)[1:])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.embedding @ self.head + self.bias


@pytest.fixture(params=["host", "device"])
def machine(request, monkeypatch):
    """Compiler and runtime: the host emulator, or the stand-ins of the real ones."""
    if request.param == "host":
        return {}
    for name, value in {**compiler_environment(), **runtime_environment()}.items():
        monkeypatch.setenv(name, value)
    runtime = NrtRuntime(target=TARGETS["trn2"], lnc=2, library=library_path())
    return {"compiler": NeuronxCompiler(target="trn2"), "runtime": runtime}


@pytest.fixture
def started(tmp_path, machine):
    step = Tied()
    pipeline = make_pipeline(tmp_path, **machine)
    graphs = pipeline.build([GraphSpec(name, step, (ROWS,)) for name in ("one", "two")], {})
    return step, pipeline, graphs


def check(step, graphs):
    for graph in graphs.values():
        torch.testing.assert_close(graph(ROWS), step(ROWS).detach())


def test_values_and_parameters_that_change(started):
    step, pipeline, graphs = started
    check(step, graphs)
    with torch.no_grad():
        step.embedding.copy_(torch.eye(3))
        step.bias.data.add_(7)
    pipeline.refresh_weights()
    check(step, graphs)
    step.embedding = step.head = nn.Parameter(torch.full((3, 3), -2.0))
    step.bias = nn.Parameter(torch.full((3,), 5.0))
    assert pipeline.refresh_weights() == 2
    check(step, graphs)


def test_a_weight_that_was_replaced_comes_back(started):
    step, pipeline, graphs = started
    kept, expected = step.embedding, step(ROWS).detach()
    step.embedding = step.head = nn.Parameter(torch.full((3, 3), 4.0))
    pipeline.refresh_weights()
    check(step, graphs)
    step.embedding = step.head = kept
    pipeline.refresh_weights()
    check(step, graphs)
    torch.testing.assert_close(step(ROWS).detach(), expected)


def test_a_model_that_no_longer_fits_is_refused_and_changes_nothing(started):
    step, pipeline, graphs = started
    before = step(ROWS).detach()
    kept = step.bias
    step.bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(ExecutionError, match=r"one: the graph reads the parameter bias as .*, the"):
        pipeline.refresh_weights()
    step.bias = kept
    step.head = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ExecutionError, match=r"the weight head was tied to embedding when"):
        pipeline.refresh_weights()
    for graph in graphs.values():
        torch.testing.assert_close(graph(ROWS), before)
