"""Tracing in forked processes: the same as here, and nothing is lost when one of them fails."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tests.pipeline.step_modules import CachedProjection, build, counts, example, make_pipeline
from vllm_neuron import trace_pool
from vllm_neuron.errors import CaptureError, LoweringError
from vllm_neuron.graph_job import GraphSpec
from vllm_neuron.trace_pool import Traced, trace_all

logger = logging.getLogger("vllm_neuron.tests.pipeline")

BATCHES = (2, 4, 8)


@pytest.fixture(autouse=True)
def forks_at_once(monkeypatch):
    monkeypatch.setattr(trace_pool, "WORTH_A_PROCESS_S", 0.0)
    # As on a machine with room for many, whatever this one is.
    monkeypatch.setattr(trace_pool, "fitting_workers", lambda memory, *, most: most)
    before = children()
    yield
    assert children() <= before


def children() -> set[int]:
    """Process ids of the children of this process, other tests' included; ended ones too."""
    return {child.pid for child in psutil.Process().children()}


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def entries(root: Path) -> dict[str, bytes]:
    """Every kept module and NEFF; they hold nothing of the time and the process that made them."""
    folder = root / "compile_cache"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_comes_of_it_is_the_same(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    alone = make_pipeline(tmp_path / "alone")
    expected, _ = build(alone, CachedProjection(), BATCHES)
    caplog.clear()
    forking = make_pipeline(tmp_path / "forking", trace_workers=2)
    graphs, caches = build(forking, CachedProjection(), BATCHES)
    assert counts(forking) == counts(alone)
    assert "Tracing 2 more graphs, 2 at a time" in lines(caplog)
    assert sum(line.startswith("Traced batch") for line in lines(caplog)) == 3
    assert [job.trace for job in forking.jobs] == [job.trace for job in alone.jobs]
    assert [job.premises for job in forking.jobs] == [job.premises for job in alone.jobs]
    assert [job.neff.key for job in forking.jobs] == [job.neff.key for job in alone.jobs]
    assert {name: graphs[name].bucket for name in graphs} == {
        name: expected[name].bucket for name in expected
    }

    rows, slots, memory = example(8)
    eager = CachedProjection()(rows, slots, memory)
    found = graphs["batch8"](rows, slots, caches)
    torch.testing.assert_close(found["rows"], eager["rows"])

    warm = make_pipeline(tmp_path / "forking", trace_workers=2)
    build(warm, CachedProjection(), BATCHES)
    assert counts(warm) == {"traces": 0, "lowerings": 0, "compilations": 0, "graphs": 3}


def specs(step: nn.Module, count: int = 4) -> list[GraphSpec]:
    return [GraphSpec(f"b{n}", step, (torch.zeros(n + 1, 4),)) for n in range(count)]


class InAChild(nn.Module):
    """Does something while it is traced, where the process is not the tests' own."""

    def __init__(self, act) -> None:
        super().__init__()
        self.home = os.getpid()
        self.act = act

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        act_in_a_child(self.home, self.act)
        return rows + 1


@torch.compiler.assume_constant_result
def act_in_a_child(home: int, act) -> int:
    if os.getpid() != home:
        act()
    return 0


def test_a_killed_process_is_replaced_by_this_one(caplog):
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    found = dict(trace_all(specs(InAChild(die)), workers=2, route="native", logger=logger))
    assert sorted(found) == [0, 1, 2, 3]
    assert all(isinstance(item, Traced) for item in found.values())
    assert "b3 is traced again in this process: the tracing process was ended by SIGKILL" in lines(
        caplog
    )


def test_a_process_that_hangs_is_killed(caplog, monkeypatch):
    monkeypatch.setattr(trace_pool, "LEAST_PATIENCE_S", 1.0)
    monkeypatch.setattr(trace_pool, "PATIENCE", 0.0)
    step = InAChild(lambda: time.sleep(300))
    found = dict(trace_all(specs(step, 6), workers=2, route="native", logger=logger))
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert all(isinstance(item, Traced) for item in found.values())
    assert (
        "b5 and what is left are traced in this process: a tracing process gave no answer in 1 s"
        in lines(caplog)
    )


def test_without_memory_for_a_fork_this_process_goes_on(caplog, monkeypatch):
    def fork() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", fork)
    gc.collect()
    before = set(Path("/proc/self/fd").iterdir())
    found = dict(trace_all(specs(PlusOne()), workers=2, route="native", logger=logger))
    assert sorted(found) == [0, 1, 2, 3]
    assert all(isinstance(item, Traced) for item in found.values())
    (line,) = (line for line in lines(caplog) if "forked" in line)
    assert line == (
        "What is left is traced in this process, it cannot be forked: "
        "[Errno 12] Cannot allocate memory"
    )
    # Fewer, where the garbage of another test had some open.
    assert set(Path("/proc/self/fd").iterdir()) <= before


class PlusOne(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1


class Breaking(nn.Module):
    """Is no single graph for rows of one kind."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] == 8 and rows.sum() > 0:
            return rows
        return rows * 2


def test_a_refusal_ends_the_others_and_reads_as_ever(tmp_path):
    def refusal(**options) -> CaptureError:
        pipeline = make_pipeline(tmp_path / str(options), **options)
        with pytest.raises(CaptureError) as caught:
            pipeline.build(
                [GraphSpec(f"b{n}", Breaking(), (torch.zeros(n, 4),)) for n in (1, 8, 2, 3)], {}
            )
        return caught.value

    alone, forking = refusal(), refusal(trace_workers=2)
    assert str(forking) == str(alone)
    assert forking.details == alone.details
    assert forking.source.startswith(__file__)


class Drawing(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.rand_like(rows)


def test_an_operator_that_cannot_be_sent_is_refused_here(tmp_path):
    with pytest.raises(
        LoweringError, match=r"aten\.rand_like\.default.* at .*it draws random numbers"
    ):
        make_pipeline(tmp_path, trace_workers=2).build(specs(Drawing()), {})


class Eigenvalues(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(rows)


def test_an_operator_that_cannot_be_lowered_is_named_with_its_line(tmp_path):
    sizes = (2, 3, 4)
    step = Eigenvalues()
    with pytest.raises(LoweringError) as caught:
        make_pipeline(tmp_path, trace_workers=2, workers=1).build(
            [GraphSpec(f"b{n}", step, (torch.zeros(n, n),)) for n in sizes], {}
        )
    assert "float32[4, 4]" in str(caught.value)
    assert caught.value.source.startswith(__file__)
    assert caught.value.bucket == "b4"


def test_an_interrupted_start_leaves_no_process(monkeypatch):
    answers = trace_all(
        specs(InAChild(lambda: time.sleep(300))), workers=3, route="native", logger=logger
    )
    next(answers)
    signal.signal(signal.SIGALRM, lambda *unused: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    with pytest.raises(KeyboardInterrupt):
        next(answers)


def test_verifying_traces_what_is_known_and_compares(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    build(make_pipeline(tmp_path), CachedProjection())
    verifying = make_pipeline(tmp_path, verifies_traces=True, trace_workers=2)
    build(verifying, CachedProjection())
    assert counts(verifying) == {"traces": 2, "lowerings": 0, "compilations": 0, "graphs": 2}
    assert verifying.counters.trace_hits == 2
    assert "Precompile Cache: 2 of 2 traces verified by tracing again" in lines(caplog)


def test_verifying_believes_the_trace(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    step = CachedProjection()
    build(make_pipeline(tmp_path), step)
    # What the caches believe to be the graph of before, is another one now.
    monkeypatch.setattr("vllm_neuron.cache.precompile._mismatch", lambda *unused: None)
    original = CachedProjection.forward

    def forward(self, rows, slots, caches):
        found = original(self, rows, slots, caches)
        return {"sum": found["sum"] * 3, "rows": found["rows"]}

    monkeypatch.setattr(CachedProjection, "forward", forward)
    pipeline = make_pipeline(tmp_path, verifies_traces=True)
    graphs, caches = build(pipeline, step)
    assert pipeline.counters.discards == 2
    assert "Precompile Cache: 0 of 2 traces verified by tracing again" in lines(caplog)
    assert any(": a new trace differs: graph " in line for line in lines(caplog))
    rows, slots, memory = example(4)
    eager = step(rows, slots, [tuple(torch.zeros_like(part) for part in pair) for pair in memory])
    torch.testing.assert_close(graphs["batch4"](rows, slots, caches)["sum"], eager["sum"])
