"""capture(): bindings, aliases, result tree, side effects, refusals."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm_neuron.binding import find_tensor
from vllm_neuron.capture import GraphInput, TensorSpec, TraceRecord, capture
from vllm_neuron.errors import CaptureError

F32 = "float32"
COUNTER = []


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = nn.Parameter(self.first.weight.data)
        self.register_buffer("state", torch.zeros(2, 4))
        self.tables = {"cos": torch.ones(4)}
        self.hidden = [Inner()]

    def forward(self, x, caches, unused=None):
        y = self.tied(self.first(x)) * self.tables["cos"] * self.hidden[0].w
        caches[1][0].add_(y)
        self.state = self.state * 2
        return {"y": y, "rest": [None, 7, 0.5, caches[1][0], y, (x,)]}, y.max(-1)


def arguments():
    return torch.ones(2, 4), [(torch.zeros(2, 4), torch.zeros(2, 4)) for _ in range(2)]


def test_inputs_are_bound_by_name_and_tied_weights_once():
    model = Model()
    record = capture(model, arguments(), bucket="b").record
    assert {(item.kind, item.name) for item in record.inputs} == {
        ("parameter", "first.weight"),
        ("parameter", "first.bias"),
        ("argument", "x"),
        ("attribute", "tables['cos']"),
        ("attribute", "hidden[0].w"),
        ("argument", "caches[1][0]"),
        ("buffer", "state"),
    }
    assert len(record.inputs) == 7
    assert find_tensor(model, "hidden[0].w") is model.hidden[0].w
    assert find_tensor(model, "tables['cos']") is model.tables["cos"]
    assert find_tensor(model, "state") is model.state


def test_updates_are_aliases_and_the_result_is_rebuilt():
    record = capture(Model(), arguments(), bucket="b").record
    updated = {record.inputs[i].name: o for o, i in record.aliases.items()}
    assert set(updated) == {"caches[1][0]", "state"}
    assert sorted(record.aliases) == [0, 1]
    outputs = [f"out{i}" for i in range(len(record.outputs))]
    inputs = [item.name for item in record.inputs]
    values = list(outputs)
    values[-2:] = [torch.zeros(2), torch.zeros(2)]
    result, largest = record.rebuild_result(values, inputs)
    assert result["rest"][:3] == [None, 7, 0.5]
    assert result["rest"][3] == "caches[1][0]"
    assert result["rest"][4] == result["y"] == "out2"
    assert result["rest"][5] == ("x",)
    assert type(largest) is torch.return_types.max
    assert record.outputs[-1] == TensorSpec((2,), "int64")


@pytest.fixture(scope="module")
def record():
    return capture(Model(), arguments(), bucket="b").record


def test_record_survives_json(record):
    data = record.to_json()
    assert TraceRecord.from_json(data) == record
    assert TraceRecord.from_json(data).to_json() == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format":4', b'"format":3'),
        (b'"parameter"', b'"weights"'),
        (b'"float32"', b'"float31"'),
        (b'["output",2]', b'["output",99]'),
        (b'["const",7]', b'["run",7]'),
        (b'"aliases":[[0,', b'"aliases":[[99,'),
        (b"[2,4]", b"[2,-4]"),
        (b"{", b""),
    ],
)
def test_a_damaged_record_is_a_value_error(record, old, new):
    data = record.to_json()
    assert old in data
    with pytest.raises(ValueError):
        TraceRecord.from_json(data.replace(old, new, 1))


def test_sources_name_this_module_and_notice_a_change(record):
    assert __name__ in record.sources
    assert record.sources_changed() == []
    stale = TraceRecord(
        record.inputs,
        record.outputs,
        record.aliases,
        record.result,
        record.sources | {__name__: "0" * 64, "no.such.module": "0" * 64},
    )
    assert stale.sources_changed() == [__name__, "no.such.module"]


class Restoring(nn.Module):
    """What vLLM's step does: a module global and layer attributes written during the trace."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, cache):
        self.layer.cache = cache
        COUNTER.append(x + 1)
        try:
            y = self.layer(x) + COUNTER[0]
            self.layer.cache[0].copy_(y[0])
        finally:
            COUNTER.clear()
        return y


def test_side_effects_leave_nothing_behind():
    step = Restoring()
    before = set(globals())
    cache = torch.zeros(2, 4)
    captured = capture(step, (torch.ones(2, 4), cache), bucket="b")
    assert not hasattr(step.layer, "cache")
    assert COUNTER == [] and set(globals()) == before
    assert cache.abs().sum() == 0
    assert [captured.record.inputs[i].name for i in captured.record.aliases.values()] == ["cache"]


