"""Makes and removes the environment of the XLA route's worker: `vllm-neuron xla-env`.

The packages are those of `xla_environment.txt`, by version and hash. The product itself is not
installed there: the worker loads the files of the server's own installation
(docs/xla-worker.md).
"""

from __future__ import annotations

import fcntl
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_neuron.cuda_placeholders import make_stubs, require_tools
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.lowering.xla_interpreter import foreign_environment

__all__ = [
    "FULL",
    "SMALL",
    "Kind",
    "create",
    "is_environment",
    "locked_packages",
    "packages_of",
    "remove",
]

_LOCK = Path(__file__).with_name("xla_environment.txt")
# Says that a folder was made here, and how; a folder without it is never changed or removed.
_MARKER = "vllm-neuron-xla-env.json"
_PIN = re.compile(r"^([\w.-]+)==([\w.]+) \\\n    --hash=(sha256:[0-9a-f]{64})$", re.MULTILINE)
_GPU_ONLY = re.compile(r"nvidia-|triton$")
_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Kind:
    """How an environment is made.

    Attributes:
        name: the word for people.
        stubs: whether stubs stand in for the CUDA libraries.
        disk_bytes: its size, as measured with the locked packages.
        download_bytes: what is downloaded for it, likewise.
    """

    name: str
    stubs: bool
    disk_bytes: int
    download_bytes: int


SMALL = Kind("with stubs of the CUDA libraries", True, 2_200_000_000, 1_000_000_000)
FULL = Kind("with the CUDA libraries", False, 7_100_000_000, 3_800_000_000)


def locked_packages() -> list[tuple[str, str, str]]:
    """Name, version and hash of every locked package."""
    return [(match[1], match[2], match[3]) for match in _PIN.finditer(_LOCK.read_text())]


def packages_of(kind: Kind) -> list[tuple[str, str, str]]:
    """The packages that an environment of a kind has."""
    return [
        package for package in locked_packages() if not (kind.stubs and _GPU_ONLY.match(package[0]))
    ]


def is_environment(path: Path) -> bool:
    """Whether `create` made the folder, and finished."""
    return (path / _MARKER).is_file()


def create(path: Path, kind: Kind, *, python: Path | None, report: Callable[[str], None]) -> None:
    """Make an environment from nothing; several calls at once wait for each other.

    Args:
        path: the folder; absent, empty, or an environment that was made here.
        kind: with stubs or full.
        python: CPython 3.11 to base it on, or None to look for one.
        report: told each step as it begins.

    Raises:
        ConfigurationError: it cannot be made here; nothing was changed.
        subprocess.CalledProcessError: pip or a tool failed; what was made is gone again.
    """
    base = _base_python(python)
    if kind.stubs:
        require_tools()
    with _exclusive(path):
        if path.exists() and any(path.iterdir()) and not is_environment(path):
            raise ConfigurationError(
                f"{path} is not empty and was not made by vllm-neuron xla-env create. Name another "
                "folder, or remove this one yourself.",
                name="PATH",
                value=str(path),
            )
        free = shutil.disk_usage(_existing(path)).free
        if free < kind.disk_bytes:
            raise ConfigurationError(
                f"{path} needs {kind.disk_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free.",
                name="PATH",
                value=str(path),
            )
        try:
            _fill(path, kind, base, report)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise


def remove(path: Path) -> None:
    """Delete an environment.

    Raises:
        ConfigurationError: the folder was not made by `create`.
    """
    with _exclusive(path):
        if not is_environment(path):
            raise ConfigurationError(
                f"{path} is not an environment that vllm-neuron xla-env create made; it is left "
                "alone.",
                name="PATH",
                value=str(path),
            )
        # First the marker: a removal that is cut short leaves no environment that looks whole.
        (path / _MARKER).unlink()
        shutil.rmtree(path)


def _fill(path: Path, kind: Kind, base: Path, report: Callable[[str], None]) -> None:
    report("making the environment")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    environment = foreign_environment() | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    _run([str(base), "-m", "venv", str(path)], environment)
    python = path / "bin" / "python"
    requirements = path / "requirements.txt"
    pins = [f"{name}=={version} --hash={digest}\n" for name, version, digest in packages_of(kind)]
    requirements.write_text("".join(pins))
    command = [str(python), "-m", "pip", "install", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "-r", str(requirements)]
    _run(command, environment, report)
    if kind.stubs:
        report("making stubs of the CUDA libraries")
        site = path / "lib" / f"python{_PYTHON[0]}.{_PYTHON[1]}" / "site-packages"
        make_stubs(site / "torch" / "lib")
    report("importing")
    _run([str(python), "-P", "-c", "import torch_xla"], environment | {"PJRT_DEVICE": "CPU"})
    (path / _MARKER).write_text(
        json.dumps({"kind": kind.name, "packages": {p[0]: p[1] for p in packages_of(kind)}})
    )


def _run(
    command: list[str],
    environment: dict[str, str],
    report: Callable[[str], None] | None = None,
) -> None:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if report is not None and (match := re.match(r"Collecting ([\w.-]+)", line)):
            report(f"downloading {match[1]}")
        elif report is not None and line.startswith("Installing"):
            report("unpacking the packages")
    if code := process.wait():
        raise subprocess.CalledProcessError(code, command, output="".join(said[-20:]))


def _base_python(named: Path | None) -> Path:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise ConfigurationError(
            "The packages of the XLA route's worker are locked for Linux on x86-64; this is "
            f"{platform.system()} on {platform.machine()}.",
            name="platform",
            value=platform.machine(),
        )
    if named is not None:
        return named
    if sys.version_info[:2] == _PYTHON:
        return Path(sys.executable)
    found = shutil.which("python3.11")
    if found is None:
        raise ConfigurationError(
            "The packages of the XLA route's worker are locked for CPython 3.11; this is "
            f"{platform.python_version()} and python3.11 is not on the PATH. Name one: --python.",
            name="--python",
            value=None,
        )
    return Path(found)


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    # The lock file stays: to remove it would let two processes hold locks on different files.
