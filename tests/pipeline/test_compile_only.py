"""CPU compile at the pipeline: everything is made and kept, nothing is loaded."""

from __future__ import annotations

import torch
from torch import nn

from tests.pipeline.step_modules import CachedProjection, counts, example, make_pipeline
from tests.pipeline.test_pipeline import EVERYTHING, NOTHING, entries, start
from tests.stand_ins.compilers import compiler_environment
from vllm_neuron import _core
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler
from vllm_neuron.errors import CompileError
from vllm_neuron.pipeline import GraphSpec
from vllm_neuron.vllm.cpu_compile import table


def compile_only(root, *, batches=(2, 4), **options):
    pipeline = make_pipeline(root, compile_only=True, **options)
    step = CachedProjection()
    specs = [GraphSpec(f"batch{size}", step, example(size)) for size in batches]
    assert pipeline.build(specs, {}) == {}
    return pipeline


def test_a_serving_start_does_nothing_again_t10(tmp_path):
    """bugs B17: what CPU compile fills is what the server asks for."""
    assert counts(compile_only(tmp_path)) == EVERYTHING
    assert counts(start(tmp_path)) == NOTHING
    again = compile_only(tmp_path)
    assert counts(again) == NOTHING
    text = table(again.jobs, again.jobs, again.counters.phases).splitlines()
    assert [line.split()[0] for line in text[:-1]] == ["BUCKET", "batch2", "batch4"]
    assert all(line.endswith("from the cache") for line in text[1:-1])
    assert text[-1] == "2 of 2 graphs are in the caches"


def test_for_a_neuron_target_by_the_compiler_of_that_target(tmp_path, monkeypatch):
    for name, value in compiler_environment(STAND_IN_CC_CALLS=str(tmp_path / "calls")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)

    def compiler():
        return NeuronxCompiler(target="trn2", work_root=tmp_path / "work")

    first = compile_only(tmp_path, batches=(2,), compiler=compiler())
    assert first.counters.compilations == 1
    assert all(first.is_kept(job) for job in first.jobs)
    (path,) = entries(tmp_path, "neff")
    neff = _core.Store(str(tmp_path / "compile_cache")).get("neff", path.name)
    assert _core.Neff.parse(neff.section("neff")).target == "stand-in-cayman"
    second = compile_only(tmp_path, batches=(2,), compiler=compiler())
    assert (second.counters.traces, second.counters.compilations) == (0, 0)
    # The host emulator's keys are others.
    assert compile_only(tmp_path, batches=(2,)).counters.compilations == 1


class PickyCompiler(HostCompiler):
    def compile(self, module, *, bucket, **options):
        if bucket == "batch4":
            raise CompileError(
                "bucket batch4: too large",
                bucket=bucket,
                command=None,
                exit_code=70,
                log_path=None,
                reason="too large",
            )
        return super().compile(module, bucket=bucket, **options)


class Breaking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


def test_a_graph_that_fails_does_not_keep_the_others_from_being_compiled(tmp_path):
    pipeline = make_pipeline(tmp_path, compile_only=True, compiler=PickyCompiler())
    step = CachedProjection()
    specs = [GraphSpec(f"batch{size}", step, example(size)) for size in (4, 2)]
    specs.append(GraphSpec("breaks", Breaking(), (torch.ones(3),)))
    pipeline.build(specs, {})
    kept = [job for job in pipeline.jobs if pipeline.is_kept(job)]
    assert [job.spec.bucket for job in kept] == ["batch2"]
    lines = table(pipeline.jobs, kept, pipeline.counters.phases).splitlines()
    assert lines[1].startswith("batch4")
    assert lines[1].endswith("failed: bucket batch4: too large")
    assert lines[2].endswith("compiled")
    assert "failed: " in lines[3]
    assert lines[-1] == "1 of 3 graphs are in the caches"


def test_a_cache_that_takes_nothing_is_said(tmp_path):
    (tmp_path / "compile_cache").write_text("a file")
    pipeline = compile_only(tmp_path, batches=(2,))
    assert not any(pipeline.is_kept(job) for job in pipeline.jobs)
    lines = table(pipeline.jobs, [], pipeline.counters.phases).splitlines()
    assert lines[1].endswith("not kept by the cache")
