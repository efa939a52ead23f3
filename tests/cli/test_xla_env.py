"""`vllm-neuron xla-env`: what it makes is sound, and what it did not make it leaves alone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_neuron import xla_environment
from vllm_neuron.cuda_placeholders import make_stubs
from vllm_neuron.lowering.xla_interpreter import default_environment

COMMAND = Path(sys.executable).with_name("vllm-neuron")


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), "xla-env", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_the_environment_of_make_xla_env_works():
    done = run("check")
    assert done.returncode == 0, done.stderr
    assert "works: python 3.11" in done.stdout
    assert "torch 2.9.1, torch-xla 2.9.0" in done.stdout


def test_create_leaves_a_sound_environment_as_it_is():
    path = default_environment()
    before = (path / "bin").stat().st_mtime_ns
    assert "works" in run("create").stdout
    assert (path / "bin").stat().st_mtime_ns == before


@pytest.mark.parametrize("command", ["create", "remove"])
def test_a_folder_that_something_else_made_is_left_alone(tmp_path, command):
    (tmp_path / "thesis.txt").write_text("all of it")
    done = run(command, tmp_path)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_check_without_an_environment_names_the_command(tmp_path):
    done = run("check", XDG_DATA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "Make it: vllm-neuron xla-env create" in done.stderr


def test_remove_deletes_what_create_made(tmp_path):
    path = tmp_path / "environment"
    path.mkdir()
    (path / xla_environment._MARKER).write_text("{}")
    assert run("remove", path).returncode == 0
    assert not path.exists()


def test_the_lock_names_the_worker_s_packages_with_hashes():
    full = {name: version for name, version, _ in xla_environment.packages_of(xla_environment.FULL)}
    small = {name for name, _, _ in xla_environment.packages_of(xla_environment.SMALL)}
    assert (full["torch"], full["torch-xla"]) == ("2.9.1", "2.9.0")
    assert {"torch", "torch-xla", "numpy"} <= small
    assert not [name for name in small if name.startswith("nvidia-")]
    assert any(name.startswith("nvidia-") for name in full)
    text = Path(xla_environment.__file__).with_name("xla_environment.txt").read_text()
    assert text.count("--hash=sha256:") == len(full) == text.count("==")


def test_stubs_have_the_functions_and_versions_that_a_library_wants(tmp_path):
    real, user = tmp_path / "real", tmp_path / "user"
    real.mkdir()
    user.mkdir()
    (tmp_path / "gpu.c").write_text(
        "int cudaCount(void) { return 7; } int cudaPlain(void) { return 8; }"
    )
    (tmp_path / "gpu.map").write_text("libcudart.so.12 { global: cudaCount; cudaPlain; };")
    (tmp_path / "user.c").write_text(
        "int cudaCount(void); int cudaPlain(void);"
        "int count(void) { return cudaCount() * 1000 + cudaPlain(); }"
    )
    gpu = real / "libcudart.so.12"
    cc = ["cc", "-shared", "-fPIC", "-o"]
    script = f"-Wl,--version-script={tmp_path / 'gpu.map'}"
    subprocess.run(
        [*cc, gpu, tmp_path / "gpu.c", "-Wl,-soname,libcudart.so.12", script], check=True
    )
    library = user / "libuser.so"
    subprocess.run([*cc, library, tmp_path / "user.c", gpu, f"-Wl,-rpath,{user}"], check=True)
    assert make_stubs(user) == ["libcudart.so.12"]
    assert ctypes.CDLL(str(library)).count() == 100 * 1000 + 100
