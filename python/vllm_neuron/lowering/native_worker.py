"""The lowering process: torch-mlir and jaxlib's MLIR, without torch.

torch-mlir ends its process on some inputs. Here that costs one graph an error message, not a
server its life. Started by `native.NativeLowering`; messages are those of `frames`.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from vllm_neuron.lowering.frames import read_frame, write_frame

__all__ = ["main"]


def main(memory_limit_bytes: int) -> None:
    """Answer requests on standard input until it is closed.

    Args:
        memory_limit_bytes: limit of this process's address space; an allocation beyond it fails.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # What libraries print must not reach the answers.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            request, literals = read_frame(requests)
        except EOFError:
            return
        if request["task"] == "locate":
            _locate(request["graph"], literals, answers)
        else:
            _answer(request["graph"], literals, answers)


def _answer(graph: dict[str, Any], literals: bytes, answers: BinaryIO) -> None:
    from vllm_neuron.lowering.torch_dialect import LoweringFailure

    try:
        module = _lower(graph, literals)
    except LoweringFailure as failure:
        write_frame(answers, {"node": failure.node, "reason": failure.reason})
    except MemoryError:
        write_frame(answers, {"node": None, "reason": "the memory limit was reached"})
    else:
        write_frame(answers, {"module": True}, module)


def _lower(graph: dict[str, Any], literals: bytes) -> bytes:
    from vllm_neuron.lowering.ops import own_lowering
    from vllm_neuron.lowering.stablehlo_module import finish_module
    from vllm_neuron.lowering.torch_dialect import import_graph, lower_to_stablehlo

    imported = import_graph(graph, is_own=lambda node: own_lowering(node) is not None)
    text = lower_to_stablehlo(imported.module)
    return finish_module(text, graph, literals, imported.own)


def _locate(graph: dict[str, Any], literals: bytes, answers: BinaryIO) -> None:
    """Lower each node alone, saying first which; the last one said is at fault."""
    from vllm_neuron.lowering.torch_dialect import LoweringFailure, operand_values

    specs = dict(enumerate(graph["inputs"]))
    specs |= {number: [dtype, shape] for number, dtype, shape in graph["literals"]}
    for node in graph["nodes"]:
        specs |= {item[0]: item[1:] for item in node["results"] if item is not None}
    seen = set()
    for index, node in enumerate(graph["nodes"]):
        operands = list(dict.fromkeys(operand_values(node["args"])))
        renumbered = {number: place for place, number in enumerate(operands)}
        results = [item for item in node["results"] if item is not None]
        for result in results:
            renumbered[result[0]] = len(renumbered)
        alone = {
            "inputs": [specs[number] for number in operands],
            "literals": [],
            "nodes": [_renumber(node, renumbered)],
            "outputs": [renumbered[result[0]] for result in results],
            "aliases": [],
        }
        signature = repr(alone)
        if signature in seen:
            continue
        seen.add(signature)
        write_frame(answers, {"progress": index})
        try:
            _lower(alone, b"")
        except LoweringFailure as failure:
            write_frame(answers, {"node": index, "reason": failure.reason})
            return
    write_frame(answers, {"node": None, "reason": "no single operator is at fault"})


def _renumber(node: dict[str, Any], renumbered: dict[int, int]) -> dict[str, Any]:
    def argument(item: list[Any]) -> list[Any]:
        kind, *rest = item
        if kind == "value":
            return ["value", renumbered[rest[0]]]
        if kind == "list":
            return ["list", rest[0], [argument(inner) for inner in rest[1]]]
        return item

    results = [item and [renumbered[item[0]], *item[1:]] for item in node["results"]]
    return node | {"args": [argument(item) for item in node["args"]], "results": results}


if __name__ == "__main__":
    main(int(sys.argv[1]))
