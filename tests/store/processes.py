"""Other processes that use a store: fresh interpreters, and forked children under another user."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: What every snippet may use.
_PRELUDE = "import os, sys, time, json; from vllm_neuron import _core, errors\n"
#: Longest life of a child, in seconds.
LIFETIME_S = 60


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


def forked(function: Callable[[], object], *, user: int | None = None) -> None:
    """Run a function in a forked child, as another user if asked; raises if it raises there.

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
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "see the child's traceback"
