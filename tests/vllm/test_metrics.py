"""Metrics of a start: what a pipeline leaves and what Prometheus reads."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from tests.pipeline.step_modules import CachedProjection, build, make_pipeline
from vllm_neuron.vllm.metrics import StartCollector, samples_of, write_samples

START = SimpleNamespace(
    route=SimpleNamespace(
        route=SimpleNamespace(value="native"), reason="VLLM_NEURON_BACKEND=neuron"
    )
)


def metrics(directory) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(StartCollector(str(directory)))
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def test_a_cold_start_a_warm_one_and_one_from_the_remote_cache(tmp_path):
    found = []
    for number, root in enumerate(("a", "a", "b")):
        pipeline = make_pipeline(tmp_path / root, remote=tmp_path / "remote", promotes=True)
        build(pipeline, CachedProjection())
        place = tmp_path / str(number)
        write_samples(str(place), 0, samples_of(START, pipeline))
        found.append(metrics(place))
    cold, warm, fetched = found
    route = 'vllm_neuron:route_info{reason="VLLM_NEURON_BACKEND=neuron",route="native"}'
    assert [one[route] for one in found] == [1.0] * 3
    requests = 'vllm_neuron:compile_cache_requests_total{result="%s",route="native",tier="%s"}'
    assert requests % ("hit", "local") not in cold
    assert warm[requests % ("hit", "local")] == 2
    assert requests % ("miss", "local") not in warm
    assert fetched[requests % ("hit", "remote")] == 2
    traces = 'vllm_neuron:precompile_cache_requests_total{result="%s"}'
    assert [(one[traces % "hit"], one[traces % "miss"]) for one in found] == [
        (0, 2),
        (2, 0),
        (2, 0),
    ]
    for phase, expected in (
        ("trace", (True, False, False)),
        ("lower", (True, False, False)),
        ("compile", (True, False, False)),
        ("load", (True, True, True)),
    ):
        name = f'vllm_neuron:compile_seconds{{bucket="batch4",phase="{phase}"}}'
        assert tuple(name in one for one in found) == expected
        assert all(one.get(name, 1) > 0 for one in found)
    size = 'vllm_neuron:compile_cache_bytes{tier="local"}'
    files = (tmp_path / "a" / "compile_cache" / "v1").glob("??/*")
    assert cold[size] == sum(path.stat().st_size for path in files)
    assert cold["vllm_neuron:compile_cache_wait_seconds"] == 0


def test_counters_of_ranks_are_added_and_gauges_are_the_largest(tmp_path):
    labels = {"result": "hit"}
    for rank, (count, seconds) in enumerate(((2, 1.5), (3, 0.5))):
        samples = [
            ("precompile_cache_requests", labels, count),
            ("compile_cache_wait_seconds", {}, seconds),
        ]
        write_samples(str(tmp_path), rank, samples)
    assert metrics(tmp_path) == {
        'vllm_neuron:precompile_cache_requests_total{result="hit"}': 5.0,
        "vllm_neuron:compile_cache_wait_seconds": 1.5,
    }


def test_a_directory_that_is_gone_costs_the_metrics_only(tmp_path, caplog):
    write_samples(str(tmp_path / "gone" / "start"), 0, [("compile_cache_wait_seconds", {}, 1.0)])
    assert "The metrics of the start are not in /metrics" in caplog.text
    assert metrics(tmp_path / "gone" / "start") == {}
