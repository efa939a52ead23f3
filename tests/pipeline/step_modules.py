"""Steps for the pipeline's tests, and a pipeline on the host emulator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_neuron.cache.compilation import CompilationCache
from vllm_neuron.cache.precompile import PrecompileCache
from vllm_neuron.cache.start_report import report_path
from vllm_neuron.cache.tiers import Tiers
from vllm_neuron.compiler.arguments import HOST_TARGET, compiler_arguments
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.lowering.native import NativeLowering
from vllm_neuron.pipeline import GraphSpec, Pipeline
from vllm_neuron.runtime.host import HostRuntime

logger = logging.getLogger("vllm_neuron.tests.pipeline")

ROWS, WIDTH = 16, 8


class CachedProjection(nn.Module):
    """Projects rows, writes them into a cache, and returns sums over the cache."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(
        self, rows: torch.Tensor, slots: torch.Tensor, caches: list[tuple[torch.Tensor, ...]]
    ) -> dict[str, torch.Tensor]:
        keys, values = caches[0]
        projected = rows @ self.weight * self.scale
        keys.index_copy_(0, slots, projected)
        values.index_copy_(0, slots, projected + 1)
        return {"sum": (keys + values).sum(-1), "rows": projected}


class AddInPlace(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other.add_(one)


class AddOutOfPlace(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other + one


def example(batch: int) -> tuple[Any, ...]:
    return (
        torch.empty(batch, WIDTH),
        torch.zeros(batch, dtype=torch.int64),
        [(torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH))],
    )


def make_pipeline(
    root: Path | None,
    *,
    level: int = 2,
    extra: str | None = None,
    precompile: bool = True,
    model: dict[str, Any] | None = None,
    compiler: Any = None,
    compile_only: bool = False,
    runtime: Any = None,
    remote: Path | None = None,
    artifacts: Path | None = None,
    promotes: bool = False,
    strict: str | None = None,
    timeout_s: float = 600,
    workers: int = 2,
    one_by_one: bool = False,
    trace_workers: int = 1,
    verifies_traces: bool = False,
    max_size_bytes: int | None = None,
) -> Pipeline:
    def tiers(folder: str, name: str) -> Tiers:
        return Tiers(
            root / folder,
            name=name,
            logger=logger,
            remote=remote,
            artifacts=artifacts,
            promotes=promotes,
            max_size_bytes=max_size_bytes,
        )

    target = compiler.target if compiler is not None else HOST_TARGET
    arguments = compiler_arguments(level, extra=extra, target=target)
    return Pipeline(
        route="native",
        level=level,
        arguments=arguments.arguments,
        key_arguments=arguments.key_arguments,
        lowering=NativeLowering(),
        compiler=compiler or HostCompiler(),
        runtime=None if compile_only else runtime or HostRuntime(),
        precompile=PrecompileCache(tiers("precompile", "Precompile Cache"), logger=logger)
        if precompile and root
        else None,
        compilation=CompilationCache(
            tiers("compile_cache", "Compilation cache") if root else None,
            logger=logger,
            timeout_s=timeout_s,
            strict=strict,
        ),
        model=model or {"class": "tests"},
        describe={"model": "tests"},
        workers=workers,
        logger=logger,
        report=report_path(root) if root else None,
        one_by_one=one_by_one,
        trace_workers=trace_workers,
        verifies_traces=verifies_traces,
    )


def build(pipeline: Pipeline, step: nn.Module, batches: tuple[int, ...] = (2, 4)) -> Any:
    """Build a graph per batch size; returns the graphs and the cache's device tensors."""
    runtime = pipeline._runtime
    caches = [
        (runtime.allocate((ROWS, WIDTH), "float32"), runtime.allocate((ROWS, WIDTH), "float32"))
    ]
    tensors = {f"caches[0][{part}]": caches[0][part] for part in (0, 1)}
    specs = [GraphSpec(f"batch{size}", step, example(size)) for size in batches]
    return pipeline.build(specs, tensors), caches


def counts(pipeline: Pipeline) -> dict[str, int]:
    done = pipeline.counters
    return {
        "traces": done.traces,
        "lowerings": done.lowerings,
        "compilations": done.compilations,
        "graphs": done.graphs,
    }
