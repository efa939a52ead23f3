"""Faults that users of other caches reported, each named by its id; the right result is asserted.

Rows that another test covers have their id in that test's name or docstring. Two have none: D05
(ranks that load different NEFFs) needs several ranks, which this version does not have, and G02
(runtime and driver out of step) a driver, which the stand-in of libnrt does not have.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.flight_process import MODULE
from tests.pipeline.step_modules import make_pipeline
from vllm_neuron import _core
from vllm_neuron.binding import describe_tensors, module_state, signature
from vllm_neuron.cache import keys
from vllm_neuron.cache.compilation import CompilationCache
from vllm_neuron.cache.tiers import Tiers
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.pipeline import GraphSpec
from vllm_neuron.runtime.host import HostRuntime

PACKAGE = Path(__file__).parents[2] / "python" / "vllm_neuron"
logger = logging.getLogger("vllm_neuron.tests.bugs")


def run(root: Path, step: nn.Module, *args: torch.Tensor, bucket: str = "b", **options: Any):
    """One start; its result must be eager's. Returns counters."""
    args = args or (torch.arange(6.0).reshape(2, 3),)
    pipeline = make_pipeline(root, **options)
    result = pipeline.build([GraphSpec(bucket, step, args)], {})[bucket](*args)
    expected = step(*args)
    for one, right in zip(
        result if isinstance(result, tuple) else (result,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(one, right.detach())
        else:
            assert one == right
    return pipeline.counters


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("v1/??/*"))


# --- A: an entry that was made for something else ------------------------------------------------


class Draft(nn.Module):
    """Scores `count` draft tokens; neither weights nor arguments show the number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.count, 1).sum(0)


class Scaled(nn.Module):
    """What it does is in an object, as a configuration is."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.config["kind"] == "double" else x * 3
        return x + 1 if self.config.get("unknown") else x


PAIRS = {
    "A02 number of speculative tokens": lambda: (Draft(3), Draft(4)),
    "A05 bias": lambda: (nn.Linear(3, 3), nn.Linear(3, 3, bias=False)),
    "A08 text of the configuration": lambda: (Scaled(kind="double"), Scaled(kind="triple")),
    "A08 unknown field": lambda: (Scaled(kind="double"), Scaled(kind="double", unknown=1)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_modules_of_equal_shapes_share_nothing(tmp_path, pair, order):
    steps = pair()
    for index in order:
        assert run(tmp_path, steps[index]).compilations == 1


class Wrapped(nn.Module):
    """A layer as LoRA wraps it: the weight has another name."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x)


class Step(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_wrapped_layer_is_traced_again_and_compiled_no_more_a04(tmp_path):
    layer = nn.Linear(3, 3)
    assert run(tmp_path, Step(layer)).traces == 1
    counters = run(tmp_path, Step(Wrapped(layer)))
    # The graph is the same one, so its NEFF is.
    assert (counters.traces, counters.compilations) == (1, 0)


def test_equal_flags_in_another_form_are_one_entry_a14(tmp_path):
    step = nn.Linear(3, 3)
    assert run(tmp_path, step, extra="--alpha=1   --beta=2").compilations == 1
    assert run(tmp_path, step, extra="  --beta=2 --alpha=1").compilations == 0
    assert run(tmp_path, step, extra="--alpha=1 --beta=3").compilations == 1


def test_an_entry_says_what_it_was_made_for_and_is_held_against_it_a16(tmp_path):
    """The content of another key, put where this key is looked for: a miss with a WARNING."""
    one, other = (tmp_path / name for name in ("one", "other"))
    assert run(one, Draft(2)).traces == 1
    assert run(other, Draft(3)).traces == 1
    for folder in ("precompile", "compile_cache"):
        targets = sorted((one / folder).glob("v1/??/*"))
        sources = sorted((other / folder).glob("v1/??/*"))
        for target, source in zip(targets, sources, strict=True):
            target.chmod(0o600)
            target.write_bytes(source.read_bytes())
            target.chmod(0o400)
    assert run(one, Draft(2)).traces == 1
    assert run(one, Draft(2)).traces == 0


def module_file(folder: Path, name: str, factor: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n"
        f"    def forward(self, x):\n        return x * {factor}\n"
    )


def imported(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return importlib.import_module(name).Model()


def test_two_checkouts_share_what_is_equal_and_nothing_else_a19_b22(tmp_path, monkeypatch):
    """A19: another content at the same relative path. B22: equal content at another place."""
    for place, factor in (("first", 2), ("second", 3), ("third", 2)):
        module_file(tmp_path / place, "checkout", factor)
    cache = tmp_path / "cache"
    first = imported(tmp_path / "first", "checkout", monkeypatch)
    assert run(cache, first).traces == 1
    third = imported(tmp_path / "third", "checkout", monkeypatch)
    assert run(cache, third).traces == 0
    second = imported(tmp_path / "second", "checkout", monkeypatch)
    assert run(cache, second).traces == 1


def test_a_model_imported_under_another_name_is_traced_again_g10(tmp_path, monkeypatch):
    module_file(tmp_path / "models", "one_name", 2)
    module_file(tmp_path / "models", "other_name", 2)
    assert run(tmp_path, imported(tmp_path / "models", "one_name", monkeypatch)).traces == 1
    counters = run(tmp_path, imported(tmp_path / "models", "other_name", monkeypatch))
    assert (counters.traces, counters.compilations) == (1, 0)


def test_weights_are_never_in_an_entry_a20_a22(tmp_path):
    """The next start, with other weights, uses the same entries and its own numbers."""
    step = nn.Linear(3, 3)
    assert run(tmp_path, step).compilations == 1
    before = files(tmp_path)
    with torch.no_grad():
        step.load_state_dict({"weight": torch.full((3, 3), 7.0), "bias": torch.ones(3)})
    assert run(tmp_path, step).traces == 0
    step.weight = nn.Parameter(torch.full((3, 3), -1.0))
    assert run(tmp_path, step).traces == 0
    assert files(tmp_path) == before


def test_an_entry_without_its_graph_is_no_hit_a23(tmp_path, caplog):
    assert run(tmp_path, Draft(2)).compilations == 1
    store = _core.Store(str(tmp_path / "compile_cache"))
    info = next(info for info in store.entries() if info.kind == "neff")
    entry = store.get("neff", info.key)
    kept = {"record": bytes(entry.section("record"))}
    store.remove("neff", info.key)
    assert store.put("neff", info.key, kept)
    assert run(tmp_path, Draft(2)).compilations == 1
    assert f"the neff entry {info.key[:32]} is set aside: it has no NEFF section" in caplog.text
    assert run(tmp_path, Draft(2)).compilations == 0


# --- B: the same work done again -----------------------------------------------------------------


def test_entries_do_not_grow_from_start_to_start_b04_b10_h05(tmp_path, monkeypatch):
    assert run(tmp_path, Draft(2)).traces == 1
    before = files(tmp_path)
    for number in range(4):
        monkeypatch.setenv("HOME", f"/home/user{number}")
        monkeypatch.setenv("XDG_CACHE_HOME", f"/tmp/cache{number}")
        monkeypatch.setenv("VLLM_PORT", str(8000 + number))
        random.seed(number)
        assert run(tmp_path, Draft(2)).traces == 0
    assert files(tmp_path) == before


def test_the_seeds_of_the_application_stay_as_they_are_a11(tmp_path):
    random.seed(5)
    torch.manual_seed(5)
    states = random.getstate(), torch.get_rng_state()
    run(tmp_path, Draft(2))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_no_key_is_made_of_a_set_b08():
    """Sets have no order that two processes agree on; a factor that is one is refused."""
    with pytest.raises(TypeError):
        keys.canonical_json({"a", "b"})
    assert keys.canonical_json({"b": 1, "a": 2}) == keys.canonical_json({"a": 2, "b": 1})


class Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.view(-1)


class Nothing(nn.Module):
    """Not a single tensor operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Constant(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + 0, 7


@pytest.mark.parametrize("step", [Identity(), Nothing(), Constant()])
def test_a_trivial_graph_is_no_miss_each_time_b13(tmp_path, step):
    run(tmp_path, step)
    counters = run(tmp_path, step)
    assert (counters.traces, counters.compilations) == (0, 0)


class LoadlessRuntime(HostRuntime):
    def load(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("load is not implemented on this device")


def test_a_runtime_that_cannot_load_is_an_error_each_time_b14(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.pipeline.step_modules.HostRuntime", LoadlessRuntime)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="load is not implemented"):
            run(tmp_path, Draft(2))


def test_the_order_of_the_graphs_does_not_matter_b16(tmp_path):
    steps = {"draft": Draft(2), "linear": nn.Linear(3, 3), "identity": Identity()}
    x = torch.ones(2, 3)
    for names, work in ((list(steps), 3), (list(steps)[::-1], 0)):
        pipeline = make_pipeline(tmp_path)
        pipeline.build([GraphSpec(name, steps[name], (x,)) for name in names], {})
        assert (pipeline.counters.traces, pipeline.counters.compilations) == (work, work)


class Layer(nn.Module):
    """One of many equal layers; its name is an attribute that a custom operator would take."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.layer_name
        return self.linear(x)


def test_equal_graphs_are_compiled_once_whatever_their_names_are_b19_b20(tmp_path):
    pipeline = make_pipeline(tmp_path)
    x = torch.ones(2, 3)
    specs = [GraphSpec(f"layer{n}", Layer(f"model.layers.{n}"), (x,)) for n in range(4)]
    pipeline.build(specs, {})
    assert (pipeline.counters.compilations, pipeline.counters.neff_hits) == (1, 3)


def test_making_a_key_reads_no_weight_b23():
    def seconds(step: nn.Module) -> float:
        x = torch.ones(1, step.weight.shape[1])
        best = 1.0
        for _ in range(5):
            started = time.perf_counter()
            factors = keys.trace_factors(
                bucket="b",
                route="native",
                level=2,
                compiler_arguments=[],
                target="host",
                step_state=module_state(step),
                arguments=signature(step, (x,)),
                weights=describe_tensors(step),
                model={},
            )
            keys.key_of("trace", factors)
            best = min(best, time.perf_counter() - started)
        return best

    # 4 GiB that nobody touches: reading them would take the memory, and seconds.
    with torch.device("meta"):
        small, large = nn.Linear(8, 8), nn.Linear(1 << 15, 1 << 15)
    assert seconds(large) < 0.05
    assert seconds(large) < 10 * seconds(small) + 0.005


# --- C: broken entries ---------------------------------------------------------------------------


def test_a_module_that_cannot_be_pickled_is_kept_all_the_same_c13(tmp_path):
    step = nn.Linear(3, 3)
    step.lock, step.function = threading.Lock(), lambda: None
    with (tmp_path / "open").open("w") as step.file:
        assert run(tmp_path, step).traces == 1
        assert run(tmp_path, step).traces == 0


# --- E: file systems -----------------------------------------------------------------------------


class FaultyStore:
    """A store whose every operation fails now and then, as a network file system does."""

    def __init__(self, store: _core.Store) -> None:
        self._store = store
        self._chance = random.Random(3)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("put", "remove", "lock", "evict"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            if self._chance.random() < 0.4:
                raise OSError(116, "Stale file handle")
            return found(*args, **options)

        return call


def test_errors_of_a_network_file_system_cost_time_only_e10(tmp_path):
    tiers = Tiers(tmp_path, name="Compilation cache", logger=logger, max_size_bytes=1 << 20)
    tiers.local._store = FaultyStore(tiers.local._store)
    cache = CompilationCache(tiers, logger=logger)
    neff = _core.write_neff(
        name="n",
        target="host",
        compiler_version="1",
        inputs=[("input0", "float32", (1,))],
        outputs=[("output0", "float32", (1,))],
    )
    compiled = []
    for number in range(60):
        factors = {"module": number % 10}
        key = keys.key_of("neff", factors)
        found = cache.neff(
            key, factors, MODULE, lambda: compiled.append(1) or neff, bucket="b", describe={}
        )
        assert bytes(found.data) == neff
        if number % 7 == 0:
            cache.discard_neff(key, "test")
    assert 10 <= len(compiled) < 60


def test_a_copy_that_is_not_seen_yet_is_used_all_the_same_e11(tmp_path, monkeypatch):
    """What another process publishes may be invisible for a while; nobody waits for it."""
    remote = tmp_path / "remote"
    key = keys.key_of("neff", {"a": 1})
    _core.Store(str(remote)).put("neff", key.hex, {"neff": b"content"})
    tiers = Tiers(tmp_path / "local", name="c", logger=logger, remote=remote)
    monkeypatch.setattr(tiers.local, "get", lambda kind, key: None)
    monkeypatch.setattr(tiers.local, "put", lambda kind, key, sections: False)
    assert bytes(tiers.find("neff", key).section("neff")) == b"content"


def test_an_entry_is_one_file_e13(tmp_path):
    run(tmp_path, Draft(2))
    found = [path for path in tmp_path.rglob("*") if path.is_file() and "locks" not in path.parts]
    entries = [
        info
        for folder in ("precompile", "compile_cache")
        for info in _core.Store(str(tmp_path / folder)).entries()
    ]
    # A trace, a module, a NEFF, and the report of the start.
    assert len(entries) == 3
    assert len(found) == 4


# --- F, G: security and skew ---------------------------------------------------------------------


def test_no_pickle_is_read_or_sent_f07():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve|dill)\b", text, re.M)
        assert "torch.load(" not in text


class NewerCompiler(HostCompiler):
    def __init__(self) -> None:
        super().__init__()
        self.version += ".1"

    def key_factors(self) -> dict[str, str]:
        return super().key_factors() | {"version": self.version}


def test_another_patch_level_is_a_miss_that_names_it_g05(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert run(tmp_path, Draft(2)).compilations == 1
    caplog.clear()
    counters = run(tmp_path, Draft(2), compiler=NewerCompiler())
    assert (counters.traces, counters.compilations) == (0, 1)
    old = HostCompiler().version
    assert f"compiler version was {old}, is {old}.1" in caplog.text


def test_a_trace_made_under_autocast_is_for_autocast_g07(tmp_path):
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.t()

    x = torch.randn(3, 3)

    def start() -> tuple[int, torch.dtype]:
        pipeline = make_pipeline(tmp_path)
        graph = pipeline.build([GraphSpec("b", Product(), (x,))], {})["b"]
        return pipeline.counters.traces, graph(x).dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert start() == (1, torch.bfloat16)
    assert start() == (1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert start() == (0, torch.bfloat16)
    assert start() == (0, torch.float32)


@pytest.mark.parametrize("content", [b"ML\xefR\x0dStableHLO_v9.99.9\x00", b"", b"{}"])
def test_a_module_of_another_version_is_a_miss_g13(tmp_path, caplog, content):
    assert run(tmp_path, Draft(2)).traces == 1
    store = _core.Store(str(tmp_path / "precompile"))
    (info,) = store.entries()
    entry = store.get("trace", info.key)
    sections = {name: bytes(entry.section(name)) for name in entry.sections}
    store.remove("trace", info.key)
    assert store.put("trace", info.key, sections | {"module": content})
    counters = run(tmp_path, Draft(2))
    assert (counters.traces, counters.discards) == (1, 1)
    assert "is set aside: bucket b: the host compiler" in caplog.text
    assert run(tmp_path, Draft(2)).traces == 0


# --- H: growth -----------------------------------------------------------------------------------


def test_ten_thousand_entries_cost_a_look_up_nothing_h02(tmp_path):
    store = _core.Store(str(tmp_path))
    first = f"{0:064x}"
    store.put("neff", first, {"neff": b"n"})
    content = (tmp_path / "v1" / "00" / first).read_bytes()
    for number in range(10_000):
        name = f"{number % 256:02x}{number:062x}"
        directory = tmp_path / "v1" / name[:2]
        if number < 256:
            directory.mkdir(mode=0o700, exist_ok=True)
        (directory / name).write_bytes(content)
    best_get = best_put = 1.0
    fresh = _core.Store(str(tmp_path))
    for number in range(10):
        key = keys.key_of("neff", {"number": number})
        started = time.perf_counter()
        assert fresh.put("neff", key.hex, {"neff": bytes(1000)})
        best_put = min(best_put, time.perf_counter() - started)
        started = time.perf_counter()
        assert fresh.get("neff", key.hex) is not None
        best_get = min(best_get, time.perf_counter() - started)
    assert best_get < 0.005
    assert best_put < 0.020


def test_the_report_of_a_start_names_no_place(tmp_path):
    run(tmp_path, Draft(2))
    report = (tmp_path / "neuron" / "last_start.json").read_text()
    assert json.loads(report)["counters"]["traces"] == 1
    assert os.sep + "tmp" not in report
