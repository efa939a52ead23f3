"""Whole pipelines by way of neuronx-cc and libnrt, with both stand-ins: cold, warm, in place."""

import json
from pathlib import Path

import pytest
import torch

from tests.pipeline.step_modules import WIDTH, CachedProjection, build, counts, make_pipeline
from tests.pipeline.test_pipeline import EVERYTHING, NOTHING, check_results
from tests.stand_ins.compilers import compiler_environment
from tests.stand_ins.runtimes import Counters, library_path, runtime_environment
from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler
from vllm_neuron.compiler.neuronx_failures import Outcome
from vllm_neuron.errors import CompileError
from vllm_neuron.runtime.nrt import NrtRuntime
from vllm_neuron.target import TARGETS


@pytest.fixture
def device(monkeypatch, tmp_path):
    """Compiler and runtime; the runtime of a process is initialised once."""
    settings = {
        **compiler_environment(STAND_IN_CC_CALLS=str(tmp_path / "calls")),
        **runtime_environment(),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    runtime = NrtRuntime(target=TARGETS["trn2"], lnc=2, library=library_path())
    return {"compiler": NeuronxCompiler(target="trn2"), "runtime": runtime}


def start(root, device):
    pipeline = make_pipeline(root, **device)
    graphs, caches = build(pipeline, CachedProjection())
    check_results(graphs, caches)
    return pipeline


def test_cold_and_warm(tmp_path, device):
    counters = Counters(library_path())
    executed = counters["nrt_execute"]
    assert counts(start(tmp_path, device)) == EVERYTHING
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call["arguments"][:2] for call in calls] == [["compile", "module.mlir"]] * 2
    assert counts(start(tmp_path, device)) == NOTHING
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert counters["nrt_execute"] == executed + 4


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_refresh_reaches_the_device(tmp_path, device, where):
    """LoRA adapters are loaded into weights of graphs that run."""
    step = CachedProjection()
    pipeline = make_pipeline(tmp_path, **(device if where == "device" else {}))
    graphs, caches = build(pipeline, step)
    rows, slots = torch.ones(2, WIDTH), torch.tensor([1, 2])
    before = graphs["batch2"](rows, slots, caches)["rows"]
    torch.testing.assert_close(before, rows @ step.weight.detach() / 2)
    step.weight.data.mul_(3)
    # Also a tensor that no graph has.
    pipeline.refresh([step.weight, torch.ones(WIDTH)])
    torch.testing.assert_close(graphs["batch2"](rows, slots, caches)["rows"], 3 * before)
    assert counts(pipeline)["traces"] == 2


def test_a_failure_of_the_compiler_is_kept_nowhere(tmp_path, device, monkeypatch):
    monkeypatch.setenv("STAND_IN_CC_FAILURE", "abort")
    with pytest.raises(CompileError) as caught:
        start(tmp_path, device)
    assert caught.value.outcome is Outcome.ABORTED
    assert Path(caught.value.work_folder).is_dir()
    monkeypatch.delenv("STAND_IN_CC_FAILURE")
    # A compiler whose pipeline failed is stopped.
    again = counts(start(tmp_path, {**device, "compiler": NeuronxCompiler(target="trn2")}))
    assert again["compilations"] == 2
