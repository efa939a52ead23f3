"""A process that asks a compilation cache for NEFFs, with a compiler that does as it is told.

    python -m tests.pipeline.flight_process '{"root": ..., "keys": ["a"], "seconds": 1}'

Each call of its compiler appends a line to `root/calls`: key, process id, begin and end. It prints
one JSON object: per key whether it was a hit, the digest of the NEFF, or the error; and how long it
waited. It imports no torch, so that many of them are cheap.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_neuron import _core
from vllm_neuron.cache import keys
from vllm_neuron.cache.compilation import CompilationCache
from vllm_neuron.cache.tiers import Tiers
from vllm_neuron.errors import CompileError, NeuronError
from vllm_neuron.lowering.module import LoweredModule

REPOSITORY = Path(__file__).parents[2]
MODULE = LoweredModule(route="native", data=b"module", inputs=(), outputs=(), aliases={})


def run(task: dict[str, Any], *, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start such a process; `prefix` is a command in front, such as `unshare`."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.pipeline.flight_process", json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
    )


def answer(process: subprocess.Popen[str], *, timeout_s: float = 300) -> tuple[dict[str, Any], str]:
    """What a process printed, and its log."""
    out, log = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, log
    return json.loads(out), log


def calls(root: Path) -> list[dict[str, Any]]:
    """The calls of the compilers of all processes."""
    path = root / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _compile(task: dict[str, Any], name: str) -> bytes:
    begun = time.time()
    call = {"key": name, "pid": os.getpid()}
    with (Path(task["root"]) / "calls").open("a") as log:
        log.write(json.dumps({**call, "begin": begun}) + "\n")
    time.sleep(task.get("seconds", 0))
    with (Path(task["root"]) / "ends").open("a") as log:
        log.write(json.dumps({**call, "begin": begun, "end": time.time()}) + "\n")
    if "failure" in task:
        reason = task["failure"]
        raise CompileError(
            f"bucket {name}: neuronx-cc exited with status 70: {reason}",
            bucket=name,
            command=("neuronx-cc", "compile"),
            exit_code=70,
            log_path=None,
            reason=reason,
        )
    return _core.write_neff(
        name=name,
        target="host",
        compiler_version="fake",
        inputs=[("input0", "float32", (1,))],
        outputs=[("output0", "float32", (1,))],
        members=[("writer", str(os.getpid()).encode())],
    )


def main(task: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logger = logging.getLogger("flight")
    tiers = Tiers(Path(task["root"]) / "cache", name="Compilation cache", logger=logger)
    cache = CompilationCache(tiers, logger=logger, timeout_s=task.get("timeout_s", 600))
    assert cache.flights is not None
    flights = cache.flights
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        factors = {"module": name}

        def compile_module() -> bytes:
            with flights.slot(task.get("workers", 8), name):
                return _compile(task, name)

        try:
            neff = cache.neff(
                keys.key_of("neff", factors),
                factors,
                MODULE,
                compile_module,
                bucket=name,
                describe={"bucket": name, "writer": os.getpid()},
            )
            found[name] = {"hit": neff.hit, "digest": _core.digest(neff.data)}
        except NeuronError as error:
            found[name] = {"error": str(error), "class": type(error).__name__, **error.details}

    with ThreadPoolExecutor(task.get("threads", 1)) as pool:
        list(pool.map(ask, task["keys"]))
    print(json.dumps({"found": found, "waits": flights.waits, "waited_s": flights.waited_s}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
