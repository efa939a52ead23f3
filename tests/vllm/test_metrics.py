"""Metrics: what a pipeline leaves, what a worker counts, and what Prometheus reads."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from tests.pipeline.step_modules import CachedProjection, build, make_pipeline
from vllm_neuron.vllm.metrics import (
    NeuronCollector,
    count_steps,
    samples_of,
    worker_samples,
    write_samples,
)

START = SimpleNamespace(
    route=SimpleNamespace(
        route=SimpleNamespace(value="native"), reason="VLLM_NEURON_BACKEND=neuron"
    )
)


def metrics(directory) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(NeuronCollector(str(directory)))
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


def test_what_a_worker_knows_of_its_start(tmp_path):
    pipeline = make_pipeline(tmp_path / "a")
    build(pipeline, CachedProjection())
    samples = worker_samples(pipeline, model_name="m", startup_s=9.5, load_s=1.5, model_bytes=4096)
    write_samples(str(tmp_path), 0, samples)
    found = metrics(tmp_path)
    ready = {
        bucket: found.pop(
            f'vllm_neuron:compilation_time_seconds{{bucket_name="{bucket}",model_name="m"}}'
        )
        for bucket in ("batch2", "batch4")
    }
    done = pipeline.counters
    work = done.trace_s + done.lower_s + done.compile_s + done.load_s
    assert abs(sum(ready.values()) - work) < 1e-9
    assert found == {
        'vllm_neuron:startup_time_seconds{model_name="m"}': 9.5,
        'vllm_neuron:model_load_time_seconds{model_name="m"}': 1.5,
        'vllm_neuron:model_load_size_bytes{model_name="m"}': 4096.0,
    }


def test_steps_and_their_padding_are_counted_at_once(tmp_path):
    buckets = ["prefill_s128", "decode_b8"]
    ranks = [count_steps(str(tmp_path), rank, model_name="m", buckets=buckets) for rank in range(2)]
    for padding in (0, 1, 2, 7, 129):
        ranks[0].count("decode_b8", padding)
    ranks[1].count("decode_b8", 2)
    ranks[0].count("prefill_s128", 100)
    found = metrics(tmp_path)
    seqs = 'vllm_neuron:num_seqs_padding_%s{bucket_name="decode_b8",%smodel_name="m"}'
    below = {"1.0": 2, "2.0": 4, "4.0": 4, "8.0": 5, "16.0": 5, "64.0": 5, "128.0": 5, "+Inf": 6}
    assert {bound: found[seqs % ("bucket", f'le="{bound}",')] for bound in below} == below
    assert (found[seqs % ("sum", "")], found[seqs % ("count", "")]) == (141.0, 6.0)
    tokens = 'vllm_neuron:num_batched_tokens_padding_bucket{bucket_name="prefill_s128",le="%s",%s'
    bounds = [2.0**power for power in range(5, 15)]
    assert [found[tokens % (bound, 'model_name="m"}')] for bound in bounds] == [0, 0] + [1] * 8
    runs = 'vllm_neuron:neff_execution_count_total{bucket_name="%s",model_name="m"}'
    assert [found[runs % bucket] for bucket in buckets] == [1.0, 6.0]
    # A start that replaces its file begins at 0; a file of other buckets is not read.
    count_steps(str(tmp_path), 1, model_name="m", buckets=buckets)
    assert metrics(tmp_path)[runs % "decode_b8"] == 5.0
    (tmp_path / "steps1").write_bytes(bytes(8))
    assert metrics(tmp_path)[runs % "decode_b8"] == 5.0


def test_steps_without_a_directory_cost_the_metrics_only(tmp_path, caplog):
    assert count_steps(str(tmp_path / "a" / "b"), 0, model_name="m", buckets=["decode_b1"]) is None
    assert "The steps of the server are not in /metrics" in caplog.text
