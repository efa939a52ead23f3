"""Tracing the graphs of a start: the first here, the others in forked processes where that pays.

Dynamo is not thread-safe and takes seconds for a deep model, so graphs are traced side by side in
processes. Each is forked from this one, which has the model, once a first graph has been traced: by
then the tracer is loaded and warm, and how long it took tells whether a fork is worth its while. A
process answers with plain data (`EncodedGraph`, JSON) and ends. Whatever else happens to it, the
graph is traced here.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import selectors
import signal
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_neuron import _core
from vllm_neuron.binding import leaves
from vllm_neuron.compile_pool import fitting_workers
from vllm_neuron.errors import CaptureError, GraphKeyError, NeuronError
from vllm_neuron.lowering.frames import read_frame, write_frame
from vllm_neuron.premises import encode_premises
from vllm_neuron.trace_record import TraceRecord

if TYPE_CHECKING:
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.graph_job import GraphSpec
    from vllm_neuron.lowering.graph_message import EncodedGraph

__all__ = ["Traced", "trace", "trace_all"]

#: Memory that a tracing process may need of its own: a graph of 80 layers and what it writes to.
MEMORY_PER_WORKER = 2 << 30
#: Below this a trace is done sooner here than a process is forked and its answer read.
WORTH_A_PROCESS_S = 1.0
#: A process that takes this many times as long as the first trace hangs: another thread held a lock
#: while it was forked.
PATIENCE = 10.0
LEAST_PATIENCE_S = 60.0

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph that was traced.

    Attributes:
        graph: the graph.
        premises: what the trace took for granted, as the Precompile Cache keeps it.
        graph_digest: hex digest of the canonical graph; None if it has none.
        why_no_digest: why it has none.
        seconds: how long it took.
    """

    graph: CapturedGraph | EncodedGraph
    premises: bytes
    graph_digest: str | None
    why_no_digest: str | None
    seconds: float


def trace(spec: GraphSpec) -> Traced:
    """Trace one graph in this process.

    Raises:
        CaptureError: the step is not one static graph.
    """
    from vllm_neuron.capture import capture

    started = time.monotonic()
    graph = capture(spec.step, spec.args, bucket=spec.bucket)
    seconds = time.monotonic() - started
    digest = why = None
    try:
        digest = _core.graph_digest(graph.graph_module)
    except GraphKeyError as error:
        why = str(error)
    return Traced(graph, encode_premises(graph.premises), digest, why, seconds)


def trace_all(
    specs: Sequence[GraphSpec], *, workers: int, route: str, logger: logging.Logger
) -> Generator[tuple[int, Traced | CaptureError], None, None]:
    """Trace graphs, several at a time where that pays; nothing is left running at the end.

    Args:
        specs: the graphs.
        workers: processes at a time at most; 1 to trace in this one only. No more are used than
            cores and memory allow.
        route: the route's word in messages.
        logger: told of processes that failed.

    Yields:
        The index of a graph with its trace or the reason why there is none, as they come.
    """
    workers = min(workers, fitting_workers(MEMORY_PER_WORKER, most=workers))
    left = list(range(len(specs)))
    while left:
        index = left.pop(0)
        try:
            traced = trace(specs[index])
        except CaptureError as error:
            yield index, error
            continue
        yield index, traced
        if workers > 1 and len(left) > 1 and traced.seconds >= WORTH_A_PROCESS_S:
            patience_s = max(LEAST_PATIENCE_S, PATIENCE * traced.seconds)
            logger.info("Tracing %d more graphs, %d at a time", len(left), min(workers, len(left)))
            left.sort(key=lambda index: -_size(specs[index]))
            with _Processes(specs, workers, route, patience_s) as processes:
                left = yield from processes.run(left, logger)
            workers = 1


def _size(spec: GraphSpec) -> int:
    """Elements of the arguments: how much a graph works on."""
    found = (leaf for _, leaf in leaves(spec.args, "args"))
    return sum(leaf.numel() for leaf in found if hasattr(leaf, "numel"))


