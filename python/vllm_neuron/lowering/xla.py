"""The XLA route's lowering: a captured graph becomes an HLO module.

PyTorch/XLA does it in a child process (`xla_worker`), as a rule of another interpreter with an
older torch. Protocol: docs/xla-worker.md.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm_neuron.lowering.process import (
    ChildFailed,
    ChildProcess,
    ProcessLowering,
)
from vllm_neuron.lowering.xla_interpreter import XlaInterpreter, foreign_environment
from vllm_neuron.lowering.xla_worker import PROTOCOL

if TYPE_CHECKING:
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.lowering.graph_message import EncodedGraph, GraphMessage
    from vllm_neuron.lowering.module import LoweredModule

__all__ = ["XlaLowering"]

# The worker's interpreter has torch but not this package. It gets this very installation, and none
# of the packages beside it, so that parent and worker are never of different versions.
_BOOTSTRAP = """
import importlib.util, sys
folder = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location(
    "vllm_neuron", folder + "/__init__.py", submodule_search_locations=[folder])
package = sys.modules["vllm_neuron"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from vllm_neuron.lowering.xla_worker import main
main(int(sys.argv[1]))
"""


# What PyTorch/XLA says when it dies of reading an input, which has no memory
# (pjrt_computation_client.cpp).
_READS_VALUES = ("TransferFromDevice", "HasValue()")


class XlaLowering(ProcessLowering):
    """Lowers graphs to HLO through one child process; see `ProcessLowering`.

    Args:
        interpreter: the worker's.
        logger: where time and memory of each lowering are written.
        options: those of `ProcessLowering`.
    """

    route = "XLA"
    lowers_encoded_graphs = False

    def __init__(
        self, interpreter: XlaInterpreter, *, logger: logging.Logger, **options: Any
    ) -> None:
        super().__init__(**options)
        self._interpreter = interpreter
        self._logger = logger

    def versions(self) -> dict[str, str]:
        """What decides the bytes of a module besides the graph; the child is not started."""
        found = self._interpreter.versions
        return {"torch": found["torch"], "torch-xla": found["torch-xla"]}

    def check(self) -> dict[str, Any]:
        """Have the worker lower a graph of one addition; its answer, with `module` if it did."""
        header = {
            "inputs": [["float32", [2]]],
            "literals": [],
            "nodes": [
                {
                    "op": "aten.add.Tensor",
                    "args": [["value", 0], ["value", 0], ["int", 1]],
                    "results": [[1, "float32", [2]]],
                    "dtypes": ["float32"],
                    "computed_wide": True,
                }
            ],
            "outputs": [1],
            "aliases": [],
        }
        with self._lock:
            try:
                answer, _ = self._ask("lower", header, b"")
            except ChildFailed as failure:
                return {"node": None, "reason": str(failure)}
        return answer

    def _start_child(self) -> ChildProcess:
        environment = foreign_environment() | {
            "PJRT_DEVICE": "CPU",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "OMP_NUM_THREADS": "1",
        }
        if self._interpreter.is_own:
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        package = Path(__file__).parent.parent
        command = [str(self._interpreter.path), "-P", "-c", _BOOTSTRAP, str(package)]
        return ChildProcess([*command, str(self._memory_limit_bytes)], environment)

    def _greet(self, child: ChildProcess, deadline: float) -> None:
        hello, _ = child.receive(deadline)
        if hello.get("protocol") != PROTOCOL:
            raise EOFError(f"protocol {hello.get('protocol')}, expected {PROTOCOL}")
        self._logger.info(
            "XLA worker started: process %d, torch %s, torch-xla %s (%s)",
            hello["pid"],
            hello["torch"],
            hello["torch-xla"],
            self._interpreter.origin,
        )

    def _attempt(
        self, graph: CapturedGraph | EncodedGraph, bucket: str
    ) -> tuple[GraphMessage, dict[str, Any], bytes]:
        # `lowers_encoded_graphs` is off: what the worker's torch lacks is decomposed here.
        graph = cast("CapturedGraph", graph)
        message, answer, data = super()._attempt(graph, bucket)
        if "missing" in answer:
            from vllm_neuron.lowering.decompositions import decompose

            message, answer, data = super()._attempt(decompose(graph, answer["missing"]), bucket)
        if "missing" in answer:
            operator, reason = next(iter(answer["missing"].items()))
            node = next(i for i, item in enumerate(message.origins) if item.op == operator)
            answer = {"node": node, "reason": f"{reason}, and it has no decomposition"}
        return message, answer, data

    def _locate(self, message: GraphMessage, reason: str | ChildFailed) -> dict[str, Any]:
        found = super()._locate(message, reason)
        if any(words in found["reason"] for words in _READS_VALUES):
            found["reason"] = (
                "PyTorch/XLA does not lower it: it wants to compute it at once, and there are no "
                "values yet"
            )
        return found

    def _module(
        self, graph: CapturedGraph | EncodedGraph, answer: dict[str, Any], data: bytes
    ) -> LoweredModule:
        self._logger.info(
            "PyTorch/XLA lowered %s: %d nodes in %.2f s, %.0f MiB at most in the worker",
            graph.bucket,
            answer["nodes"],
            answer["seconds"],
            answer["peak_memory_bytes"] / (1 << 20),
        )
        return super()._module(graph, answer, data)
