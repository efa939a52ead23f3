"""The plugin's metrics in the server's `/metrics` (docs/reference-metrics.md).

A worker, which is another process than the one that answers `/metrics`, writes what its start did
as one file into a directory that its start record names, and counts its steps in a second one
(`vllm.step_metrics`); the front-end's collector reads the files whenever it is asked. Counters are
added up over the files of the ranks, of gauges the largest counts.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from vllm_neuron.cache.tiers import Tiers
    from vllm_neuron.pipeline import Pipeline
    from vllm_neuron.route import StartRecord
    from vllm_neuron.vllm.step_metrics import Histogram, StepCounters

__all__ = [
    "NeuronCollector",
    "count_steps",
    "directory_of_start",
    "install",
    "samples_of",
    "worker_samples",
    "write_samples",
]

logger = logging.getLogger(__name__)

PREFIX = "vllm_neuron:"

#: Type and meaning of each metric, by its name without prefix. A counter's samples have the suffix
#: `_total`.
_FAMILIES = {
    "route_info": ("gauge", "The compilation route of the server and why."),
    "compile_cache_requests": ("counter", "Look-ups in the compilation cache."),
    "precompile_cache_requests": ("counter", "Look-ups of traces in the Precompile Cache."),
    "compile_seconds": ("gauge", "Seconds of work on a graph at start-up."),
    "compile_cache_bytes": ("gauge", "Bytes of the compilation cache's entries after the start."),
    "compile_cache_wait_seconds": ("gauge", "Seconds that the start waited for other processes."),
    "startup_time_seconds": ("gauge", "Seconds from the worker's beginning to the end of warm-up."),
    "compilation_time_seconds": ("gauge", "Seconds that a graph took to be ready to run."),
    "model_load_time_seconds": ("gauge", "Seconds that the weights took to load."),
    "model_load_size_bytes": ("gauge", "Bytes of the weights."),
    "neff_execution_count": ("counter", "Steps that ran the graph of a bucket."),
    "num_seqs_padding": ("histogram", "Sequences that a decode step was padded with."),
    "num_batched_tokens_padding": ("histogram", "Tokens that a prefill step was padded with."),
}

Sample = tuple[str, dict[str, str], float]


def directory_of_start() -> str:
    """Name the directory of one start; the first worker that has metrics makes it."""
    return str(Path(tempfile.gettempdir()) / f"vllm_neuron_prometheus_{uuid.uuid4().hex}")


def samples_of(start: StartRecord, pipeline: Pipeline) -> list[Sample]:
    """What is known of a start after its graphs were built."""
    route = start.route.route.value
    samples: list[Sample] = [("route_info", {"route": route, "reason": start.route.reason}, 1.0)]
    compilation, precompile = pipeline.tiers()
    if compilation is not None:
        samples += [
            ("compile_cache_requests", {"tier": tier, "result": result, "route": route}, count)
            for (tier, result), count in compilation.requests.items()
        ]
        samples += [
            ("compile_cache_bytes", {"tier": tier}, size) for tier, size in _sizes(compilation)
        ]
        samples.append(("compile_cache_wait_seconds", {}, pipeline.waited_s()))
    if precompile is not None:
        done = pipeline.counters
        samples += [
            ("precompile_cache_requests", {"result": "hit"}, done.trace_hits),
            ("precompile_cache_requests", {"result": "miss"}, done.graphs - done.trace_hits),
        ]
    samples += [
        ("compile_seconds", {"bucket": bucket, "phase": phase}, seconds)
        for (bucket, phase), seconds in pipeline.counters.phases.items()
    ]
    return samples


def _sizes(tiers: Tiers) -> Iterator[tuple[str, float]]:
    for tier, root in tiers.directories().items():
        # Somebody else's, and listing a network file system takes long.
        if tier != "remote":
            yield tier, sum(_size(path) for path in root.glob("v1/??/*"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # Removed meanwhile.
        return 0


def worker_samples(
    pipeline: Pipeline, *, model_name: str, startup_s: float, load_s: float, model_bytes: int
) -> list[Sample]:
    """What a worker knows of its start besides its caches."""
    ready: dict[str, float] = {}
    for (bucket, _), seconds in pipeline.counters.phases.items():
        ready[bucket] = ready.get(bucket, 0.0) + seconds
    model = {"model_name": model_name}
    return [
        ("startup_time_seconds", model, startup_s),
        ("model_load_time_seconds", model, load_s),
        ("model_load_size_bytes", model, model_bytes),
        *(
            ("compilation_time_seconds", {**model, "bucket_name": bucket}, seconds)
            for bucket, seconds in ready.items()
        ),
    ]


def count_steps(
    directory: str, rank: int, *, model_name: str, buckets: Sequence[str]
) -> StepCounters | None:
    """Begin to count the steps of a rank; None where the directory takes no file."""
    from vllm_neuron.vllm.step_metrics import StepCounters

    path = Path(directory) / f"steps{rank}"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        counters = StepCounters(path, buckets)
        path.with_suffix(".json").write_text(
            json.dumps({"model_name": model_name, "buckets": list(buckets)})
        )
    except OSError as error:
        logger.warning("The steps of the server are not in /metrics: %s", error)
        return None
    return counters


def write_samples(directory: str, rank: int, samples: Iterable[Sample]) -> None:
    """Write the file of one rank. A directory that is gone, or full, costs the metrics only."""
    path = Path(directory) / f"rank{rank}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.write_text(json.dumps(list(samples)))
        temporary.replace(path)
    except OSError as error:
        logger.warning("The metrics of the start are not in /metrics: %s", error)


class NeuronCollector:
    """Reads the files of the ranks whenever Prometheus asks.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def collect(self) -> Iterator[Any]:
        """Yields one metric family per name."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        merged: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for name, labels, value in self._samples():
            values = merged.setdefault(name, {})
            key = tuple(sorted(labels.items()))
            if _FAMILIES[name][0] == "counter":
                values[key] = values.get(key, 0.0) + value
            else:
                values[key] = max(values.get(key, value), value)
        for name, values in merged.items():
            kind, meaning = _FAMILIES[name]
            names = [label for label, _ in next(iter(values))]
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(PREFIX + name, meaning, labels=names)
            for key, value in values.items():
                family.add_metric([text for _, text in key], value)
            yield family
        yield from self._steps()

    def _samples(self) -> Iterator[Sample]:
        for path in sorted(self._directory.glob("rank*.json")):
            yield from json.loads(path.read_text())

    def _steps(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        from vllm_neuron.vllm.step_metrics import read_steps

        found: dict[tuple[str, str], Histogram] = {}
        for path in sorted(self._directory.glob("steps*.json")):
            about = json.loads(path.read_text())
            for steps in read_steps(path.with_suffix(""), about["buckets"]):
                key = (about["model_name"], steps.bucket)
                found[key] = found[key] + steps if key in found else steps
        families: dict[str, Any] = {}
        labels = ["model_name", "bucket_name"]
        for key, steps in found.items():
            for name, make in (
                ("neff_execution_count", CounterMetricFamily),
                (steps.metric, HistogramMetricFamily),
            ):
                if name not in families:
                    families[name] = make(PREFIX + name, _FAMILIES[name][1], labels=labels)
            families["neff_execution_count"].add_metric(key, steps.executions)
            families[steps.metric].add_metric(key, steps.labelled_counts(), steps.total)
        yield from families.values()


@cache
def install(directory: str) -> None:
    """Add the plugin's metrics to what this process answers with; removed when it ends."""
    import vllm.v1.metrics.prometheus as vllm_prometheus
    from prometheus_client import REGISTRY

    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits this function, not the directory.
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    collector = NeuronCollector(directory)
    REGISTRY.register(collector)
    original = vllm_prometheus.get_prometheus_registry

    def get_prometheus_registry() -> CollectorRegistry:
        # With several API servers vLLM answers with a registry of its own.
        registry = original()
        if registry is not REGISTRY:
            registry.register(collector)
        return registry

    vllm_prometheus.get_prometheus_registry = get_prometheus_registry
