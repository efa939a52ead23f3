"""The stub of the extension module says what the module is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from vllm_neuron import _core

ROOT = Path(__file__).resolve().parents[2]


def test_stub_and_extension_module_agree():
    command = [sys.executable, "-m", "mypy.stubtest", "vllm_neuron._core"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.stdout == "Success: no issues found in 1 module\n", checked.stdout
    assert checked.returncode == 0


def test_stub_test_sees_a_difference(tmp_path):
    """The check itself: a stub without one method is not accepted."""
    stub = (ROOT / "python" / "vllm_neuron" / "_core.pyi").read_text()
    package = tmp_path / "vllm_neuron"
    package.mkdir()
    (package / "__init__.py").write_text("")
    changed = stub.replace("def take_problems(self)", "def take_trouble(self)")
    assert changed != stub
    (package / "_core.pyi").write_text(changed)
    shutil.copy(_core.__file__, package)
    command = [sys.executable, "-m", "mypy.stubtest", "vllm_neuron._core"]
    checked = subprocess.run(
        command,
        cwd=tmp_path,
        env={"MYPYPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode != 0
    assert "take_trouble" in checked.stdout
