"""`vllm-neuron doctor`: what it reports, with stand-ins and without anything."""

import json
import os
import subprocess
import sys

import pytest

from tests.stand_ins.compilers import compiler_environment
from tests.stand_ins.runtimes import ROOT, runtime_environment

COMMAND = "from vllm_neuron.cli import main; main()"


def run(*arguments, **environ):
    """Run the command; returns exit code, stdout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "NEURON_"))}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "doctor", *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def stand_ins(tmp_path):
    (tmp_path / "neuron0").touch()
    return {
        "VLLM_NEURON_DEVICE_DIRECTORY": str(tmp_path),
        **compiler_environment(),
        **runtime_environment(),
    }


def test_a_machine_without_anything(tmp_path):
    code, text = run(PATH="/usr/bin", VLLM_NEURON_DEVICE_DIRECTORY=str(tmp_path))
    assert code == 0
    assert f"none  device nodes: no {tmp_path}/neuron0, ..." in text
    assert "none  libnrt: cannot load the Neuron runtime: libnrt.so.1:" in text
    assert "none  neuronx-cc: neuronx-cc is not found" in text
    code, text = run("--device", PATH="/usr/bin")
    assert code == 1
    assert "FAIL  device run: cannot load the Neuron runtime" in text


def test_a_small_graph_goes_all_the_way(stand_ins):
    code, text = run("--device", "--json", **stand_ins)
    checks = {check["name"]: check for check in json.loads(text)}
    assert code == 0, text
    assert {check["state"] for check in checks.values()} == {"ok"}
    assert checks["device nodes"]["text"].startswith("1 (")
    assert (
        "version 2.35.30.0 (2.35.30.0+stand-in); 4 of 4 logical cores" in checks["libnrt"]["text"]
    )
    assert "takes StableHLO as stablehlo" in checks["neuronx-cc"]["text"]
    assert "only stand in" in checks["stand-ins"]["text"]
    for form in ("stablehlo", "hlo"):
        said = checks[f"compile {form}"]["text"]
        assert "target stand-in-cayman, LNC 2, features 0xc00, tensors input0, input1" in said
        assert checks[f"run {form}"]["text"].startswith("3 steps, ")
        assert checks[f"run {form}"]["text"].endswith(" ms each, right, and in place")


def test_a_compiler_that_fails_is_in_the_report(stand_ins):
    code, text = run("--device", **stand_ins, STAND_IN_CC_FAILURE="segmentation fault")
    assert code == 1
    assert "FAIL  compile stablehlo: bucket doctor_stablehlo: the compiler crashed" in text
    assert "FAIL  compile hlo: " in text
    assert "Please send this report back (docs/hardware.md)" in text
