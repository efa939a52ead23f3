"""A trace is used again only while everything that it read is as it was."""

from __future__ import annotations

import importlib
import json
import logging

import pytest
import torch
from torch import nn

from tests.pipeline.step_modules import make_pipeline
from vllm_neuron import _core
from vllm_neuron.pipeline import GraphSpec
from vllm_neuron.premises import (
    PremiseChecks,
    broken_premise,
    encode_premises,
    variable_premises,
)

FACTOR = 2.0
TABLE = {"bias": 1.0}


def multiply_by(factor: float):
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return multiply


class Kernel:
    """An object that is no module, as vLLM's attention implementations are."""

    offset = 1.0

    def __init__(self) -> None:
        self.window: int | None = None
        self.cap = 4.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.cap + self.offset
        return x if self.window is None else x - self.window


def replaced_run(self: Kernel, x: torch.Tensor) -> torch.Tensor:
    return x * 100


class Step(nn.Module):
    shift = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((3,), 2.0))
        self.second = self.first
        self.tables = [self.first]
        self.kernel = Kernel()
        self.settings = {"scale": 5.0}
        self.activation = multiply_by(2.0)
        self.inner = nn.Sequential(nn.ReLU())
        self.place = "/models/one"
        self._private = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.first + self.second * 10 + self.tables[0] * 7
        x = self.activation(self.kernel.run(x)) * FACTOR + TABLE["bias"]
        if self.place.endswith("two"):
            x = x + 1000
        return x * self.settings["scale"] + self.shift - self._private * torch.zeros(3).dim()


def run(root, step: nn.Module):
    pipeline = make_pipeline(root)
    x = torch.arange(3.0)
    result = pipeline.build([GraphSpec("b", step, (x,))], {})["b"](x)
    torch.testing.assert_close(result, step(x).detach())
    return pipeline.counters


def set_in(path: str, value):
    def change(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
        *parents, name = path.split(".")
        owner = step
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)

    return change


def patched(owner, name: str, value):
    return lambda step, monkeypatch: monkeypatch.setattr(owner, name, value)


CHANGES = {
    "attribute of an object": set_in("kernel.window", 4),
    "float of an object": set_in("kernel.cap", 3.0),
    "instance attribute over a class attribute": set_in("kernel.offset", 2.0),
    "private attribute": set_in("_private", 1.5),
    "dictionary attribute": set_in("settings", {"scale": 6.0}),
    "closure": set_in("activation", multiply_by(3.0)),
    "path": set_in("place", "/models/two"),
    "hook": lambda step, _: step.inner[0].register_forward_hook(lambda m, args, out: out * 3),
    "untied weight": set_in("second", nn.Parameter(torch.full((3,), 9.0))),
    "untied list item": set_in("tables", [torch.full((3,), 9.0)]),
    "class attribute": patched(Step, "shift", 4.0),
    "class attribute of an object": patched(Kernel, "offset", 7.0),
    "method": patched(Kernel, "run", replaced_run),
    "global": lambda step, monkeypatch: monkeypatch.setitem(Step.forward.__globals__, "FACTOR", 3),
    "item of a global": lambda step, monkeypatch: monkeypatch.setitem(TABLE, "bias", 2.0),
}


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    assert run(root, Step()).traces == 1
    return root


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_that_reaches_the_graph_is_traced_again(cache_root, monkeypatch, change):
    """bugs A10."""
    run(cache_root, Step())
    step = Step()
    change(step, monkeypatch)
    assert run(cache_root, step).traces == 1


def test_what_the_trace_did_not_read_does_not_matter(cache_root):
    run(cache_root, Step())
    step = Step()
    step._unused = object()
    step.kernel.port = 12345
    step.settings["port"] = 54321
    assert run(cache_root, step).traces == 0


def test_the_log_says_what_changed(cache_root, caplog):
    run(cache_root, Step())
    caplog.set_level(logging.INFO)
    step = Step()
    step.kernel.cap = 3.0
    run(cache_root, step)
    assert "the trace read something that changed: step.kernel.cap: value was" in caplog.text


