"""Inputs, buffers and views that lie in one memory, some of them updated, against eager."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.lowering.parity import Step, assert_parity
from vllm_neuron.binding import signature
from vllm_neuron.capture import capture
from vllm_neuron.errors import CaptureError
from vllm_neuron.lowering.native import NativeLowering
from vllm_neuron.shared_memory import overlaps


@pytest.fixture(scope="module")
def lowering():
    with NativeLowering() as lowering:
        yield lowering


def update(x, y, z):
    before = y.sum() + z.sum()
    x.mul_(2)
    y[0] = y[0] + z.sum()
    z.add_(x[-1].clone())
    return before, x + 1, y.sum(), z


views = st.tuples(st.integers(0, 5), st.integers(1, 2), st.integers(1, 4))


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(places=st.tuples(views, views, views))
def test_updates_are_seen_through_every_view(lowering, places):
    base = torch.arange(16.0)
    args = [base.as_strided((size,), (stride,), start) for start, stride, size in places]
    assert_parity(lowering, Step(update), tuple(args))


def test_one_tensor_passed_twice_and_its_transpose(lowering):
    x = torch.arange(9.0).view(3, 3)

    def write(x, y, z):
        y[0] = 7
        return x.sum(0), z.add_(1), y

    assert_parity(lowering, Step(write), (x, x, x.t()))


def test_an_expanded_input_beside_what_it_repeats(lowering):
    x = torch.arange(3.0)

    def write(x, y, z):
        x.add_(1)
        return x * 1 + y, z.sum(0)

    assert_parity(lowering, Step(write), (x, x[:1].expand(3), x.expand(2, 3)))


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.zeros(3, 4)
        self.register_buffer("table", table)
        self.register_buffer("row", table[1])
        self.register_buffer("turned", table.t())

    def forward(self, x):
        self.table.add_(x)
        self.row.zero_()
        return self.turned.sum(0), self.table * 1


def test_buffers_that_are_views_of_each_other(lowering):
    assert_parity(lowering, Buffers(), (torch.ones(3, 4),))


def test_what_overlaps_is_found():
    base, other = torch.zeros(12), torch.zeros(4)
    tensors = [base[:4], other, base[4:8], base[3:5], None, base[9:], base[:0], base[8:9]]
    assert [item.members for item in overlaps(tensors)] == [(0, 2, 3)]
    assert overlaps(tensors)[0].stop == 8
    assert overlaps([base[:6], base[6:], other]) == []
    assert overlaps([base[2:], base.view(torch.int32)])[0].dtype is None


def test_what_overlaps_is_part_of_the_signature():
    base = torch.zeros(12)
    step = Step(lambda x, y: x.add_(y))
    signatures = [
        str(signature(step, args))
        for args in (
            (base[:4], base[8:]),
            (base[:4].clone(), base[8:].clone()),
            (base[:4], base[2:6]),
            (base[:4], base[:4]),
            (base[2:6], base[:4]),
        )
    ]
    assert signatures[0] == signatures[1]
    assert len(set(signatures)) == 4


def test_an_updated_view_of_another_dtype_is_refused():
    base = torch.zeros(8)
    with pytest.raises(CaptureError, match=r"of another dtype.*args\[0\], args\[1\]"):
        capture(Step(lambda x, y: (x.add_(1), y.sum())), (base, base.view(torch.int32)), bucket="b")
