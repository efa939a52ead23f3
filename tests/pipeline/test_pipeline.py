"""A start does again only what no cache has: counters, results and log lines of whole pipelines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.pipeline.step_modules import (
    ROWS,
    WIDTH,
    AddInPlace,
    AddOutOfPlace,
    CachedProjection,
    build,
    counts,
    make_pipeline,
)
from vllm_neuron import _core
from vllm_neuron.cache.start_report import read_report, report_path
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.errors import CompileError, ExecutionError, GraphKeyError, NeuronError
from vllm_neuron.pipeline import GraphSpec

NOTHING = {"traces": 0, "lowerings": 0, "compilations": 0, "graphs": 2}
EVERYTHING = {"traces": 2, "lowerings": 2, "compilations": 2, "graphs": 2}
REPOSITORY = Path(__file__).parents[2]


def check_results(graphs, caches) -> None:
    step = CachedProjection()
    expected = [(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))]
    addresses = [tensor.data_ptr() for tensor in caches[0]]
    for batch, slots in ((2, [3, 5]), (4, [1, 3, 15, 0])):
        rows = torch.arange(batch * WIDTH, dtype=torch.float32).reshape(batch, WIDTH) / 7
        right = step(rows, torch.tensor(slots), expected)
        result = graphs[f"batch{batch}"](rows, torch.tensor(slots), caches)
        assert list(result) == ["sum", "rows"]
        torch.testing.assert_close(result["rows"], right["rows"])
        torch.testing.assert_close(result["sum"], right["sum"])
        for tensor, wanted in zip(caches[0], expected[0], strict=True):
            torch.testing.assert_close(tensor.read(), wanted)
    assert [tensor.data_ptr() for tensor in caches[0]] == addresses


def entries(root: Path, kind: str) -> list[Path]:
    folder = root / ("precompile" if kind == "trace" else "compile_cache")
    return [Path(info.path) for info in _core.Store(str(folder)).entries() if info.kind == kind]


def start(root: Path, **options):
    pipeline = make_pipeline(root, **options)
    graphs, caches = build(pipeline, CachedProjection())
    check_results(graphs, caches)
    return pipeline


def test_cold_warm_and_third_start(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert counts(start(tmp_path)) == EVERYTHING
    assert "Precompile Cache: cold, loaded 0 of 2 graphs, traced 2 in" in caplog.text
    for _ in range(2):
        caplog.clear()
        assert counts(start(tmp_path)) == NOTHING
        assert "Precompile Cache: warm, loaded 2 of 2 graphs, traced 0 in 0.0 s" in caplog.text
        assert (
            "Compilation cache: 2 of 2 graphs from the cache, lowered 0 in 0.0 s, compiled 0 in "
            "0.0 s" in caplog.text
        )


def test_without_the_precompile_cache_only_tracing_is_done_again(tmp_path):
    start(tmp_path, precompile=False)
    assert entries(tmp_path, "trace") == []
    again = start(tmp_path, precompile=False)
    assert counts(again) == {**NOTHING, "traces": 2}
    assert again.counters.lowering_hits == 2


@pytest.mark.parametrize(
    ("kind", "redone"),
    [
        ("trace", {"traces": 1, "lowerings": 0, "compilations": 0}),
        ("neff", {"traces": 0, "lowerings": 0, "compilations": 1}),
    ],
)
@pytest.mark.parametrize("damage", ["deleted", "truncated", "empty", "flipped"])
def test_one_lost_entry_is_the_only_thing_done_again(tmp_path, caplog, kind, redone, damage):
    start(tmp_path)
    victim = entries(tmp_path, kind)[0]
    content = victim.read_bytes()
    victim.unlink()
    if damage == "truncated":
        victim.write_bytes(content[:-100])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "flipped":
        changed = bytearray(content)
        changed[len(changed) // 2 // 4096 * 4096 + 1] ^= 1
        victim.write_bytes(bytes(changed))
    if damage != "deleted":
        victim.chmod(0o400)
    caplog.clear()
    assert counts(start(tmp_path)) == {**NOTHING, **redone}
    if damage != "deleted":
        assert any(
            record.levelno == logging.WARNING and victim.name in record.getMessage()
            for record in caplog.records
        )
    assert counts(start(tmp_path)) == NOTHING


def test_compiled_again_from_the_trace_entry_when_the_compilation_cache_is_gone(tmp_path):
    start(tmp_path)
    for kind in ("lowering", "neff"):
        for path in entries(tmp_path, kind):
            path.unlink()
    assert counts(start(tmp_path)) == {**NOTHING, "compilations": 2}


@pytest.mark.parametrize(
    ("change", "expected_counts", "reason"),
    [
        ({"level": 1}, {"compilations": 2, "traces": 2}, "level was 2, is 1"),
        ({"extra": "--auto-cast=all"}, {"compilations": 2, "traces": 2}, "compiler-arguments"),
        (
            {"model": {"class": "other"}},
            {"traces": 2, "compilations": 0},
            "model.class was tests, is other",
        ),
    ],
)
def test_a_changed_factor_is_a_miss_that_says_why(
    tmp_path, caplog, change, expected_counts, reason
):
    """bugs A14."""
    caplog.set_level(logging.INFO)
    start(tmp_path)
    caplog.clear()
    assert counts(start(tmp_path, **change)) == {**NOTHING, **expected_counts}
    assert reason in caplog.text
    report = read_report(report_path(tmp_path))
    assert report["counters"]["compilations"] == expected_counts["compilations"]
    missed = [miss for miss in report["misses"] if miss["kind"] == "trace"]
    assert [miss["bucket"] for miss in missed] == ["batch2", "batch4"]
    assert all(reason in "; ".join(miss["reasons"]) for miss in missed)
    assert counts(start(tmp_path)) == NOTHING, "the entries of the first start are still there"


def test_in_place_and_out_of_place_share_no_entry(tmp_path):
    """bugs A01."""
    args = (torch.ones(3), torch.ones(3))
    for step, kept in ((AddInPlace(), 3.0), (AddOutOfPlace(), 2.0)):
        pipeline = make_pipeline(tmp_path, model={"class": "add"})
        graph = pipeline.build([GraphSpec("add", step, args)], {})["add"]
        one, other = torch.ones(3), torch.full((3,), 2.0)
        assert graph(one, other).tolist() == [3.0] * 3
        assert other.tolist() == [kept] * 3
        assert pipeline.counters.compilations == 1
    assert len(entries(tmp_path, "neff")) == 2


def test_a_shape_without_a_bucket_is_refused(tmp_path):
    pipeline = make_pipeline(tmp_path)
    graphs, caches = build(pipeline, CachedProjection(), batches=(2,))
    with pytest.raises(ExecutionError, match=r"argument rows is float32\[3, 8\], the graph takes"):
        graphs["batch2"](torch.ones(3, WIDTH), torch.zeros(3, dtype=torch.int64), caches)


def test_without_a_cache_everything_is_done_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert counts(start(None)) == EVERYTHING
    assert list(tmp_path.iterdir()) == []


def test_a_neff_that_does_not_load_is_set_aside_and_compiled_once_more(tmp_path, caplog):
    start(tmp_path)
    store = _core.Store(str(tmp_path / "compile_cache"))
    victim = next(info for info in store.entries() if info.kind == "neff")
    entry = store.get("neff", victim.key)
    sections = {name: bytes(entry.section(name)) for name in entry.sections}
    neff = _core.Neff.parse(sections["neff"])
    sections["neff"] = _core.write_neff(
        name="foreign",
        target="elsewhere",
        compiler_version="1",
        inputs=[(t.name, t.dtype, t.shape) for t in neff.inputs],
        outputs=[(t.name, t.dtype, t.shape) for t in neff.outputs],
    )
    store.remove("neff", victim.key)
    assert store.put("neff", victim.key, sections)
    caplog.clear()
    assert counts(start(tmp_path)) == {**NOTHING, "compilations": 1}
    assert "is set aside: it does not load" in caplog.text
    assert counts(start(tmp_path)) == NOTHING


class FailingCompiler(HostCompiler):
    def compile(self, module, *, bucket, **options):
        raise CompileError(
            f"bucket {bucket}: out of memory",
            bucket=bucket,
            command=(),
            exit_code=70,
            log_path=None,
            reason="out of memory",
        )


class JunkCompiler(HostCompiler):
    def compile(self, module, **options):
        return b"no space left on device"


@pytest.mark.parametrize("compiler", [FailingCompiler, JunkCompiler])
def test_a_failed_compilation_is_never_kept(tmp_path, compiler):
    """bugs C07."""
    pipeline = make_pipeline(tmp_path, compiler=compiler())
    with pytest.raises(NeuronError) as caught:
        build(pipeline, CachedProjection())
    report = read_report(report_path(tmp_path))
    assert report["error"] == f"{type(caught.value).__name__}: {caught.value}"
    assert entries(tmp_path, "neff") == []
    assert counts(start(tmp_path))["compilations"] == 2


def test_a_graph_without_a_key_is_served_and_not_kept(tmp_path, caplog, monkeypatch):
    """bugs A11."""

    def refuse(graph_module):
        raise GraphKeyError("node x cannot be keyed", node="x", type_name="X", reason="opaque")

    monkeypatch.setattr("vllm_neuron.trace_pool._core.graph_digest", refuse)
    for compilations in (2, 0):
        counted = counts(start(tmp_path))
        assert counted == {**EVERYTHING, "compilations": compilations}
    assert "batch2 is not cached: node x cannot be keyed" in caplog.text
    assert entries(tmp_path, "trace") == entries(tmp_path, "lowering") == []


def run_start(root: Path, *, module_folder: Path | None = None, seed: str = "random"):
    """Start in a process of its own; returns its counters and what it logged."""
    script = textwrap.dedent(
        """
        import json, logging, sys
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        from pathlib import Path
        from tests.pipeline.step_modules import GraphSpec, build, counts, make_pipeline
        from tests.pipeline.test_pipeline import start
        import torch
        root = Path(sys.argv[1])
        if len(sys.argv) > 2:
            sys.path.insert(0, sys.argv[2])
            import edited_model
            pipeline = make_pipeline(root)
            graph = pipeline.build(
                [GraphSpec("b", edited_model.Step(), (torch.ones(3),))], {})["b"]
            result = graph(torch.ones(3)).tolist()
        else:
            pipeline, result = start(root), None
        heavy = [n for n in ("torch_mlir", "torch._dynamo.convert_frame") if n in sys.modules]
        print(json.dumps({"counts": counts(pipeline), "result": result, "heavy": heavy}))
        """
    )
    command = [sys.executable, "-c", script, str(root)]
    if module_folder is not None:
        command.append(str(module_folder))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: subprocess.Popen[str]):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def test_a_new_process_with_another_hash_seed_is_warm_and_imports_no_tracer(tmp_path):
    """bugs B08, G08, G11."""
    cold, _ = finish(run_start(tmp_path, seed="1"))
    warm, _ = finish(run_start(tmp_path, seed="2"))
    assert cold["counts"] == EVERYTHING
    assert warm["counts"] == NOTHING
    assert warm["heavy"] == []


def test_two_cold_starts_make_the_same_entries(tmp_path):
    """What JAX finds out by compiling again: equal keys stand for equal work.

    XLA:CPU writes machine code that differs from one compilation to the next; all else is equal,
    byte for byte.
    """
    stores = []
    for name in ("first", "second"):
        assert counts(start(tmp_path / name)) == EVERYTHING
        directories = sorted(path.parent for path in (tmp_path / name).rglob("v1"))
        stores.append([_core.Store(str(directory)) for directory in directories])
    compared = 0
    for first, second in zip(*stores, strict=True):
        keys = [(info.kind, info.key) for info in first.entries()]
        assert sorted(keys) == sorted((info.kind, info.key) for info in second.entries())
        for kind, key in keys:
            one, other = first.get(kind, key), second.get(kind, key)
            assert one.sections == other.sections or kind == "neff"
            for section in one.sections:
                if section not in ("neff", "index"):
                    assert one.section(section) == other.section(section), (kind, section)
                    compared += 1
            if kind == "neff":
                neffs = [_core.Neff.parse(entry.section("neff")) for entry in (one, other)]
                for member, _ in neffs[0].members:
                    same = neffs[0].member(member) == neffs[1].member(member)
                    assert same or member == "host/executable.xla", member
    assert compared > 10


def test_several_cold_processes_compile_each_key_once(tmp_path):
    processes = [run_start(tmp_path) for _ in range(3)]
    total = [finish(process)[0]["counts"]["compilations"] for process in processes]
    assert sum(total) == 2


def test_an_edited_model_source_is_a_miss(tmp_path):
    """bugs A13."""
    folder = tmp_path / "models"
    folder.mkdir()
    source = folder / "edited_model.py"
    text = (
        "import torch\n\n\ndef scale(x):\n    return x * 2\n\n\n"
        "class Step(torch.nn.Module):\n    def forward(self, x):\n        return scale(x)\n"
    )
    source.write_text(text)
    old = source.stat()
    cold, _ = finish(run_start(tmp_path / "cache", module_folder=folder))
    warm, _ = finish(run_start(tmp_path / "cache", module_folder=folder))
    source.write_text(text.replace("* 2", "* 3"))
    os.utime(source, ns=(old.st_atime_ns, old.st_mtime_ns))
    edited, log = finish(run_start(tmp_path / "cache", module_folder=folder))
    assert (cold["result"], cold["counts"]["traces"]) == ([2.0] * 3, 1)
    assert (warm["result"], warm["counts"]["traces"]) == ([2.0] * 3, 0)
    assert (edited["result"], edited["counts"]["traces"]) == ([3.0] * 3, 1)
    assert "the source of edited_model changed" in log
    again, _ = finish(run_start(tmp_path / "cache", module_folder=folder))
    assert (again["result"], again["counts"]["traces"]) == ([3.0] * 3, 0)


def test_no_entry_holds_a_pickle_or_a_path_of_this_machine(tmp_path):
    """bugs E08, F04."""
    start(tmp_path)
    for kind in ("trace", "lowering", "neff"):
        for path in entries(tmp_path, kind):
            content = path.read_bytes()
            assert str(tmp_path).encode() not in content
            assert str(REPOSITORY).encode() not in content
            store = _core.Store(str(path.parents[2]))
            entry = store.get(kind, path.name)
            for section in ("record", "factors"):
                json.loads(bytes(entry.section(section)))
