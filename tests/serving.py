"""A real `vllm serve` process on a loopback port, and requests to it over HTTP.

    with Server(checkpoint, cache_root=folder / "cache", folder=folder) as server:
        server.complete("hello", max_tokens=8)["choices"][0]["text"]

The process gets none of the caller's product settings, writes one log file, and is gone with all
of its children when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import requests

SMALL: Final = (
    *("--max-model-len", "256", "--max-num-batched-tokens", "256"),
    *("--max-num-seqs", "4", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(16 << 20)),
)
"""Options that keep a server of a tiny model small: two prefill and three decode buckets, and
16 MiB of KV cache instead of a share of the machine's memory."""

MARK: Final = "SERVING_PROCESS_ID"
"""Environment variable by which the processes of one server are found, whatever their group."""

SETTINGS: Final = re.compile(r"(VLLM|NEURON|NKI|TORCH|TORCHINDUCTOR|PYTORCH|HF|CUDA)_|PYTHONPATH$")
"""Variables of the caller that would change what the server does."""

RECORD: Final = re.compile(
    r"(?:\((?P<process>[^()]+?) pid=(?P<pid>\d+)\) )?"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[(?P<source>[^\]]+)\] (?P<message>.*)"
)
"""A line of vLLM's default log format (`vllm.logger`, `vllm.logging_utils.formatter`)."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One line of the server's log; `process` is None in what is logged before it has a name."""

    process: str | None
    level: str
    source: str
    message: str


class ServerFailedError(AssertionError):
    """The server did not become ready. `exit_code` is None when it was alive but not ready."""

    def __init__(self, reason: str, *, exit_code: int | None, log_path: Path) -> None:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-40:])
        super().__init__(f"{reason}\nThe log is {log_path}; its end:\n{tail}")
        self.exit_code = exit_code
        self.log_path = log_path


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(
    settings: Mapping[str, str | None], *, cache_root: Path, fork: bool = False
) -> dict[str, str]:
    """Return the environment of a server: the caller's without settings, and the given settings.

    Args:
        settings: product settings; None leaves a variable unset. The host emulator and the native
            route are chosen unless they say otherwise.
        cache_root: `VLLM_CACHE_ROOT`.
        fork: start the engine process by fork, which spares it the second import of vLLM.
    """
    chosen: dict[str, str | None] = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(cache_root),
        "VLLM_NEURON_DEVICE": "host",
        "VLLM_NEURON_BACKEND": "neuron_native",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork" if fork else None,
        **settings,
    }
    inherited = {k: v for k, v in os.environ.items() if not SETTINGS.match(k)}
    return inherited | {k: v for k, v in chosen.items() if v is not None}