class _Processes:
    """The forked processes; all are gone when the context ends."""

    def __init__(
        self, specs: Sequence[GraphSpec], workers: int, route: str, patience_s: float
    ) -> None:
        self._specs = specs
        self._workers = workers
        self._route = route
        self._patience_s = patience_s
        self._running: list[_Process] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self._running:
            process.kill()
        self._selector.close()

    def run(
        self, waiting: list[int], logger: logging.Logger
    ) -> Generator[tuple[int, Traced | CaptureError], None, list[int]]:
        """Yield what the processes answer; return the graphs that got no answer."""
        waiting, unanswered = list(waiting), []
        while waiting or self._running:
            while waiting and len(self._running) < self._workers:
                try:
                    process = _Process(waiting[0], self._specs[waiting[0]], self._route)
                except OSError as error:
                    logger.warning(
                        "What is left is traced in this process, it cannot be forked: %s", error
                    )
                    unanswered += waiting
                    waiting = []
                    break
                del waiting[0]
                self._running.append(process)
                self._selector.register(process.stream, selectors.EVENT_READ, process)
            if not self._running:
                break
            nearest = min(process.started for process in self._running) + self._patience_s
            for key, _ in self._selector.select(max(0.0, nearest - time.monotonic())):
                process = key.data
                if process.read():
                    continue
                self._forget(process)
                answer = process.answer()
                if isinstance(answer, str):
                    logger.warning(
                        "%s is traced again in this process: the tracing process %s",
                        self._specs[process.index].bucket,
                        answer,
                    )
                    unanswered.append(process.index)
                else:
                    yield process.index, answer
            for process in [*self._running]:
                if time.monotonic() - process.started >= self._patience_s:
                    self._forget(process)
                    process.kill()
                    logger.warning(
                        "%s and what is left are traced in this process: a tracing process gave no "
                        "answer in %.0f s",
                        self._specs[process.index].bucket,
                        self._patience_s,
                    )
                    unanswered += [process.index, *waiting]
                    waiting = []
        return unanswered

    def _forget(self, process: _Process) -> None:
        self._running.remove(process)
        self._selector.unregister(process.stream)


class _Process:
    """One forked process with one graph."""

    def __init__(self, index: int, spec: GraphSpec, route: str) -> None:
        self.index = index
        self.started = time.monotonic()
        self._spec = spec
        self._data = bytearray()
        reading, writing = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if self._pid == 0:
            _be_a_process(spec, route, writing)
        os.close(writing)
        self.stream = os.fdopen(reading, "rb", buffering=0)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        data = self.stream.read(_READ_BYTES)
        self._data += data
        return bool(data)

    def answer(self) -> Traced | CaptureError | str:
        """Return what the process found, or how it ended in words."""
        self.stream.close()
        ended = self._wait()
        try:
            header, literals = read_frame(io.BytesIO(self._data))
        except EOFError:
            return ended
        if "traced" in header:
            return _decode(header["traced"], literals, self._spec.bucket)
        if "refused" in header:
            message, details = header["refused"]
            return CaptureError(message, **details)
        return f"failed with {header['failed']}"

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self.stream.close()

    def _wait(self) -> str:
        try:
            _, status = os.waitpid(self._pid, 0)
        except ChildProcessError:
            # Somebody in this process waits for every child; how this one ended is lost.
            return "ended without an answer"
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with code {code} and without an answer"


def _be_a_process(spec: GraphSpec, route: str, writing: int) -> NoReturn:
    """Trace in the forked process and end it, whatever happens.

    Nothing that waits there runs: exit handlers, destructors, buffers of files.
    """
    code = 1
    try:
        # Handlers of the server are about the server.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        import torch

        # The threads of the pool were not forked.
        torch.set_num_threads(1)
        header, literals = _answer(spec, route)
        with os.fdopen(writing, "wb") as stream:
            write_frame(stream, header, literals)
        code = 0
    except BaseException:
        # Nobody can catch it here; who traces again meets it again.
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _answer(spec: GraphSpec, route: str) -> tuple[dict[str, Any], bytes]:
    from vllm_neuron.lowering.graph_message import encode_graph

    try:
        traced = trace(spec)
        message = encode_graph(traced.graph, bucket=spec.bucket, route=route)
    except CaptureError as error:
        return {"refused": [str(error), error.details]}, b""
    except NeuronError as error:
        return {"failed": f"{type(error).__name__}: {error}"}, b""
    fields = {
        "record": traced.graph.record.to_json().decode(),
        "message": message.header,
        "origins": [asdict(origin) for origin in message.origins],
        "premises": traced.premises.decode(),
        "graph_digest": traced.graph_digest,
        "why_no_digest": traced.why_no_digest,
        "seconds": traced.seconds,
    }
    return {"traced": fields}, message.literals


def _decode(fields: dict[str, Any], literals: bytes, bucket: str) -> Traced:
    from vllm_neuron.lowering.graph_message import EncodedGraph, GraphMessage, NodeOrigin

    origins = tuple(NodeOrigin(**origin) for origin in fields["origins"])
    message = GraphMessage(fields["message"], literals, origins)
    record = TraceRecord.from_tree(json.loads(fields["record"]))
    return Traced(
        EncodedGraph(message, record, bucket),
        fields["premises"].encode(),
        fields["graph_digest"],
        fields["why_no_digest"],
        fields["seconds"],
    )
