"""A cold start whose compiler runs a child process that takes long: `python -m ... ROOT`."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.pipeline.step_modules import CachedProjection, build, make_pipeline
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.errors import CompileError


class ChildCompiler(HostCompiler):
    """Runs `sleep` as others run neuronx-cc."""

    def __init__(self) -> None:
        super().__init__()
        self._children: list[subprocess.Popen[bytes]] = []

    def stop(self) -> None:
        for child in self._children:
            child.kill()

    def compile(self, module: Any, *, bucket: str, **options: Any) -> bytes:
        child = subprocess.Popen(["sleep", "300"])
        self._children.append(child)
        code = child.wait()
        raise CompileError(
            f"bucket {bucket}: sleep ended with {code}",
            bucket=bucket,
            command=("sleep", "300"),
            exit_code=code,
            log_path=None,
            reason="killed",
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    build(make_pipeline(Path(sys.argv[1]), compiler=ChildCompiler()), CachedProjection())
