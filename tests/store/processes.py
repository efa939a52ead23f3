"""Other processes that use a store: fresh interpreters, and forked children under another user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.scale import SCALE

#: What every snippet may use.
_PRELUDE = "import os, sys, time, json; from vllm_neuron import _core, errors\n"
REPOSITORY = Path(__file__).parents[2]
#: Options of `start` for a snippet that imports from `tests`.
IN_REPOSITORY = {"cwd": REPOSITORY, "env": os.environ | {"PYTHONPATH": str(REPOSITORY)}}
#: Longest life of a child, in seconds.
LIFETIME_S = 60 * max(1, SCALE)


def start(code: str, *args: object, prefix: tuple[str, ...] = (), **options: Any) -> Any:
    """Start a fresh interpreter on a snippet; `sys.argv[1:]` are `args` as text.

    Args:
        code: Python source; `os`, `sys`, `time`, `json`, `_core` and `errors` are imported.
        args: arguments of the snippet.
        prefix: command in front of the interpreter, such as `unshare`.
        options: of `subprocess.Popen`.
    """
    command = [*prefix, sys.executable, "-c", _PRELUDE + code, *map(str, args)]
    options = {"stdout": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, **options)


def finish(child: Any) -> str:
    """Return what a child printed; raises if it failed or did not end."""
    try:
        output, _ = child.communicate(timeout=LIFETIME_S)
    finally:
        child.kill()
    assert child.returncode == 0, f"exit code {child.returncode}"
    return output


def begun(function: Callable[[], object], *, user: int | None = None) -> int:
    """Start a function in a forked child, as another user if asked; return the child's id.

    A forked child needs to read none of the interpreter's files, which another user may not be
    able to.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            function()
            status = 0
        except BaseException:  # noqa: BLE001 - a child must never return into the test
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def ended(pid: int) -> None:
    """Wait for a forked child; raises if it raised, or if it does not end."""
    deadline_s = time.monotonic() + LIFETIME_S
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"process {pid} did not end within {LIFETIME_S} s")
        time.sleep(0.002)
    assert os.waitstatus_to_exitcode(found[1]) == 0, "see the child's traceback"


def forked(function: Callable[[], object], *, user: int | None = None) -> None:
    """Run a function in a forked child, as another user if asked; raises if it raises there."""
    ended(begun(function, user=user))