def test_thirty_captures_are_alike_and_leak_no_fake_tensor():
    step = nn.Linear(4, 4)
    alive = []
    for size in range(1, 31):
        captured = capture(step, (torch.ones(size, 4),), bucket=f"b{size}")
        assert captured.record.inputs[-1].spec.shape in {(size, 4), (4,), (4, 4)}
        assert (size, 4) in {item.spec.shape for item in captured.record.inputs}
        alive.append(weakref.ref(captured.graph_module))
    del captured
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


def test_tracing_touches_no_weight():
    class Poisoned(nn.Module):
        def __init__(self):
            super().__init__()
            # A shape far beyond memory: one element, expanded.
            self.w = nn.Parameter(torch.ones(1).expand(1 << 22, 1 << 22))

        def forward(self, x):
            return x @ self.w

    record = capture(Poisoned(), (torch.ones(1, 1 << 22),), bucket="b").record
    assert GraphInput("parameter", "w", TensorSpec((1 << 22, 1 << 22), F32)) in record.inputs


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def refusal(function, *args):
    with pytest.raises(CaptureError) as caught:
        capture(Returns(function), args, bucket="decode 8")
    assert "'decode 8'" in str(caught.value)
    return caught.value


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# MARK {mark}"))
    return f"{__file__}:{number}"


def break_by_item(x):
    return x, x.sum().item()  # MARK item


def select_by_mask(x):
    return x[x > 0]  # MARK mask


def test_item_is_refused_with_the_line():
    error = refusal(break_by_item, torch.ones(3))
    assert error.source == line_of("item")
    assert "values of tensors" in str(error)


def test_graph_break_is_refused_with_the_line():
    def calls_c(x):
        sys.intern("x")
        torch._dynamo.graph_break()  # MARK break
        return x

    error = refusal(calls_c, torch.ones(3))
    assert error.source == line_of("break")
    assert "one graph without a break" in str(error)


def test_data_dependent_size_is_refused_with_the_line():
    error = refusal(select_by_mask, torch.ones(3))
    assert error.source == line_of("mask")


def test_dynamic_dimension_is_refused():
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 1)
    error = refusal(lambda x: x * 2, x)
    assert "dimension 1 of input args[0] is dynamic" in error.reason


@pytest.mark.parametrize("result", [None, 3])
def test_a_step_without_an_output_is_refused(result):
    """Spec LP-6: and as a ValueError."""
    error = refusal(lambda x: result, torch.ones(3))
    assert isinstance(error, ValueError)
    assert "Cannot compile a module that has no output" in str(error)


def test_a_step_that_returns_its_input_has_a_graph_with_an_output():
    """bugs B13."""
    captured = capture(Returns(lambda x, y: (y, 7)), (torch.ones(3), torch.ones(2)), bucket="b")
    assert [spec.shape for spec in captured.record.outputs] == [(2,)]
    assert captured.record.aliases == {}


def test_computed_tensor_in_an_attribute_is_refused():
    class Stash(nn.Module):
        def forward(self, x):
            self.last = x + 1
            return x

    with pytest.raises(CaptureError) as caught:
        capture(Stash(), (torch.ones(3),), bucket="b")
    assert "self.last" in caught.value.reason


def test_foreign_object_in_the_result_is_refused():
    error = refusal(lambda x: (x + 1, {1, 2}), torch.ones(3))
    assert "set" in error.reason


def test_the_same_argument_twice_stays_two_inputs():
    x = torch.ones(3)
    record = capture(Returns(lambda x, y: x + y), (x, x), bucket="b").record
    assert [item.name for item in record.inputs] == ["args[0]", "args[1]"]


class Returned(nn.Module):
    """Returns attributes of its input, which are views of it."""

    def forward(self, x):
        x.add_(1)
        return x.T, x.mT, x.data


def test_attributes_of_an_input_are_returned_as_they_are_after_its_update():
    x = torch.arange(6.0).reshape(2, 3)
    captured = capture(Returned(), (x,), bucket="b")
    outputs = captured.graph_module(x.clone())
    assert len(captured.record.inputs) == 1 and captured.record.aliases == {0: 0}
    turned, last, same = captured.record.rebuild_result(outputs, [outputs[0]])
    assert torch.equal(turned, (x + 1).t()) and torch.equal(last, (x + 1).t())
    assert torch.equal(same, x + 1)


class Array(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(4).numpy()

    def forward(self, x):
        return x + torch.from_numpy(self.table)


def test_an_array_in_an_attribute_is_refused():
    with pytest.raises(CaptureError, match=r"table\), which is no tensor in an attribute"):
        capture(Array(), (torch.ones(4),), bucket="b")
