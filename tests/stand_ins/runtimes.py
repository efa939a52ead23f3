"""How tests and the demonstration get at the stand-in for libnrt."""

import ctypes
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PACKAGE = "vllm-neuron-stand-in-libnrt"


@cache
def library_path() -> Path:
    """Build the library, if it is not, and return its path."""
    command = ["cargo", "build", "--locked", "-p", PACKAGE, "--message-format=json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and PACKAGE in message["package_id"]:
            for name in message["filenames"]:
                if name.endswith(".so"):
                    return Path(name)
    raise RuntimeError(f"{' '.join(command)} made no library")


def runtime_environment(**changes: str) -> dict[str, str]:
    """The variables that make the product use the stand-in; `changes` describe the machine."""
    return {
        "VLLM_NEURON_LIBNRT": str(library_path()),
        "STAND_IN_PYTHON": sys.executable,
        "STAND_IN_DEVICE": str(FOLDER / "device.py"),
        **changes,
    }


class Counters:
    """What the library counts, and failures to order; the library is loaded already."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.stand_in_count.restype = ctypes.c_int64

    def __getitem__(self, name: str) -> int:
        return self._library.stand_in_count(name.encode())

    def fail(self, call: str, status: int) -> None:
        """Make the next call of that name return a status without doing anything."""
        self._library.stand_in_fail(call.encode(), status)

    def objects(self) -> dict[str, int]:
        """Everything that has been made and not been given back."""
        return {name: self[name] for name in ("models", "tensors", "sets", "bytes", "tensor infos")}
