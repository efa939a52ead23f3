"""Return values that are more than lists and dicts: in the record, and put together again."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from vllm_neuron import result_tree
from vllm_neuron.capture import capture
from vllm_neuron.errors import CaptureError
from vllm_neuron.trace_record import TraceRecord

GOLDEN = Path(__file__).parents[1] / "golden" / "records" / "results.json"

made = []


class Pair(NamedTuple):
    left: torch.Tensor
    right: int = 3


@dataclass
class Hidden:
    states: torch.Tensor
    pairs: list = field(default_factory=list)

    def __post_init__(self):
        made.append(type(self.states).__name__)
        self.count = len(self.pairs)


@dataclass(frozen=True, slots=True)
class Frozen:
    scale: float


class Output(OrderedDict):
    """As transformers' ModelOutput: keys are attributes too."""

    def __init__(self, **items):
        super().__init__(**items)
        vars(self).update(items)


class Step(torch.nn.Module):
    def forward(self, x, y):
        y.add_(1)
        named = Pair(x + 1, x.shape[0])
        hidden = Hidden(x * 2, [named, Pair(x)])
        rest = OrderedDict(b=Frozen(0.5), a=(x.size(), y, None))
        return Output(hidden=hidden, rest=rest), x.max(1)


def arguments():
    return torch.arange(6.0).reshape(2, 3), torch.zeros(2)


@pytest.fixture(scope="module")
def record():
    return capture(Step(), arguments(), bucket="b").record


def rebuilt(record):
    x, y = arguments()
    values = [torch.full(item.shape, float(index)) for index, item in enumerate(record.outputs)]
    by_name = {"x": x, "y": y}
    return record.rebuild_result(values, [by_name[item.name] for item in record.inputs]), values


def test_classes_come_back_with_their_attributes(record):
    made.clear()
    (output, largest), values = rebuilt(TraceRecord.from_json(record.to_json()))
    assert made == [], "a constructor ran"
    assert type(output) is Output and list(output) == ["hidden", "rest"]
    assert output.hidden is not None and type(output["hidden"]) is Hidden
    hidden, rest = output["hidden"], output["rest"]
    assert hidden.count == 2
    assert [type(pair) for pair in hidden.pairs] == [Pair, Pair]
    assert hidden.pairs[0].right == 2 and hidden.pairs[1].right == 3
    assert hidden.states is values[1] and hidden.pairs[0].left is values[2]
    assert hidden.pairs[1].left.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(rest) is OrderedDict and list(rest) == ["b", "a"]
    assert rest["b"] == Frozen(0.5)
    assert type(rest["a"][0]) is torch.Size and rest["a"][0] == (2, 3)
    assert type(largest) is torch.return_types.max


def test_the_record_is_the_golden_one(record):
    """The file is what docs/lowering.md specifies; a change of it is a change of the format."""
    found = json.loads(record.to_json())
    assert __name__ in found["sources"]
    found["sources"] = {}
    text = json.dumps(found, indent=1).replace(__name__ + ":", "MODULE:") + "\n"
    assert text == GOLDEN.read_text()


def test_a_record_whose_class_is_gone_is_no_hit_and_cannot_be_rebuilt(record, monkeypatch):
    assert record.missing_class() is None
    monkeypatch.delattr(f"{__name__}.Pair")
    assert record.missing_class() == f"{__name__}:Pair"
    with pytest.raises(ValueError, match=f"{__name__}:Pair of the result is not loaded"):
        rebuilt(record)
    monkeypatch.setattr(f"{__name__}.Pair", Hidden, raising=False)
    assert record.missing_class() == f"{__name__}:Pair"


@dataclasses.dataclass
class Rows(list):
    """Has a layout that is not a plain object's."""

    count: int = 0


@dataclasses.dataclass
class Watched:
    """Has an attribute whose setting runs code."""

    count: int = 0

    @property
    def seen(self):
        return self.count

    @seen.setter
    def seen(self, value):
        made.append(value)


def test_looking_for_a_class_imports_nothing(record):
    tree = ["dataclass", ["transformers:BertModel", []]]
    foreign = TraceRecord(record.inputs, record.outputs, record.aliases, tree, {})
    # Its package gives what it is asked for by importing it then.
    import transformers  # noqa: F401

    loaded = set(sys.modules)
    assert foreign.missing_class() == "transformers:BertModel"
    assert set(sys.modules) == loaded


def test_sources_of_inherited_classes_are_premises():
    class Inheriting(torch.nn.Module):
        def forward(self, x):
            return BaseModelOutputWithPooling(last_hidden_state=x + 1)

    sources = capture(Inheriting(), (torch.zeros(2),), bucket="b").record.sources
    assert {BaseModelOutputWithPooling.__module__, ModelOutput.__module__} <= sources.keys()


def test_endless_results_are_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(result_tree.NotRepresentable, match="nested too deeply"):
        result_tree.result_tree(endless, lambda item: None)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (defaultdict(list), "collections.defaultdict"),
        ({1.5: 2}, "builtins.dict"),
        ({3}, "builtins.set"),
        (type("Local", (tuple,), {"_fields": ()})(), "Local"),
        (1j, "builtins.complex"),
    ],
)
def test_other_values_are_named(value, named):
    with pytest.raises(result_tree.NotRepresentable, match=named):
        result_tree.result_tree([value], lambda item: None)


def test_a_local_class_is_refused():
    class Near(NamedTuple):
        value: torch.Tensor

    class Local(torch.nn.Module):
        def forward(self, x):
            return Near(x + 1)

    with pytest.raises(CaptureError, match="Define the class at the top of an imported module"):
        capture(Local(), (torch.zeros(2),), bucket="b")


@pytest.mark.parametrize(
    "tree",
    [
        ["namedtuple", ["os:system", [["const", "true"]]]],
        ["namedtuple", [f"{__name__}:Hidden", []]],
        ["dataclass", ["subprocess:Popen", []]],
        ["mapping", ["collections:defaultdict", [], []]],
        ["namedtuple", [f"{__name__}:Pair", [["const", 1]]]],
        ["dataclass", [f"{__name__}:Hidden", [["__class__", ["const", 1]]]]],
        ["dataclass", [f"{__name__}:Rows", []]],
        ["dataclass", [f"{__name__}:Watched", [["seen", ["const", 1]]]]],
    ],
)
def test_a_class_of_another_kind_is_not_made(record, tree):
    foreign = TraceRecord(record.inputs, record.outputs, record.aliases, tree, {})
    foreign = TraceRecord.from_json(foreign.to_json())
    assert foreign.missing_class() == tree[1][0]
    with pytest.raises(ValueError, match="is not loaded"):
        foreign.rebuild_result([], [])


@pytest.mark.parametrize(
    "tree",
    [
        ["namedtuple", ["os", []]],
        ["namedtuple", ["os:path()", []]],
        ["namedtuple", [3, []]],
        ["dataclass", ["a:B", [[1, ["const", 1]]]]],
        ["mapping", ["a:B", []]],
        ["mapping", ["a:B", [[None, ["const", 1]]], []]],
        ["torch.Size", [["output", 0]]],
        ["torch.Size", [["const", "a"]]],
        ["float", "0x1p99999"],
        ["torch.return_types.max", []],
    ],
)
def test_a_damaged_tree_is_a_value_error(record, tree):
    damaged = TraceRecord(record.inputs, record.outputs, record.aliases, tree, {})
    with pytest.raises(ValueError):
        TraceRecord.from_json(damaged.to_json())
