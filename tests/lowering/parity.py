"""Compares a lowered step with eager: returned values and updated inputs and buffers."""

from __future__ import annotations

import copy
import logging
import os
from collections import defaultdict
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.lowering.xla_cpu import run_module
from vllm_neuron.binding import argument_leaves, find_tensor
from vllm_neuron.capture import CapturedGraph, capture
from vllm_neuron.envs import read_settings
from vllm_neuron.lowering import lowering_for
from vllm_neuron.lowering.module import LoweredModule, Lowering
from vllm_neuron.route import Route

COMPARED: dict[str, set[str]] = defaultdict(set)
"""The tests that compare each ATen operator with eager, as far as they ran in this process."""


class Step(torch.nn.Module):
    """A step that calls a function on its arguments."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def lowering_of(route: Route) -> Lowering:
    """The lowering of a route; the XLA route's in the environment that `make xla-env` made."""
    python = read_settings()["VLLM_NEURON_XLA_PYTHON"]
    return lowering_for(route, xla_python=python, logger=logging.getLogger(__name__))


def lower(lowering: Lowering, step: torch.nn.Module, args: tuple) -> LoweredModule:
    return lowering.lower(capture(step, args, bucket="test"), bucket="test")


def bind(captured: CapturedGraph, step: torch.nn.Module, args: tuple) -> list[torch.Tensor]:
    """The tensors of the graph's inputs, in order."""
    leaves = dict(argument_leaves(step, args))
    return [
        leaves[item.name] if item.kind == "argument" else find_tensor(step, item.name)
        for item in captured.record.inputs
    ]


def captured_step(step: torch.nn.Module, args: tuple) -> CapturedGraph:
    """Capture a step and note its operators in `COMPARED`."""
    captured = capture(step, args, bucket="test")
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2]
    for node in captured.graph_module.graph.nodes:
        if node.op == "call_function":
            COMPARED[str(node.target)].add(test.partition(" ")[0].partition("[")[0])
    return captured


def run(lowering: Lowering, step: torch.nn.Module, args: tuple) -> Any:
    """The step's result by way of the lowered module; inputs are updated like eager does."""
    captured = captured_step(step, args)
    tensors = bind(captured, step, args)
    outputs = run_module(lowering.lower(captured, bucket="test"), tensors)
    for output, graph_input in captured.record.aliases.items():
        with torch.no_grad():
            tensors[graph_input].copy_(outputs[output])
    return captured.record.rebuild_result(outputs, tensors)


def assert_parity(
    lowering: Lowering,
    step: torch.nn.Module,
    args: tuple,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Any:
    """Run both ways from equal inputs; NaN equals NaN, and dtypes and shapes must agree."""
    eager_step, eager_args = copy.deepcopy((step, args))
    with torch.no_grad():
        expected = eager_step(*eager_args)
        found = run(lowering, step, args)
    pairs = zip(
        pytree.tree_leaves((expected, eager_args, list(eager_step.buffers()))),
        pytree.tree_leaves((found, args, list(step.buffers()))),
        strict=True,
    )
    for left, right in pairs:
        if isinstance(left, torch.Tensor) and "float8" in str(left.dtype):
            assert left.dtype == right.dtype
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        elif isinstance(left, torch.Tensor):
            torch.testing.assert_close(right, left, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert left == right or (left != left and right != right)
    return found
