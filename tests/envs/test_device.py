"""Device selection: every row of the table, with and without a device."""

import subprocess
import sys
import warnings

import pytest

from vllm_neuron import device
from vllm_neuron.device import Mode, compile_target
from vllm_neuron.envs import read_settings
from vllm_neuron.errors import ConfigurationError

CLASS = "vllm_neuron.vllm.platform.NeuronPlatform"
NO_DEVICES = "No Neuron devices found. Skipping vLLM Neuron plugin registration."


@pytest.fixture(params=[False, True], ids=["no device", "device"])
def present(request):
    return request.param


@pytest.fixture
def directory(tmp_path, present):
    for name in ("null", "neuron", "neuron_x", "neuronx0"):
        (tmp_path / name).touch()
    if present:
        for name in ("neuron10", "neuron0", "neuron1"):
            (tmp_path / name).touch()
    return tmp_path


def test_device_nodes(directory, present):
    names = ("neuron0", "neuron1", "neuron10") if present else ()
    assert device.neuron_devices(directory) == [str(directory / name) for name in names]
    assert device.neuron_devices(directory / "missing") == []


def registered(environ, directory):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = device.platform_class_name(environ, directory=directory)
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    assert texts == ([] if name else [NO_DEVICES])
    assert device.is_selected(environ, directory=directory) is (name is not None)
    return name


@pytest.mark.parametrize("value", [None, "", "  ", "auto"])
def test_auto_registers_with_a_device_only(directory, present, value):
    environ = {} if value is None else {"VLLM_NEURON_DEVICE": value}
    environ["VLLM_NEURON_CPU_MODE"] = "0"
    assert registered(environ, directory) == (CLASS if present else None)


@pytest.mark.parametrize(
    "environ",
    [
        {"VLLM_NEURON_CPU_MODE": "1"},
        {"VLLM_NEURON_CPU_COMPILE": "yes"},
        {"VLLM_NEURON_DEVICE": "auto", "VLLM_NEURON_CPU_MODE": "1"},
        {"VLLM_NEURON_DEVICE": "host"},
        {"VLLM_NEURON_DEVICE": "neuron"},
        # Impossible values register as well: the start then fails with their names.
        {"VLLM_NEURON_DEVICE": "x"},
        {"VLLM_NEURON_DEVICE": "HOST"},
        {"VLLM_NEURON_CPU_MODE": "maybe"},
    ],
)
def test_what_is_asked_for_registers_on_any_machine(directory, environ):
    assert registered(environ, directory) == CLASS


def resolve(environ, *, present):
    return device.resolve_mode(read_settings(environ), ["/dev/neuron0"] if present else [])


def test_host_and_cpu_mode(present):
    assert resolve({"VLLM_NEURON_DEVICE": "host"}, present=present) is Mode.HOST
    assert resolve({"VLLM_NEURON_CPU_MODE": "1"}, present=present) is Mode.CPU
    both = {"VLLM_NEURON_DEVICE": "auto", "VLLM_NEURON_CPU_MODE": "1"}
    assert resolve(both, present=present) is Mode.CPU


@pytest.mark.parametrize("name", ["neuron", "host"])
def test_a_device_with_cpu_mode_names_both(present, name):
    environ = {"VLLM_NEURON_DEVICE": name, "VLLM_NEURON_CPU_MODE": "1"}
    with pytest.raises(ValueError) as caught:
        resolve(environ, present=present)
    assert f"VLLM_NEURON_DEVICE={name} and VLLM_NEURON_CPU_MODE=1" in str(caught.value)


def test_cpu_mode_with_cpu_compile(present):
    environ = {"VLLM_NEURON_CPU_COMPILE": "1", "VLLM_NEURON_CPU_MODE": "1"}
    with pytest.raises(RuntimeError) as caught:
        resolve(environ, present=present)
    assert str(caught.value) == (
        "VLLM_NEURON_CPU_MODE and VLLM_NEURON_CPU_COMPILE are not compatible with each other"
    )


@pytest.mark.parametrize(
    ("environ", "target"),
    [
        ({"VLLM_NEURON_DEVICE": "host"}, "host"),
        ({"VLLM_NEURON_DEVICE": "host", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, "host"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, "trn2"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": " trn1 "}, "trn1"),
    ],
)
def test_cpu_compile_needs_no_device(present, environ, target):
    environ |= {"VLLM_NEURON_CPU_COMPILE": "1"}
    assert resolve(environ, present=present) is Mode.COMPILE
    assert compile_target(read_settings(environ)) == target


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "VLLM_NEURON_CPU_COMPILE"),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn9"}, "NEURON_PLATFORM_TARGET_OVERRIDE"),
    ],
)
def test_cpu_compile_names_the_targets_that_there_are(present, environ, name):
    with pytest.raises(ConfigurationError, match="inf2, trn1, trn1n, trn2, trn3") as caught:
        resolve({"VLLM_NEURON_CPU_COMPILE": "1", **environ}, present=present)
    assert caught.value.name == name


def test_neuron_without_a_device():
    with pytest.raises(ConfigurationError, match="there is none on this machine") as caught:
        resolve({"VLLM_NEURON_DEVICE": "neuron"}, present=False)
    assert (caught.value.name, caught.value.value) == ("VLLM_NEURON_DEVICE", "neuron")
    assert "VLLM_NEURON_DEVICE=host" in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "neuron"])
def test_a_device_is_run_on(name):
    assert resolve({"VLLM_NEURON_DEVICE": name}, present=True) is Mode.DEVICE


def test_the_directory_of_the_nodes_can_be_elsewhere(tmp_path, monkeypatch):
    environ = {"VLLM_NEURON_DEVICE_DIRECTORY": str(tmp_path)}
    assert not device.is_selected(environ)
    (tmp_path / "neuron3").touch()
    (tmp_path / "neuron_something").touch()
    assert device.is_selected(environ)
    monkeypatch.setenv("VLLM_NEURON_DEVICE_DIRECTORY", str(tmp_path))
    assert device.neuron_devices() == [str(tmp_path / "neuron3")]


def test_registering_imports_nothing_heavy():
    code = (
        "import sys, vllm_neuron; assert vllm_neuron.register() is not None;"
        "heavy = {'torch', 'vllm', 'jax', 'jaxlib', 'torch_mlir', 'numpy', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environ = {"VLLM_NEURON_DEVICE": "host", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
