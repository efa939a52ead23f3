"""CPU compile: every graph of a configuration into the caches, on a machine that serves nothing.

`VLLM_NEURON_CPU_COMPILE=1 vllm serve MODEL ...` builds the engine of that command without weights,
compiles, prints a table and ends. The keys are those that the serving start asks for, since the
same code makes the same steps out of the same configuration.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_neuron.errors import NeuronError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_neuron.graph_job import GraphJob
    from vllm_neuron.pipeline import Pipeline

__all__ = ["model_without_weights", "run", "table"]

logger = logging.getLogger(__name__)

_COLUMNS = ("BUCKET", "KEY", "SECONDS", "SIZE", "RESULT")


class _WeightlessLoader(BaseModelLoader):
    """Makes a model whose parameters nobody writes, so that they take no memory."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: there is nothing to load."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Does nothing."""
        logger.info("CPU Compilation is enabled. Skipping full weight loading.")


def model_without_weights(*, vllm_config: VllmConfig) -> torch.nn.Module:
    """Returns the model of a configuration; its parameters have no values."""
    loader = _WeightlessLoader(vllm_config.load_config)
    return loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)


def run(vllm_config: VllmConfig) -> int:
    """Compile every graph of a configuration and print a table.

    Returns:
        The exit status: 0 if every graph is in the caches, 1 if one is not.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    try:
        engine = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except NeuronError as error:
        # Concerns no single graph; the worker has logged it.
        print(f"Nothing was compiled: {error}", file=sys.stderr)
        return 1
    execution = engine.model_executor.driver_worker.worker.model_runner.execution
    pipeline: Pipeline = execution.pipeline
    kept = [job for job in pipeline.jobs if pipeline.is_kept(job)]
    print(table(pipeline.jobs, kept, pipeline.counters.phases), flush=True)
    engine.shutdown()
    return 0 if len(kept) == len(pipeline.jobs) else 1


def table(
    jobs: Sequence[GraphJob],
    kept: Sequence[GraphJob],
    phases: dict[tuple[str, str], float],
) -> str:
    """Returns a line per graph: bucket, NEFF key, seconds of work, bytes, what became of it."""
    rows = [_COLUMNS]
    for job in jobs:
        bucket = job.spec.bucket
        seconds = sum(spent for (name, _), spent in phases.items() if name == bucket)
        neff = job.neff
        if job.failure is not None:
            result = f"failed: {job.failure}".splitlines()[0]
        elif job not in kept:
            result = "not kept by the cache"
        else:
            result = "from the cache" if neff is not None and neff.hit else "compiled"
        rows.append(
            (
                bucket,
                neff.key.short if neff is not None else "-",
                f"{seconds:.1f}",
                str(len(neff.data)) if neff is not None else "-",
                result,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append(f"{len(kept)} of {len(jobs)} graphs are in the caches")
    return "\n".join(lines)
