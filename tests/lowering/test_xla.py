"""XlaLowering: parity with eager, modules, the worker's life and its refusals."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxlib import xla_client

from tests.lowering.parity import Step, assert_parity, lower, lowering_of
from tests.lowering.test_native import Layer, layer_arguments
from vllm_neuron.capture import capture
from vllm_neuron.errors import ConfigurationError, LoweringError
from vllm_neuron.lowering import xla_interpreter
from vllm_neuron.lowering.xla import XlaLowering
from vllm_neuron.route import Route


@pytest.fixture(scope="module")
def lowering():
    lowering = lowering_of(Route.XLA)
    yield lowering
    lowering.close()


def hlo_text(lowered):
    return xla_client.XlaComputation(lowered.data).as_hlo_text()


def test_returned_values_and_updated_inputs_equal_eager(lowering):
    torch.manual_seed(1)
    assert_parity(lowering, Layer(), layer_arguments(), rtol=1e-5, atol=1e-5)


def test_parameters_are_the_inputs_in_order_unused_and_scalar_ones_too(lowering):
    def step(x, unused, cache, scale):
        cache.add_(x * scale * 0.37 + torch.tensor([0.5, 0.25]))
        return (unused,)

    arguments = (torch.ones(2), torch.ones(3).bfloat16(), torch.zeros(2), torch.tensor(2.0))
    captured = capture(Step(step), arguments, bucket="b")
    lowered = lowering.lower(captured, bucket="b")
    header = hlo_text(lowered).partition("\n")[0]
    kinds = {"float32": "f32", "bfloat16": "bf16"}
    signature = ", ".join(
        f"{kinds[item.spec.dtype]}[{','.join(map(str, item.spec.shape))}]"
        for item in captured.record.inputs
    )
    found = header.partition("entry_computation_layout={(")[2].partition(")->")[0]
    assert found.replace("{0}", "") == signature
    place = [item.name for item in captured.record.inputs].index("args[2]")
    assert f"input_output_alias={{ {{0}}: ({place}, {{}}, must-alias) }}" in header
    assert (lowered.route, lowered.format, lowered.aliases) == ("XLA", "hlo", {0: place})
    assert_parity(lowering, Step(step), arguments)


PROGRAM = """
import sys, torch
from tests.lowering.parity import lowering_of
from tests.lowering.test_native import Layer, layer_arguments
from vllm_neuron.capture import capture
from vllm_neuron.route import Route
torch.manual_seed(1)
lowering = lowering_of(Route.XLA)
if sys.argv[1] == "after":
    lowering.lower(capture(torch.nn.Linear(4, 4), (torch.ones(1, 4),), bucket="a"), bucket="a")
captured = capture(Layer(), layer_arguments(), bucket="b")
sys.stdout.write(lowering.lower(captured, bucket="b").data.hex())
lowering.close()
"""


def test_bytes_are_equal_in_every_process_and_name_no_path():
    found = set()
    for seed, order in (("0", "first"), ("1", "after")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PROGRAM, order]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1
    data = bytes.fromhex(found.pop())
    assert len(data) > 200
    for needle in (b".py", str(Path(__file__).parent).encode(), str(Path.cwd()).encode()):
        assert needle not in data


def test_one_worker_lowers_all_graphs_and_is_replaced_when_killed(lowering, caplog):
    with caplog.at_level(logging.INFO, logger="tests.lowering.parity"):
        lower(lowering, Step(lambda x: x * 2), (torch.ones(3),))
        first = lowering.child_pid
        lower(lowering, Step(lambda x: x * 3), (torch.ones(3),))
        assert lowering.child_pid == first
        os.kill(first, signal.SIGKILL)
        lowered = lower(lowering, Step(lambda x: x * 2), (torch.ones(4),))
    assert lowered.outputs[0].shape == (4,)
    assert lowering.child_pid not in (None, first)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("PyTorch/XLA lowered test: 1 nodes in ") for line in lines)
    assert any("torch-xla 2.9.0" in line for line in lines)


def test_what_pytorch_xla_does_not_lower_is_named_with_its_line(lowering):
    def step(x):
        return torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 2]))  # MARK reduce

    with pytest.raises(
        LoweringError, match=r"the XLA route cannot lower aten.segment_reduce"
    ) as caught:
        lower(lowering, Step(step), (torch.rand(3),))
    text = Path(__file__).read_text().splitlines()
    line = next(i for i, line in enumerate(text, 1) if line.endswith("# MARK reduce"))
    error = caught.value
    assert (error.op, error.source) == ("aten.segment_reduce.default", f"{__file__}:{line}")
    assert error.reason == "PyTorch/XLA does not lower it, and it has no decomposition"
    assert lower(lowering, Step(lambda x: x * 2), (torch.ones(3),)).outputs[0].shape == (3,)


def test_an_operator_that_the_older_torch_lacks_is_decomposed_before_sending(lowering):
    def step(x):
        return torch.ops.aten.linalg__powsum(x + torch.tensor([1.0, 2.0, 3.0]), 2.0)

    assert_parity(lowering, Step(step), (torch.arange(3.0),), rtol=1e-6)


def test_an_operator_of_neither_torch_is_refused_by_name(lowering):
    with torch.library._scoped_library("vllm_neuron_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", torch.empty_like, "Meta")
        with pytest.raises(LoweringError, match="it has no decomposition") as caught:
            lower(lowering, Step(torch.ops.vllm_neuron_test.twice.default), (torch.ones(3),))
    assert caught.value.op == "vllm_neuron_test.twice.default"


def test_no_weight_takes_memory_in_the_worker(lowering):
    step = torch.nn.Linear(1 << 15, 1 << 15, bias=False, device="meta").to_empty(device="cpu")
    lower(lowering, Step(lambda x: x), (torch.ones(3),))
    lowered = lower(lowering, step, (torch.ones(1, 1 << 15),))
    assert lowered.inputs[0].shape == (1 << 15, 1 << 15)
    status = Path(f"/proc/{lowering.child_pid}/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    # The weight alone would be 4 GiB.
    assert peak_kib < 2 << 20


def test_too_little_time_is_an_error_and_ends_the_worker(lowering):
    hurried = XlaLowering(lowering._interpreter, logger=logging.getLogger(__name__), timeout_s=0.0)
    with hurried, pytest.raises(LoweringError, match="no answer in time"):
        lower(hurried, Step(lambda x: x * 2), (torch.ones(3),))
    assert hurried.child_pid is None


def test_versions_need_no_worker(lowering):
    fresh = lowering_of(Route.XLA)
    assert set(fresh.versions()) == {"torch", "torch-xla"}
    assert fresh.child_pid is None


def test_an_interpreter_that_will_not_do_is_refused_with_the_command(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"its torch is 2.13.*vllm-neuron xla-env create"):
        xla_interpreter.find(Path(sys.executable))
    with pytest.raises(ConfigurationError, match=r"it does not run: .*No such file"):
        xla_interpreter.find(tmp_path / "python")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"does not exist.*vllm-neuron xla-env create"):
        xla_interpreter.find(None)