class Server:
    """One start of `vllm serve`; a restart is another object with the same `cache_root`.

    Args:
        model: checkpoint folder.
        cache_root: `VLLM_CACHE_ROOT` of the server.
        folder: where the log goes.
        arguments: command line after the model.
        environment: product settings, see `server_environment`.
        port: loopback port; a free one unless given.
        fork: see `server_environment`.
        start_timeout_s: how long it may take to become ready.
    """

    def __init__(
        self,
        model: Path,
        *,
        cache_root: Path,
        folder: Path,
        arguments: Sequence[str] = SMALL,
        environment: Mapping[str, str | None] | None = None,
        port: int | None = None,
        fork: bool = False,
        start_timeout_s: float = 300,
    ) -> None:
        self.model = model
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_timeout_s = start_timeout_s
        self.ready_s: float | None = None
        self._id = uuid.uuid4().hex
        self.log_path = folder / f"server-{self._id[:8]}.log"
        self.command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--served-model-name", "model", *arguments]
        self.environment = server_environment(environment or {}, cache_root=cache_root, fork=fork)
        self.environment[MARK] = self._id
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._http = requests.Session()
        self._http.trust_env = False

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the process

    def start(self) -> None:
        """Start the process, without waiting for it to be ready."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._started_at = time.monotonic()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The API server process."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    def wait_ready(self, waiting: Callable[[float], None] | None = None) -> None:
        """Wait until the server answers.

        Args:
            waiting: called again and again meanwhile, with the seconds since the start.

        Raises:
            ServerFailedError: it ended, or the time is over.
        """
        deadline = self._started_at + self.start_timeout_s
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                reason = f"the server ended with exit code {code} before it was ready"
                raise ServerFailedError(reason, exit_code=code, log_path=self.log_path)
            with contextlib.suppress(requests.ConnectionError, requests.Timeout):
                if self._http.get(f"{self.url}/health", timeout=5).ok:
                    self.ready_s = time.monotonic() - self._started_at
                    return
            if waiting is not None:
                waiting(time.monotonic() - self._started_at)
            time.sleep(0.05)
        reason = f"the server was not ready after {self.start_timeout_s:.0f} s"
        raise ServerFailedError(reason, exit_code=None, log_path=self.log_path)

    def wait_exit(self, timeout_s: float | None = None) -> int:
        """Wait for a server that is expected to end by itself.

        Returns:
            Its exit code; negative is a signal.

        Raises:
            ServerFailedError: it runs on.
        """
        timeout_s = self.start_timeout_s if timeout_s is None else timeout_s
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            reason = f"the server still ran after {timeout_s:.0f} s"
            raise ServerFailedError(reason, exit_code=None, log_path=self.log_path) from None

    def wait_for_log(self, pattern: str, *, timeout_s: float = 300) -> str:
        """Wait for a log line that a regular expression finds.

        Returns:
            The line.

        Raises:
            ServerFailedError: the server ended or the time is over without such a line.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            for line in self.log_lines():
                if re.search(pattern, line):
                    return line
            if ended or time.monotonic() > deadline:
                raise ServerFailedError(
                    f"no log line matches {pattern!r}",
                    exit_code=self.process.poll(),
                    log_path=self.log_path,
                )
            time.sleep(0.05)

    def stop(self, *, timeout_s: float = 30) -> int:
        """Ask the server to end (SIGTERM), as an operator does.

        Returns:
            Its exit code.

        Raises:
            ServerFailedError: it runs on.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def kill(self) -> None:
        """End the server and all of its children at once (SIGKILL), as a power cut does."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Return the processes of this server that run: API server, engine, workers, children."""
        mark = f"{MARK}={self._id}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                # Gone meanwhile, or another user's.
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Stop the server if it runs and see to it that nothing of it is left."""
        if self._process is not None:
            try:
                if self._process.poll() is None:
                    with contextlib.suppress(ServerFailedError):
                        self.stop(timeout_s=15)
            finally:
                # Also when the wait was interrupted.
                self.kill()
                self._process.wait()
                self._http.close()

    # -- the log

    def log_lines(self) -> list[str]:
        """Return the log so far."""
        return self.log_path.read_text(errors="replace").splitlines()

    def records(self) -> list[LogRecord]:
        """Return what vLLM and its plugins logged so far; other output is left out."""
        found = (RECORD.match(line) for line in self.log_lines())
        return [
            LogRecord(match["process"], match["level"], match["source"], match["message"])
            for match in found
            if match
        ]

    def messages(self, level: str | None = None) -> list[str]:
        """Return the logged messages, of one level or all."""
        return [r.message for r in self.records() if level in (None, r.level)]

    # -- requests

    def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float = 300
    ) -> requests.Response:
        """Send a JSON request and return the response, whatever its status."""
        return self._http.post(f"{self.url}{path}", json=dict(body), timeout=timeout_s)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> dict[str, Any]:
        """Ask for a completion, greedy unless `temperature` is given.

        Args:
            prompt: text or token ids.
            options: other fields of the request (`max_tokens`, `return_token_ids`, ...).

        Returns:
            The response body.

        Raises:
            requests.HTTPError: the status is not 200; the body is in the message.
        """
        return self._ask("/v1/completions", {"prompt": prompt, **options})

    def complete_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Ask for completions at the same time, each by its own connection."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def chat(self, text: str, **options: Any) -> dict[str, Any]:
        """Ask for the answer to one user message; otherwise as `complete`."""
        messages = [{"role": "user", "content": text}]
        return self._ask("/v1/chat/completions", {"messages": messages, **options})

    def chat_stream(self, text: str, **options: Any) -> Iterator[str]:
        """Yield the pieces of a streamed answer to one user message as they arrive."""
        body = {"model": "model", "temperature": 0, "stream": True, **options}
        body["messages"] = [{"role": "user", "content": text}]
        address = f"{self.url}/v1/chat/completions"
        with requests.post(address, json=body, timeout=300, stream=True) as response:
            _raise_for_status(response)
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece

    def metrics(self) -> str:
        """Return `/metrics`."""
        response = self._http.get(f"{self.url}/metrics", timeout=30)
        _raise_for_status(response)
        return response.text

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        # Not through the session: requests' sessions are not for several threads at once.
        body = {"model": "model", "temperature": 0, **body}
        response = requests.post(f"{self.url}{path}", json=body, timeout=300)
        _raise_for_status(response)
        return dict(response.json())


def _raise_for_status(response: requests.Response) -> None:
    if not response.ok:
        text = f"{response.url}: HTTP {response.status_code}: {response.text}"
        raise requests.HTTPError(text, response=response)
