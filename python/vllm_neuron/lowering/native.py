"""The native route's lowering: a captured graph becomes a StableHLO module.

torch-mlir does it in a child process (`native_worker`) that is started at the first graph, reused
for all of them, and replaced when it dies, hangs or eats too much memory. The child gets the
graph as data, never a weight, and this process imports no torch-mlir.
"""

from __future__ import annotations

import importlib.metadata
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from vllm_neuron.lowering.frames import read_frame, write_frame
from vllm_neuron.lowering.module import LoweredModule

if TYPE_CHECKING:
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.errors import LoweringError
    from vllm_neuron.lowering.graph_message import GraphMessage

__all__ = ["NativeLowering"]

_TIMEOUT_S = 600.0
_MEMORY_LIMIT_BYTES = 16 << 30


class _ChildFailed(Exception):
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


class NativeLowering:
    """Lowers graphs through one child process.

    Safe to share between threads; graphs are lowered one at a time.

    Args:
        timeout_s: seconds that one graph may take before its child is killed.
        memory_limit_bytes: address space of the child.
    """

    def __init__(
        self, *, timeout_s: float = _TIMEOUT_S, memory_limit_bytes: int = _MEMORY_LIMIT_BYTES
    ) -> None:
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def __enter__(self) -> NativeLowering:
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
        return {
            "torch-mlir": importlib.metadata.version("torch-mlir"),
            "jaxlib": importlib.metadata.version("jaxlib"),
        }

    def lower(self, graph: CapturedGraph, *, bucket: str) -> LoweredModule:
        """Lower one graph.

        Raises:
            LoweringError: it names the operator, its source line and the bucket. The lowering can
                be used again afterwards.
        """
        from vllm_neuron.lowering.graph_message import encode_graph

        message = encode_graph(graph, bucket=bucket)
        with self._lock:
            answer, data = self._lower(message)
        if "module" not in answer:
            raise _error(bucket, message, answer)
        record = graph.record
        return LoweredModule(
            route="native",
            data=data,
            inputs=tuple(item.spec for item in record.inputs),
            outputs=record.outputs,
            aliases=dict(record.aliases),
        )

    def _lower(self, message: GraphMessage) -> tuple[dict[str, Any], bytes]:
        """The module, or the node at fault and the reason."""
        for attempt in (1, 2):
            try:
                answer, data = self._ask("lower", message)
            except _ChildFailed as failure:
                answer, data = self._locate(message, failure), b""
                # A child that something else ended (a person, a full memory) says nothing about
                # the graph: one more try.
                if answer["node"] is None and not failure.timed_out and attempt == 1:
                    continue
            else:
                if "module" not in answer and answer["node"] is None:
                    answer = self._locate(message, answer["reason"])
            break
        return answer, data

    def _ask(self, task: str, message: GraphMessage) -> tuple[dict[str, Any], bytes]:
        if self._child is None:
            self._child = _Child(self._memory_limit_bytes)
        if self._is_stopped:
            self._drop_child()
            raise _ChildFailed("the start was stopped", None, timed_out=True)
        deadline = time.monotonic() + self._timeout_s
        progress = None
        try:
            self._child.send({"task": task, "graph": message.header}, message.literals)
            while True:
                answer, data = self._child.receive(deadline)
                if "progress" not in answer:
                    return answer, data
                progress = answer["progress"]
        except (EOFError, BrokenPipeError, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError)
            reason = self._child.obituary(timed_out=timed_out)
            self._drop_child()
            raise _ChildFailed(reason, progress, timed_out=timed_out) from None

    def _locate(self, message: GraphMessage, reason: str | _ChildFailed) -> dict[str, Any]:
        """Find the node at fault by lowering every node alone."""
        try:
            found, _ = self._ask("locate", message)
        except _ChildFailed as second:
            return {"node": second.progress, "reason": str(reason)}
        return found if found["node"] is not None else {"node": None, "reason": str(reason)}

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Child:
    """The child process and its pipes."""

    worker = "vllm_neuron.lowering.native_worker"

    def __init__(self, memory_limit_bytes: int) -> None:
        # Dropped when the file is closed; LLVM writes its last words there.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                self.worker,
                str(memory_limit_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )
        self.pid = self._process.pid

    def send(self, header: dict[str, Any], blob: bytes) -> None:
        write_frame(_pipe(self._process.stdin), header, blob)

    def receive(self, deadline: float) -> tuple[dict[str, Any], bytes]:
        stream = _pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
        return read_frame(stream)

    def kill(self) -> None:
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
        said = next((line for line in lines if "LLVM ERROR" in line or "bad_alloc" in line), None)
        said = said or next((line for line in reversed(lines) if line.strip()), "no last words")
        return f"the lowering process {how} ({said.strip()[:200]})"

    def close(self) -> None:
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


def _pipe(stream: Any) -> BinaryIO:
    return stream


def _error(bucket: str, message: GraphMessage, answer: dict[str, Any]) -> LoweringError:
    from vllm_neuron.lowering.graph_message import lowering_error

    index = answer["node"]
    node = message.nodes[index] if index is not None else None
    return lowering_error(bucket, node, answer["reason"])
