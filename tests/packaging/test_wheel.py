"""The wheel: what is in it, and that it works with nothing but its own dependencies."""

from __future__ import annotations

import configparser
import email
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WRITE_NEFF = """
import pathlib, sys
from vllm_neuron import _core
neff = _core.write_neff(
    name="doubled", target="host", compiler_version="1",
    inputs=[("x", "float32", [2, 3])], outputs=[("y", "float32", [2, 3])],
)
pathlib.Path(sys.argv[1]).write_bytes(neff)
"""

IMPORT = """
import sys
import vllm_neuron
heavy = {"torch", "vllm", "jax", "jaxlib", "torch_mlir", "numpy"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


def run(*command: str | Path) -> str:
    """Run a command outside of the repository and return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (
        f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel in release mode, as `pip install .` does."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """Return the `bin` folder of a new environment with the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--only-binary", ":all:", wheel)
    return folder / "bin"


def metadata(wheel: Path) -> email.message.Message:
    """Return the core metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_content(wheel):
    """Only the package and its metadata: no tests, no demo, no stand-ins, no sources of Rust."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = metadata(wheel)["Version"]
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"vllm_neuron", f"vllm_neuron_rs-{version}.dist-info"}
    suffixes = {Path(name).suffix for name in names if name.startswith("vllm_neuron/")}
    assert suffixes == {".py", ".pyi", ".so", ".txt", ".typed"}
    assert [n for n in names if n.endswith(".so")] == ["vllm_neuron/_core.abi3.so"]
    assert {"vllm_neuron/py.typed", "vllm_neuron/xla_environment.txt"} <= set(names)
    foreign = ("test", "fake", "mock", "stub", "standin", "stand_in", "demo")
    assert [n for n in names if any(w in Path(n).name.lower() for w in foreign)] == []
    sources = ROOT / "python" / "vllm_neuron"
    packaged = {n.removeprefix("vllm_neuron/") for n in names if n.endswith(".py")}
    assert packaged == {str(p.relative_to(sources)) for p in sources.rglob("*.py")}


def test_metadata(wheel):
    """Name, licence, tags, and that neither vLLM nor torch comes without being asked for."""
    fields = metadata(wheel)
    assert fields["Name"] == "vllm-neuron-rs"
    assert fields["License-Expression"] == "Apache-2.0"
    assert wheel.name.startswith(f"vllm_neuron_rs-{fields['Version']}-cp311-abi3-")
    needed = [r for r in fields.get_all("Requires-Dist") if "extra ==" not in r]
    assert [r.split(">")[0] for r in needed] == ["click", "rich"]
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (n for n in archive.namelist() if n.endswith("/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_entry_points(wheel):
    """What vLLM and torch look up."""
    parser = configparser.ConfigParser(delimiters=("=",))
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        parser.read_string(archive.read(name).decode())
    assert {group: dict(parser[group]) for group in parser.sections()} == {
        "console_scripts": {"vllm-neuron": "vllm_neuron.cli:main"},
        "torch_dynamo_backends": {
            "neuron_native": "vllm_neuron.backend:neuron_native",
            "vllm_neuron": "vllm_neuron.backend:vllm_neuron",
        },
        "vllm.general_plugins": {"neuron": "vllm_neuron:register_general"},
        "vllm.platform_plugins": {"neuron": "vllm_neuron:register"},
    }


def test_dependencies_are_few(bare):
    """`pip install vllm-neuron-rs` brings the command line's two libraries and what they need."""
    listed = run(sys.executable, "-m", "pip", "--python", bare / "python", "list", "--format=json")
    assert {item["name"].lower() for item in json.loads(listed)} == {
        "click",
        "markdown-it-py",
        "mdurl",
        "pygments",
        "rich",
        "vllm-neuron-rs",
    }


def test_import_is_light(bare):
    """Importing the package imports nothing heavy, here and where the heavy packages are there."""
    assert run(bare / "python", "-c", IMPORT) == "[]\n"
    assert run(sys.executable, "-c", IMPORT) == "[]\n"


def test_command_line(bare, wheel, tmp_path):
    """The command works on a machine without torch, vLLM and jaxlib."""
    version = metadata(wheel)["Version"]
    assert run(bare / "vllm-neuron", "--version").strip().endswith(version)
    neff = tmp_path / "doubled.neff"
    run(bare / "python", "-c", WRITE_NEFF, neff)
    info = json.loads(run(bare / "vllm-neuron", "neff", "info", "--json", neff))
    assert info["name"] == "doubled"
    assert "doubled" in run(bare / "vllm-neuron", "neff", "info", neff)
    run(bare / "vllm-neuron", "neff", "validate", neff)
