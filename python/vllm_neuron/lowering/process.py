"""A route's lowering in a child process: started at the first graph, limited, replaced.

Whatever happens to the child is an error of one graph. It gets the graph as data, never a weight.
What differs between the routes, `native` and `xla`, is how the child is started and what it says.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from vllm_neuron.lowering.frames import read_frame, write_frame
from vllm_neuron.lowering.module import LoweredModule

if TYPE_CHECKING:
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.errors import LoweringError
    from vllm_neuron.lowering.graph_message import EncodedGraph, GraphMessage

__all__ = ["ChildFailed", "ChildProcess", "ProcessLowering"]

_TIMEOUT_S = 600.0
_MEMORY_LIMIT_BYTES = 16 << 30


class ChildFailed(Exception):
    """The child gave no answer.

    Args:
        reason: how it ended.
        progress: the node that it had announced last, or None.
        timed_out: whether it was killed for taking too long.
    """

    def __init__(self, reason: str, progress: int | None, *, timed_out: bool) -> None:
        super().__init__(reason)
        self.progress = progress
        self.timed_out = timed_out


class ProcessLowering:
    """Lowers graphs through one child process.

    Safe to share between threads; graphs are lowered one at a time.

    Args:
        timeout_s: seconds that one graph may take before its child is killed.
        memory_limit_bytes: address space of the child.
    """

    #: The word of the route in messages and in modules.
    route: str
    #: Whether a graph may come as an `EncodedGraph`.
    lowers_encoded_graphs = True

    def __init__(
        self, *, timeout_s: float = _TIMEOUT_S, memory_limit_bytes: int = _MEMORY_LIMIT_BYTES
    ) -> None:
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child process; a later `lower` starts another."""
        with self._lock:
            self._drop_child()
            self._is_stopped = False

    def stop(self) -> None:
        """Kill the child process in the middle of its work, from any thread, until `close`.

        A `lower` that is in progress raises LoweringError.
        """
        self._is_stopped = True
        child = self._child
        if child is not None:
            child.kill()

    @property
    def child_pid(self) -> int | None:
        """Process id of the running child, or None."""
        return self._child.pid if self._child is not None else None

    def versions(self) -> dict[str, str]:
        """What decides the bytes of a module besides the graph; the child is not started."""
        raise NotImplementedError

    def lower(self, graph: CapturedGraph | EncodedGraph, *, bucket: str) -> LoweredModule:
        """Lower one graph.

        Raises:
            LoweringError: it names the operator, its source line and the bucket. The lowering can
                be used again afterwards.
        """
        message, answer, data = self._attempt(graph, bucket)
        if "module" not in answer:
            raise self._error(bucket, message, answer)
        return self._module(graph, answer, data)

    def _attempt(
        self, graph: CapturedGraph | EncodedGraph, bucket: str
    ) -> tuple[GraphMessage, dict[str, Any], bytes]:
        """Send a graph: what was sent, the answer and the module that it is about."""
        from vllm_neuron.lowering.graph_message import EncodedGraph, encode_graph

        if isinstance(graph, EncodedGraph):
            message = graph.message
        else:
            message = encode_graph(graph, bucket=bucket, route=self.route)
        with self._lock:
            answer, data = self._lower(message)
        return message, answer, data

    def _module(
        self, graph: CapturedGraph | EncodedGraph, answer: dict[str, Any], data: bytes
    ) -> LoweredModule:
        record = graph.record
        return LoweredModule(
            route=self.route,
            data=data,
            inputs=tuple(item.spec for item in record.inputs),
            outputs=record.outputs,
            aliases=dict(record.aliases),
        )

    def _error(
        self, bucket: str, message: GraphMessage, answer: Mapping[str, Any]
    ) -> LoweringError:
        from vllm_neuron.lowering.graph_message import lowering_error

        index = answer["node"]
        origin = message.origins[index] if index is not None else None
        return lowering_error(bucket, origin, answer["reason"], route=self.route)

    def _lower(self, message: GraphMessage) -> tuple[dict[str, Any], bytes]:
        """The module, or the node at fault and the reason."""
        for attempt in (1, 2):
            try:
                answer, data = self._ask("lower", message.header, message.literals)
            except ChildFailed as failure:
                answer, data = self._locate(message, failure), b""
                # A child that something else ended (a person, a full memory) says nothing about
                # the graph: one more try.
                if answer["node"] is None and not failure.timed_out and attempt == 1:
                    continue
            else:
                if "reason" in answer and answer["node"] is None:
                    answer = self._locate(message, answer["reason"])
            break
        return answer, data

    def _ask(
        self, task: str, header: Mapping[str, Any], literals: bytes
    ) -> tuple[dict[str, Any], bytes]:
        deadline = time.monotonic() + self._timeout_s
        progress = None
        try:
            if self._child is None:
                self._child = self._start_child()
                self._greet(self._child, deadline)
            if self._is_stopped:
                self._drop_child()
                raise ChildFailed("the start was stopped", None, timed_out=True)
            self._child.send({"task": task, "graph": header}, literals)
            while True:
                answer, data = self._child.receive(deadline)
                if "progress" not in answer:
                    return answer, data
                progress = answer["progress"]
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            assert self._child is not None
            timed_out = isinstance(error, TimeoutError)
            reason = self._child.obituary(timed_out=timed_out)
            self._drop_child()
            raise ChildFailed(reason, progress, timed_out=timed_out) from None
        except BaseException:
            # Its answer would be taken for that of the next request.
            self._drop_child()
            raise

    def _start_child(self) -> ChildProcess:
        raise NotImplementedError

    def _greet(self, child: ChildProcess, deadline: float) -> None:
        """Hear what a new child says first; nothing, unless the route's child speaks first."""

    def _locate(self, message: GraphMessage, reason: str | ChildFailed) -> dict[str, Any]:
        """Find the node at fault by lowering every node alone."""
        try:
            found, _ = self._ask("locate", message.header, message.literals)
        except ChildFailed as second:
            return {"node": second.progress, "reason": str(reason)}
        return found if found["node"] is not None else {"node": None, "reason": str(reason)}

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class ChildProcess:
    """A child process and its pipes."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Dropped when the file is closed; compilers write their last words there.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environment),
        )
        self.pid = self._process.pid

    def send(self, header: dict[str, Any], blob: bytes) -> None:
        """Send one message; raises BrokenPipeError if the child is gone."""
        write_frame(_pipe(self._process.stdin), header, blob)

    def receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        """Wait for one message; `deadline` is a time of the monotonic clock.

        Raises:
            TimeoutError: nothing came in time.
            EOFError: the child is gone.
        """
        stream = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
        return read_frame(stream)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def obituary(self, *, timed_out: bool) -> str:
        """How the process ended, in a sentence without a full stop."""
        if timed_out:
            self._process.kill()
            self._process.wait()
            return "the lowering process gave no answer in time and was killed"
        code = self._process.wait(timeout=30)
        how = f"exited with code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        said = next((line for line in lines if _is_telling(line)), None)
        said = said or next((line for line in reversed(lines) if line.strip()), "no last words")
        return f"the lowering process {how} ({said.strip()[:200]})"

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            try:
                _pipe(stream).close()
            except BrokenPipeError:
                # A request was still buffered for a process that is gone.
                continue
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def _is_telling(line: str) -> bool:
    """Whether a line of standard error says why: LLVM's, the allocator's, a failed XLA check."""
    return any(word in line for word in ("LLVM ERROR", "bad_alloc", "Check failed"))


def _pipe(stream: Any) -> BinaryIO:
    return stream
