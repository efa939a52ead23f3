"""What the lowering process may do to the server: nothing. Deaths, hangs, memory, refusals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.lowering.parity import Step, lower
from tests.lowering.xla_cpu import module_text
from vllm_neuron.errors import LoweringError
from vllm_neuron.lowering.native import NativeLowering
from vllm_neuron.lowering.process import ChildProcess


def double(x):
    return x * 2


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# MARK {mark}"))
    return f"{__file__}:{number}"


def test_a_child_killed_between_graphs_is_replaced_without_an_error():
    with NativeLowering() as native:
        lower(native, Step(double), (torch.ones(3),))
        first = native.child_pid
        os.kill(first, signal.SIGKILL)
        lowered = lower(native, Step(double), (torch.ones(4),))
        assert lowered.outputs[0].shape == (4,)
        assert native.child_pid not in (None, first)


def test_an_aborting_operator_is_named_and_the_next_graph_lowers(monkeypatch):
    def unpack(x, amounts):
        y = x + 1
        return torch.bitwise_right_shift(y, amounts)  # MARK shift

    monkeypatch.setattr(
        "vllm_neuron.lowering.native.NativeLowering.worker", "tests.lowering.stock_worker"
    )
    words, amounts = torch.ones(3, 1, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    with NativeLowering() as native:
        with pytest.raises(LoweringError) as caught:
            lower(native, Step(unpack), (words, amounts))
        assert caught.value.op == "aten.bitwise_right_shift.Tensor"
        assert caught.value.source == line_of("shift")
        assert "SIGABRT" in caught.value.reason and "LLVM ERROR" in caught.value.reason
        assert lower(native, Step(double), (torch.ones(3),)).outputs[0].shape == (3,)


def test_unknown_operator_names_operator_line_and_bucket():
    def step(x):
        return torch.i0(x)  # MARK i0

    with NativeLowering() as native, pytest.raises(LoweringError) as caught:
        lower(native, Step(step), (torch.rand(3),))
    error = caught.value
    assert (error.op, error.source, error.bucket) == (
        "aten.i0.default",
        line_of("i0"),
        "test",
    )
    assert "'test'" in str(error) and "aten.i0.default(float32[3])" in str(error)


def test_too_little_memory_or_time_is_an_error_and_the_parent_lives():
    with NativeLowering(memory_limit_bytes=64 << 20) as native, pytest.raises(LoweringError):
        lower(native, Step(double), (torch.ones(3),))
    with NativeLowering(timeout_s=0.0) as native:
        with pytest.raises(LoweringError, match="no answer in time"):
            lower(native, Step(double), (torch.ones(3),))
        assert native.child_pid is None


def test_an_interrupted_request_leaves_no_answer_for_the_next(monkeypatch):
    with NativeLowering() as native:
        lower(native, Step(double), (torch.ones(3),))
        with monkeypatch.context() as patch:
            interrupt = KeyboardInterrupt()
            patch.setattr(ChildProcess, "receive", lambda *args: (_ for _ in ()).throw(interrupt))
            with pytest.raises(KeyboardInterrupt):
                lower(native, Step(double), (torch.ones(5),))
        assert native.child_pid is None
        assert "tensor<4xf32>" in module_text(lower(native, Step(double), (torch.ones(4),)))
