"""The native route's lowering: a captured graph becomes a StableHLO module.

torch-mlir does it in a child process (`native_worker`) of the same interpreter; this process
imports no torch-mlir.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from vllm_neuron.lowering.process import ChildProcess, ProcessLowering

__all__ = ["NativeLowering"]


class NativeLowering(ProcessLowering):
    """Lowers graphs to StableHLO through one child process; see `ProcessLowering`."""

    route = "native"
    worker = "vllm_neuron.lowering.native_worker"

    def versions(self) -> dict[str, str]:
        """What decides the bytes of a module besides the graph; the child is not started."""
        return {
            "torch-mlir": importlib.metadata.version("torch-mlir"),
            "jaxlib": importlib.metadata.version("jaxlib"),
        }

    def _start_child(self) -> ChildProcess:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        limit = str(self._memory_limit_bytes)
        return ChildProcess([sys.executable, "-P", "-m", self.worker, limit], environment)