READS = {
    "get": 'float(os.environ.get("TEST_SCALE", "2"))',
    "getenv": 'float(os.getenv("TEST_SCALE", "2"))',
    "item": '(float(os.environ["TEST_SCALE"]) if "TEST_SCALE" in os.environ else 2.0)',
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_environment_variable_that_the_model_reads_is_a_premise_a07(
    tmp_path, monkeypatch, caplog, read
):
    """bugs A07: set, changed and unset between starts; other variables do not matter (B05)."""
    caplog.set_level(logging.INFO)
    name = f"reading_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import os\nimport torch\n\n\nclass Scaled(torch.nn.Module):\n"
        f"    def forward(self, x):\n        return x * {read}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    monkeypatch.delenv("TEST_SCALE", raising=False)
    assert run(tmp_path / "cache", module.Scaled()).traces == 1
    for value, traces in (("3", 1), ("3", 0), ("4", 1), (None, 1), (None, 0)):
        if value is None:
            monkeypatch.delenv("TEST_SCALE", raising=False)
        else:
            monkeypatch.setenv("TEST_SCALE", value)
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", str(value))
        assert run(tmp_path / "cache", module.Scaled()).traces == traces
    assert "os.environ: variable 'TEST_SCALE' was ['str', '3'], is ['str', '4']" in caplog.text


def test_a_variable_that_holds_a_path_is_kept_as_a_digest(monkeypatch):
    monkeypatch.setenv("TEST_PLACE", "/secret/place")
    (premise,) = variable_premises(["TEST_PLACE"])
    assert "secret" not in json.dumps(premise)
    assert broken_premise([premise], Step()) is None
    monkeypatch.setenv("TEST_PLACE", "/secret/other")
    assert broken_premise([premise], Step()) is not None


def test_the_default_dtype_is_a_factor(tmp_path):
    class Zeros(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(2)

    x = torch.ones(2, dtype=torch.float32)
    assert make_pipeline(tmp_path).build([GraphSpec("b", Zeros(), (x,))], {})["b"](x).dtype == (
        torch.float32
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        graph = make_pipeline(tmp_path).build([GraphSpec("b", Zeros(), (x,))], {})["b"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert graph(x).dtype == torch.bfloat16


def test_parameters_of_equal_memory_are_tied_by_the_key(tmp_path):
    class Pair(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(3))
            self.two = nn.Parameter(self.one.data if tied else torch.full((3,), 5.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.one + self.two

    for tied in (True, False, True):
        run(tmp_path, Pair(tied))


def test_following_a_premise_runs_no_code_of_the_model():
    calls = []

    class Trap:
        def __getattr__(self, name: str):
            calls.append(name)
            raise AttributeError(name)

        @property
        def value(self) -> int:
            calls.append("value")
            return 1

    step = Step()
    step.trap = Trap()
    for check in (
        "value",
        "type",
        "length",
        "keys",
        "attribute",
        "own attribute",
        "contains",
        "hooks",
    ):
        for name in ("value", "missing", "__class__", "__dict__"):
            path = [["step", ""], ["attr", "trap"], ["attr", name]]
            premises = encode_premises([[check, path, "value", "no such state"]])
            assert PremiseChecks().broken(premises, step) is not None
    assert calls == []


@pytest.mark.parametrize(
    "premises",
    [
        None,
        {},
        [1],
        [["value", [["step", ""]], None]],
        [["eval", [["step", ""]], None, 1]],
        [["value", [], None, 1]],
        [["value", [["step"]], None, 1]],
        [["value", [[1, 2]], None, 1]],
        [["value", [["module", 5]], None, 1]],
        [["same", [["step", ""]], 3, True]],
    ],
)
def test_malformed_premises_are_refused(premises):
    with pytest.raises(ValueError, match="premise"):
        PremiseChecks().broken(json.dumps(premises).encode(), Step())


@pytest.mark.parametrize("argument", [None, [], {}, 1.5, "x"])
@pytest.mark.parametrize(
    "operation", ["attr", "item", "nth", "nth key", "type", "dict", "child", "no such"]
)
def test_a_lying_premise_is_a_miss_and_never_an_error(operation, argument):
    for check in (
        "value",
        "type",
        "length",
        "keys",
        "attribute",
        "own attribute",
        "contains",
        "hooks",
    ):
        for start in ([["step", ""]], [["module", "os"]], [["step", ""], ["attr", "settings"]]):
            premise = [check, [*start, [operation, argument]], argument, "nothing"]
            assert broken_premise([premise], Step()) is not None


def replaced(change):
    def rewrite(content: bytes) -> bytes:
        return json.dumps(change(json.loads(content))).encode()

    return rewrite


def without(name: str):
    return replaced(lambda record: {key: value for key, value in record.items() if key != name})


def with_result(*result):
    return replaced(lambda record: record | {"trace": record["trace"] | {"result": result}})


@pytest.mark.parametrize(
    "rewrite",
    [
        replaced(lambda record: [record]),
        without("trace"),
        without("module"),
        without("graph digest"),
        replaced(lambda record: record | {"module": "native"}),
        with_result("torch.return_types.max", []),
        with_result("torch.return_types.no_such", []),
        lambda content: b"[" * 200_000,
        lambda content: b"\xff",
        lambda content: None,
    ],
)
def test_a_sound_entry_with_a_senseless_record_is_a_miss(tmp_path, rewrite):
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    run(tmp_path, Double())
    store = _core.Store(str(tmp_path / "precompile"))
    (info,) = store.entries()
    entry = store.get("trace", info.key)
    sections = {name: bytes(entry.section(name)) for name in entry.sections}
    record = rewrite(sections.pop("record"))
    store.remove("trace", info.key)
    assert store.put("trace", info.key, sections | ({"record": record} if record else {}))
    assert run(tmp_path, Double()).traces == 1
    assert run(tmp_path, Double()).traces == 0


def test_senseless_factors_do_not_stop_the_explanation_of_a_miss(tmp_path):
    store = _core.Store(str(tmp_path / "precompile"))
    for number, factors in enumerate((b"[1]", b"[" * 200_000, b"\xff")):
        assert store.put("trace", f"{number:064x}", {"record": b"{}", "factors": factors})
    assert run(tmp_path, Step()).traces == 1


def lying(change):
    """A record that its parser accepts and its module does not fit."""

    def rewrite(record):
        return record | {"trace": record["trace"] | change(record["trace"])}

    return rewrite


LIES = {
    "no alias": lying(lambda trace: {"aliases": []}),
    "another output": lying(lambda trace: {"outputs": [["float32", [7]], *trace["outputs"][1:]]}),
    "one output more": lying(lambda trace: {"outputs": [*trace["outputs"], ["float32", [3]]]}),
    "inputs exchanged": lying(lambda trace: {"inputs": trace["inputs"][::-1], "aliases": []}),
    "an alias of another input": lying(lambda trace: {"aliases": [[0, 1]]}),
}


@pytest.mark.parametrize("with_neff", [True, False])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_record_that_does_not_fit_its_module_is_traced_again(tmp_path, caplog, lie, with_neff):
    class Accumulate(nn.Module):
        def forward(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum())
            return total * 2

    args = (torch.ones(3), torch.ones(3, dtype=torch.float64).float())

    def start():
        pipeline = make_pipeline(tmp_path)
        graph = pipeline.build([GraphSpec("b", Accumulate(), args)], {})["b"]
        total = torch.ones(3)
        assert graph(total, torch.full((3,), 2.0)).tolist() == [14.0] * 3
        assert total.tolist() == [7.0] * 3
        return pipeline.counters

    assert start().traces == 1
    store = _core.Store(str(tmp_path / "precompile"))
    (info,) = store.entries()
    entry = store.get("trace", info.key)
    sections = {name: bytes(entry.section(name)) for name in entry.sections}
    sections["record"] = json.dumps(lie(json.loads(sections["record"]))).encode()
    store.remove("trace", info.key)
    assert store.put("trace", info.key, sections)
    if not with_neff:
        compiled = _core.Store(str(tmp_path / "compile_cache"))
        for found in compiled.entries():
            compiled.remove(found.kind, found.key)
    counters = start()
    assert (counters.traces, counters.trace_hits) == (1, 0)
    assert start().traces == 0
