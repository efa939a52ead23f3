"""NativeLowering: parity with eager, artifacts, aborts, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.lowering.parity import Step, assert_parity, lower
from tests.lowering.xla_cpu import module_text
from vllm_neuron.capture import capture
from vllm_neuron.errors import LoweringError
from vllm_neuron.lowering.native import NativeLowering


@pytest.fixture(scope="module")
def lowering():
    with NativeLowering() as native:
        yield native


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x, cache, slots):
        cache.index_copy_(0, slots, self.project(self.norm(x)))
        scores = torch.softmax(x @ cache.t(), -1)
        return scores @ cache, scores.argmax(-1)


def layer_arguments():
    torch.manual_seed(0)
    return torch.randn(3, 8), torch.zeros(16, 8), torch.tensor([5, 1, 9])


def test_returned_values_and_updated_inputs_equal_eager(lowering):
    torch.manual_seed(1)
    assert_parity(lowering, Layer(), layer_arguments(), rtol=1e-5, atol=1e-5)


def test_the_artifact_names_its_alias_and_keeps_unused_inputs(lowering):
    def step(x, unused, cache):
        cache.add_(x)
        return (unused,)

    captured = capture(Step(step), (torch.ones(2), torch.ones(3), torch.zeros(2)), bucket="b")
    lowered = lowering.lower(captured, bucket="b")
    names = [item.name for item in captured.record.inputs]
    text = module_text(lowered)
    signature = next(line for line in text.splitlines() if "func.func" in line)
    assert "@main" in signature and len(names) == 3
    place = names.index("args[2]")
    assert f"%arg{place}: tensor<2xf32> {{tf.aliasing_output = 0 : i32}}" in signature
    assert lowered.aliases == {0: place}
    assert [spec.shape for spec in lowered.inputs] == [
        item.spec.shape for item in captured.record.inputs
    ]


def test_no_location_or_path_is_in_the_artifact(lowering):
    """bugs A17, B02, B22."""
    torch.manual_seed(1)
    lowered = lower(lowering, Layer(), layer_arguments())
    for needle in (b".py", b"node:", str(Path(__file__).parent).encode(), str(Path.cwd()).encode()):
        assert needle not in lowered.data


PROGRAM = """
import sys, torch
from tests.lowering.test_native import Layer, layer_arguments
from vllm_neuron.capture import capture
from vllm_neuron.lowering.native import NativeLowering
torch.manual_seed(1)
with NativeLowering() as native:
    if sys.argv[1] == "after":
        native.lower(capture(torch.nn.Linear(4, 4), (torch.ones(1, 4),), bucket="a"), bucket="a")
    captured = capture(Layer(), layer_arguments(), bucket="b")
    sys.stdout.write(native.lower(captured, bucket="b").data.hex())
"""


def test_bytes_are_equal_in_every_process():
    found = set()
    for seed, order in (("0", "first"), ("1", "after"), ("random", "first")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, order],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(run.stdout)
    assert len(found) == 1 and len(found.pop()) > 200


def test_large_weights_stay_out_of_the_module(lowering):
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2048, 2048))
            self.register_buffer("mask", torch.zeros(2048, 2048, dtype=torch.float16))

        def forward(self, x):
            return x @ (self.w * self.mask.float())

    assert len(lower(lowering, Big(), (torch.ones(2, 2048),)).data) < 100_000


def test_a_large_literal_is_refused_by_name(lowering, monkeypatch):
    monkeypatch.setattr("vllm_neuron.lowering.graph_message.MAX_LITERAL_BYTES", 16)
    with pytest.raises(LoweringError, match="24 bytes; register it as a buffer"):
        lower(lowering, Step(lambda x: x + torch.tensor([1, 2, 3])), (torch.ones(3),))


def test_random_numbers_are_refused_by_name_and_line(lowering):
    def draw(x):
        return x + torch.rand(3)  # MARK rand

    with pytest.raises(LoweringError) as caught:
        lower(lowering, Step(draw), (torch.ones(3),))
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "# MARK rand" in text
    )
    assert caught.value.op == "aten.rand.default"
    assert caught.value.source == f"{__file__}:{line}"
    assert "generator" in caught.value.reason


def test_torch_mlir_stays_out_of_this_process(lowering):
    lower(lowering, Step(lambda x: x + 1), (torch.ones(3),))
    assert not [name for name in sys.modules if name.startswith("torch_mlir")]


def test_versions_need_no_child():
    native = NativeLowering()
    assert set(native.versions()) == {"torch-mlir", "jaxlib"}
    assert native.child_pid is None


@pytest.mark.parametrize(
    ("step", "dtype", "named", "instead"),
    [
        (lambda x: x.int() + 1, torch.uint16, "it takes a tensor of uint16", "int32"),
        (lambda x: (x + 1).to(torch.uint32).long(), torch.int64, "it returns a tensor", "int64"),
        (lambda x: x.abs(), torch.complex128, "it takes a tensor of complex128", "complex64"),
        (torch.fft.fft, torch.float64, "it returns a tensor of complex128", "complex64"),
    ],
)
def test_a_dtype_that_the_route_has_not_is_named_with_what_to_use(step, dtype, named, instead):
    captured = capture(Step(step), (torch.ones(3).to(dtype),), bucket="b")
    with NativeLowering() as lowering, pytest.raises(LoweringError) as failure:
        lowering.lower(captured, bucket="b")
    assert named in str(failure.value) and f"compute in {instead}" in str(failure.value)
    assert failure.value.op.startswith("aten.")
