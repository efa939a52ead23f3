"""A trace is used again only while everything that it read is as it was."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from tests.pipeline.step_modules import make_pipeline
from vllm_neuron import _core
from vllm_neuron.pipeline import GraphSpec
from vllm_neuron.premises import broken_premise
from vllm_neuron.trace_record import TraceRecord

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
    record = TraceRecord((), (), {}, ["const", None], {})
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
            tree = json.loads(record.to_json()) | {
                "premises": [[check, path, "value", "no such state"]]
            }
            premises = TraceRecord.from_json(json.dumps(tree).encode()).premises
            assert broken_premise(premises, step) is not None
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
    tree = json.loads(TraceRecord((), (), {}, ["const", None], {}).to_json())
    with pytest.raises(ValueError, match="trace record"):
        TraceRecord.from_json(json.dumps(tree | {"premises": premises}).encode())


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
