"""The Python interpreter of the XLA route's worker: which one it is, and whether it will do.

Imports neither torch nor vllm, and starts no worker: an interpreter is asked for the versions of
its packages only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_neuron.errors import ConfigurationError

__all__ = [
    "CREATE_COMMAND",
    "PYTHON_VARIABLE",
    "XlaInterpreter",
    "default_environment",
    "find",
    "probe",
]

PYTHON_VARIABLE = "VLLM_NEURON_XLA_PYTHON"
CREATE_COMMAND = "vllm-neuron xla-env create"

# PyTorch/XLA's last release (2025-11), and the torch that it is built for.
WANTED = {"torch": "2.9", "torch-xla": "2.9"}

_PROBE = """
import importlib.metadata as metadata, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "torch-xla"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class XlaInterpreter:
    """An interpreter that can run the worker.

    Attributes:
        path: the executable.
        origin: how it was found, for people.
        versions: of Python, torch and torch-xla.
    """

    path: Path
    origin: str
    versions: dict[str, str]

    @property
    def is_own(self) -> bool:
        """Whether it is the interpreter of this process."""
        return str(self.path) == sys.executable


def default_environment() -> Path:
    """Where `vllm-neuron xla-env create` puts the environment.

    Among the user's data (XDG Base Directory Specification), not below VLLM_CACHE_ROOT: caches may
    be emptied and shared between machines, an environment belongs to one machine and is dear.
    """
    data = os.environ.get("XDG_DATA_HOME") or ""
    base = Path(data) if Path(data).is_absolute() else Path("~/.local/share").expanduser()
    return base / "vllm-neuron" / "xla-env"


def find(named: Path | None) -> XlaInterpreter:
    """Find the worker's interpreter.

    It is the one that VLLM_NEURON_XLA_PYTHON names; else this one, if its torch is PyTorch/XLA's;
    else the one of the default environment.

    Args:
        named: the value of VLLM_NEURON_XLA_PYTHON, or None.

    Raises:
        ConfigurationError: there is none, or its packages are missing or of other versions.
    """
    if named is not None:
        return probe(named, origin=PYTHON_VARIABLE)
    if _unfit(_own_versions()) is None:
        return probe(Path(sys.executable), origin="the server's own interpreter")
    environment = default_environment()
    python = environment / "bin" / "python"
    if not python.exists():
        raise ConfigurationError(
            f"The XLA route lowers graphs in an interpreter with torch {WANTED['torch']} and "
            f"torch-xla {WANTED['torch-xla']}, and there is none: {environment} does not exist and "
            f"{PYTHON_VARIABLE} is not set. Make it: {CREATE_COMMAND}. Or point {PYTHON_VARIABLE} "
            "to such an interpreter.",
            name=PYTHON_VARIABLE,
            value=None,
        )
    return probe(python, origin=f"made by {CREATE_COMMAND}")


@functools.cache
def probe(python: Path, *, origin: str) -> XlaInterpreter:
    """Ask an interpreter for its packages, once for each process.

    Raises:
        ConfigurationError: it does not run, or lacks what the worker needs.
    """
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=foreign_environment(),
        )
        found = json.loads(done.stdout) if done.returncode == 0 else None
        said = done.stderr.strip().rpartition("\n")[2]
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        found, said = None, str(error)
    if found is None:
        raise _error(python, origin, f"it does not run: {said or 'no output'}")
    if reason := _unfit(found):
        raise _error(python, origin, reason)
    return XlaInterpreter(python, origin, found)


def foreign_environment() -> dict[str, str]:
    """This process's environment without what leads another interpreter to this one's packages."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "XLA_FLAGS")
    return {key: value for key, value in os.environ.items() if key not in foreign}


def _own_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in WANTED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _unfit(found: dict[str, str | None]) -> str | None:
    for name, wanted in WANTED.items():
        version = found.get(name)
        if version is None:
            return f"it has no {name}, expected {wanted}"
        if version.split(".")[:2] != wanted.split("."):
            return f"its {name} is {version}, expected {wanted}"
    return None


def _error(python: Path, origin: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The interpreter of the XLA route's worker, {python} ({origin}), cannot be used: "
        f"{reason}. Make one: {CREATE_COMMAND}. Or point {PYTHON_VARIABLE} to an interpreter "
        f"with torch {WANTED['torch']} and torch-xla {WANTED['torch-xla']}.",
        name=PYTHON_VARIABLE,
        value=str(python),
    )
