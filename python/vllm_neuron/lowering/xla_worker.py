"""The XLA route's lowering process: PyTorch/XLA, in an interpreter of its own.

PyTorch/XLA ended with torch 2.9, so this process has an older torch than the server. Nothing but
this package's lowering is imported besides it. Protocol: docs/xla-worker.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

from vllm_neuron.lowering.frames import write_frame
from vllm_neuron.lowering.worker import answer_stream, serve

__all__ = ["PROTOCOL", "main"]

PROTOCOL = 1
"""Version of what parent and worker say to each other (docs/xla-worker.md)."""


def main(memory_limit_bytes: int) -> None:
    """Say who this is, then answer requests on standard input until it is closed.

    Args:
        memory_limit_bytes: limit of this process's address space; an allocation beyond it fails.
    """
    answers = answer_stream(memory_limit_bytes)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torch-xla")}
    write_frame(answers, {"protocol": PROTOCOL, "pid": os.getpid(), **versions})
    serve(_lower, answers)


def _lower(graph: Mapping[str, Any], literals: bytes) -> tuple[dict[str, Any], bytes]:
    from vllm_neuron.lowering.xla_graph import lower_graph, missing_operators

    started = time.monotonic()
    if missing := missing_operators(graph):
        return {"missing": missing}, b""
    module = lower_graph(graph, literals)
    return {
        "module": True,
        "nodes": len(graph["nodes"]),
        "seconds": round(time.monotonic() - started, 3),
        # Kilobytes on Linux (getrusage(2)).
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }, module


if __name__ == "__main__":
    main(int(sys.argv[1]))
