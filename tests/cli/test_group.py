"""The command group `vllm-neuron`: help, version, and that it starts without heavy imports."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_neuron import _core
from vllm_neuron.cli import main

COMMAND = Path(sys.executable).with_name("vllm-neuron")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-neuron, version {_core.__version__}\n")


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "Usage: vllm-neuron [OPTIONS] COMMAND [ARGS]..."
    listed = done.stdout.partition("Commands:\n")[2].splitlines()
    commands = dict(line.split(maxsplit=1) for line in listed)
    assert commands["neff"] == "Show and validate NEFF files."
    assert commands["cache"] == "Look at and after the compile caches."
    assert commands["xla-env"] == "Make the interpreter of the XLA route's worker."


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_imports_no_command(arguments):
    code = (
        "import sys\n"
        "from vllm_neuron.cli import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('vllm_neuron.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_unknown_command_is_a_usage_error():
    done = run("nonsense")
    assert done.returncode == 2
    assert "No such command 'nonsense'." in done.stderr


def test_the_line_of_a_command_in_the_group_help_is_its_own():
    result = CliRunner().invoke(main, ["neff", "--help"])
    assert result.exit_code == 0
    assert "Show and validate NEFF files." in result.output


def test_neff_commands_import_nothing_heavy(tmp_path):
    path = tmp_path / "a.neff"
    path.write_bytes(
        _core.write_neff(
            name="n",
            target="none",
            compiler_version="1",
            inputs=[],
            outputs=[("y", "float32", [1])],
        )
    )
    code = (
        "import sys\n"
        "from vllm_neuron.cli import main\n"
        f"try: main(['neff', 'validate', {str(path)!r}])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'vllm', 'jaxlib', 'torch_mlir', 'numpy', 'rich'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
