"""What a run on Neuron devices finds and decides, with stand-ins for runtime and compiler."""

import json
import os
import subprocess
import sys

import pytest

from tests.stand_ins.compilers import compiler_environment
from tests.stand_ins.runtimes import ROOT, runtime_environment
from vllm_neuron.compiler.arguments import compiler_arguments
from vllm_neuron.device_run import check_arguments, compiler_for, resolve_device_run
from vllm_neuron.envs import read_settings
from vllm_neuron.errors import ConfigurationError


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NEURON_")]:
        monkeypatch.delenv(name)
    for name, value in {**compiler_environment(), **runtime_environment()}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def product(tmp_path):
    return tmp_path / "product_name"


def resolved(product, monkeypatch, **environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return resolve_device_run(read_settings(), environ=os.environ, product=product)


def test_the_runtime_tells_the_device(product, monkeypatch):
    run = resolved(product, monkeypatch)
    assert (run.target, run.lnc, run.cores) == ("trn2", 2, ())
    assert run.memory == 24 << 30
    assert run.is_stand_in
    assert run.describe() == (
        "Neuron device: trn2 (cayman), logical cores of 2 with 24 GiB, runtime 2.35.30.0+stand-in, "
        "neuronx-cc 2.28.7631.0+stand-in"
    )


@pytest.mark.parametrize(
    ("name", "target", "lnc", "gib"),
    [
        ("trn1.32xlarge", "trn1", 1, 16),
        ("trn1n.32xlarge", "trn1n", 1, 16),
        ("inf2.8xlarge", "inf2", 1, 16),
        ("trn2u.48xlarge", "trn2", 2, 24),
        ("trn3pds98.x", "trn3", 2, 36),
    ],
)
def test_the_machine_tells_the_device(product, monkeypatch, name, target, lnc, gib):
    product.write_text(f"{name}\n")
    run = resolved(product, monkeypatch)
    assert (run.target, run.lnc, run.memory) == (target, lnc, gib << 30)


@pytest.mark.parametrize("form", ["auto", "hlo", "stablehlo"])
def test_cpu_compile_has_the_keys_of_the_device_run(product, monkeypatch, form):
    run = resolved(product, monkeypatch, VLLM_NEURON_CC_INPUT=form)
    assert compiler_for(run.target, read_settings()).key_factors() == run.compiler().key_factors()


def test_a_machine_that_is_none_of_them_asks_the_runtime(product, monkeypatch):
    product.write_text("m7i.large\n")
    assert resolved(product, monkeypatch, STAND_IN_NRT_TARGET="trn3").target == "trn3"


def test_the_target_cannot_be_another_device(product, monkeypatch):
    assert resolved(product, monkeypatch, NEURON_PLATFORM_TARGET_OVERRIDE="trn2").target == "trn2"
    with pytest.raises(ConfigurationError, match="=trn3, and the device is trn2") as caught:
        resolved(product, monkeypatch, NEURON_PLATFORM_TARGET_OVERRIDE="trn3")
    assert caught.value.name == "NEURON_PLATFORM_TARGET_OVERRIDE"
    with pytest.raises(ConfigurationError, match="'trn9' is not a target"):
        resolved(product, monkeypatch, NEURON_PLATFORM_TARGET_OVERRIDE="trn9")


def test_the_logical_core_size(product, monkeypatch):
    run = resolved(product, monkeypatch, NEURON_LOGICAL_NC_CONFIG="1")
    assert (run.lnc, run.memory) == (1, 12 << 30)
    product.write_text("trn1.2xlarge")
    assert resolved(product, monkeypatch).lnc == 1
    with pytest.raises(ConfigurationError, match="target trn1 has logical cores of 1 physical"):
        resolved(product, monkeypatch, NEURON_LOGICAL_NC_CONFIG="2")


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3", (0, 1, 2, 3)), ("5", (5,)), ("2, 7-8", (2, 7, 8))]
)
def test_listed_devices(product, monkeypatch, text, cores):
    assert resolved(product, monkeypatch, NEURON_VISIBLE_DEVICES=text).cores == cores


@pytest.mark.parametrize("text", ["x", "3-1", "1,,2", "-1"])
def test_a_list_of_devices_that_is_none(product, monkeypatch, text):
    with pytest.raises(ConfigurationError, match="is not a list of numbers"):
        resolved(product, monkeypatch, NEURON_VISIBLE_DEVICES=text)


def test_cores_that_are_pinned_by_hand(product, monkeypatch):
    with pytest.raises(RuntimeError, match="NEURON_RT_VISIBLE_CORES=0-3 is set by hand"):
        resolved(product, monkeypatch, NEURON_RT_VISIBLE_CORES="0-3")


def test_no_compiler(product, monkeypatch, tmp_path):
    with pytest.raises(ConfigurationError, match="neuronx-cc by VLLM_NEURON_CC"):
        resolved(product, monkeypatch, VLLM_NEURON_CC=str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("flags", "told"), [("--target trn3", "--target trn3"), ("--lnc=1", "--logical-nc-config 1")]
)
def test_flags_for_another_device(product, monkeypatch, flags, told):
    run = resolved(product, monkeypatch)
    arguments = compiler_arguments(2, extra=flags, target=run.target, lnc=run.lnc)
    with pytest.raises(ConfigurationError, match=f"NEURON_CC_FLAGS asks for {told}"):
        check_arguments(run, arguments)
    check_arguments(run, compiler_arguments(2, extra="-O3", target=run.target, lnc=run.lnc))


def test_what_goes_to_the_compiler(product, monkeypatch):
    run = resolved(
        product, monkeypatch, VLLM_NEURON_CC_INPUT="hlo", VLLM_NEURON_CC_STALL_TIMEOUT="77"
    )
    compiler = run.compiler()
    assert (compiler.target, compiler.input_format, compiler.stall_s) == ("trn2", "hlo", 77.0)


CHILD = """
import json, os
from pathlib import Path
from vllm_neuron.device_run import resolve_device_run
from vllm_neuron.envs import read_settings
run = resolve_device_run(read_settings(), product=Path("/nowhere"))
try:
    runtime = run.runtime({rank})
    said = [runtime.library.visible_cores()]
except Exception as error:
    said = [type(error).__name__, str(error)]
names = [n for n in os.environ if n.startswith("NEURON_")]
print(json.dumps([said, {{n: os.environ[n] for n in names}}]))
"""


def child(rank, **environ):
    """Initialise the runtime for a rank in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(rank=rank)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout.splitlines()[-1]), done.stderr)


def test_the_runtime_is_told_what_the_user_has_not_said():
    said, environ, _ = child(2, NEURON_RT_IO_RING_CACHE_SIZE="64")
    assert said == [4]
    assert environ == {
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_RT_DISABLE_EXECUTION_BARRIER": "1",
        "NEURON_RT_IO_RING_CACHE_SIZE": "64",
        "NEURON_RT_MAP_HBM": "1",
        "NEURON_RT_ROOT_COMM_ID": "localhost:62182",
        "NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS": "32",
    }


def test_ranks_are_pinned_to_the_listed_cores():
    said, _, _ = child(1, NEURON_VISIBLE_DEVICES="0,9")
    assert said[0] == "ExecutionError" and "nrt_init" in said[1]
    said, _, _ = child(2, NEURON_VISIBLE_DEVICES="0,1")
    assert said[0] == "ConfigurationError"
    assert "NEURON_VISIBLE_DEVICES has 2 devices, and local rank 2 needs one more" in said[1]
