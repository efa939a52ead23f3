"""What every lowering process does: take requests, lower graphs, find the node at fault.

The route's own worker gives the function that lowers; messages are those of `frames`. Imports
nothing heavy, and works in any interpreter that the package supports.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from vllm_neuron.lowering.failure import LoweringFailure
from vllm_neuron.lowering.frames import read_frame, write_frame

__all__ = ["answer_stream", "operand_values", "serve"]

# Lowers the header of a graph message and its literals: the answer, and the module it is about.
Lower = Callable[[Mapping[str, Any], bytes], tuple[dict[str, Any], bytes]]


def answer_stream(memory_limit_bytes: int) -> BinaryIO:
    """Limit this process and return the stream of its answers, which nothing else may write to.

    Args:
        memory_limit_bytes: limit of the address space; an allocation beyond it fails.
    """
    answers = os.fdopen(os.dup(1), "wb")
    # What libraries print must not reach the answers.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return answers


def serve(lower: Lower, answers: BinaryIO) -> None:
    """Answer requests on standard input until it is closed."""
    while True:
        try:
            request, literals = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        if request["task"] == "locate":
            _locate(lower, request["graph"], answers)
        else:
            _answer(lower, request["graph"], literals, answers)


def operand_values(arguments: list[Any]) -> list[int]:
    """Numbers of the values among encoded arguments, in order."""
    numbers = []
    for kind, *rest in arguments:
        if kind == "value":
            numbers.append(rest[0])
        elif kind == "list":
            numbers += operand_values(rest[1])
    return numbers


def _answer(lower: Lower, graph: Mapping[str, Any], literals: bytes, answers: BinaryIO) -> None:
    try:
        fields, module = lower(graph, literals)
    except LoweringFailure as failure:
        write_frame(answers, {"node": failure.node, "reason": failure.reason})
    except MemoryError:
        write_frame(answers, {"node": None, "reason": "the memory limit was reached"})
    else:
        write_frame(answers, fields, module)


def _locate(lower: Lower, graph: Mapping[str, Any], answers: BinaryIO) -> None:
    """Lower each node alone, saying first which; the last one said is at fault."""
    for index, alone in _lone_nodes(graph):
        write_frame(answers, {"progress": index})
        try:
            lower(alone, b"")
        except LoweringFailure as failure:
            write_frame(answers, {"node": index, "reason": failure.reason})
            return
    write_frame(answers, {"node": None, "reason": "no single operator is at fault"})


def _lone_nodes(graph: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each node as a graph of its own, with its index; equal ones once."""
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
        if signature not in seen:
            seen.add(signature)
            yield index, alone


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
