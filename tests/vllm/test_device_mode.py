"""A model served by way of neuronx-cc's command line and libnrt's C API, with both stand-ins.

Nothing here ran on a Neuron device: see docs/hardware.md.
"""

import json
import shlex
from pathlib import Path

import pytest

from tests.serving import ServerFailedError
from tests.stand_ins.compilers import compiler_environment
from tests.stand_ins.runtimes import runtime_environment

pytestmark = pytest.mark.serve

PROMPTS = ("Hello there", "One two three four five six seven eight nine ten")


@pytest.fixture
def device(tmp_path):
    """The environment of a machine with one device."""
    nodes = tmp_path / "dev"
    nodes.mkdir()
    (nodes / "neuron0").touch()
    return {
        "VLLM_NEURON_DEVICE": "auto",
        "VLLM_NEURON_DEVICE_DIRECTORY": str(nodes),
        **compiler_environment(STAND_IN_CC_CALLS=str(tmp_path / "calls")),
        **runtime_environment(),
    }


def answers(server):
    return [server.complete(text, max_tokens=12)["choices"][0]["text"] for text in PROMPTS]


def test_a_model_is_served_and_restarts_warm(serve, checkpoint, device, tmp_path):
    model = checkpoint("llama")
    server = serve(model, cache_root=tmp_path / "host", fork=True)
    expected = answers(server)
    server.stop()
    server = serve(model, environment=device, fork=True)
    assert answers(server) == expected
    server.stop()
    log = "\n".join(server.log_lines())
    assert "Neuron device: trn2 (cayman), logical cores of 2 with 24 GiB, runtime 2.35" in log
    assert "nothing of this run happens on a Neuron device" in log
    # Every graph was compiled by the documented command line.
    calls = [
        json.loads(line) for line in Path(device["STAND_IN_CC_CALLS"]).read_text().splitlines()
    ]
    assert log.count("neuronx-cc compiled ") == len(calls) >= 5
    for call in calls:
        assert call["arguments"] == shlex.split(
            "compile module.mlir --framework XLA --target trn2 --model-type transformer --lnc 2 "
            "-O2 --auto-cast=none --output file.neff --logfile log-neuron-cc.txt"
        )
    server = serve(model, environment=device, fork=True)
    assert answers(server) == expected
    server.stop()
    log = "\n".join(server.log_lines())
    assert "lowered 0 in 0.0 s, compiled 0 in 0.0 s" in log
    assert "neuronx-cc compiled " not in log
    assert len(Path(device["STAND_IN_CC_CALLS"]).read_text().splitlines()) == len(calls)


def test_a_failing_compiler_ends_the_start_with_the_reason(serve, checkpoint, device):
    broken = {**device, "STAND_IN_CC_FAILURE": "device memory"}
    with pytest.raises(ServerFailedError) as caught:
        serve(checkpoint("llama"), environment=broken, fork=True)
    log = caught.value.log_path.read_text()
    assert "the graph does not fit the device memory (exit code 70, NCC_EVRF009)" in log
    assert "[NCC_EVRF009] Tensors need 30.1 GB of HBM, 24 GB are available" in log
