"""Tokens per second of the host emulator, and of vLLM's CPU backend beside it.

    python -m benches.tokens_per_second [--reference-python PATH] [--model FOLDER]
        [--dtype float32,bfloat16] [--batch 1,16] [--rounds 3] [--tokens 32] [--json FILE]

PATH is the interpreter of another environment that has vLLM for CPU and not vllm-neuron. Each
side has one engine per dtype, in a process of its own, and they take turns: in a round, every batch
is run by one and then by the other. A batch is prompts of 128 tokens, prefilled at once as far as
512 tokens a step go, then decoded greedily. By default the model is SmolLM2-135M-Instruct as
`make demo` unpacks it.

For prefill and decode it prints tokens per second by the clock, the median of all rounds, and
processor time per token, which other load disturbs less; the threads of OpenMP wait for work on
the processor, and their waiting is in it.

These are figures of the emulator on this machine. They say nothing about Trainium.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 128
STEP_TOKENS = 512
MODEL = Path.home() / ".cache/vllm-neuron/models/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Phase:
    """Prefill or decode of one batch by one side, in one round or as medians of all."""

    tokens_per_second: float
    processor_ms_per_token: float


def run_batch(engine: Any, name: str, *, batch: int, tokens: int) -> dict[str, Any]:
    """Prefill and decode a batch once; returns both phases and the tokens of the first prompt."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=0
    )
    vocabulary = engine.model_config.get_vocab_size()
    for index in range(batch):
        prompt = [(7 * at + 13 * index) % vocabulary for at in range(PROMPT_TOKENS)]
        engine.add_request(f"{name}-{index}", TokensPrompt(prompt_token_ids=prompt), sampling)
    started: set[str] = set()
    prefill_s = prefill_cpu_s = 0.0
    decode: list[tuple[float, float]] = []
    generated: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        clock, processor = time.perf_counter(), time.process_time()
        outputs = engine.step()
        took = time.perf_counter() - clock, time.process_time() - processor
        if len(started) < batch:
            prefill_s, prefill_cpu_s = prefill_s + took[0], prefill_cpu_s + took[1]
        else:
            decode.append(took)
        for output in outputs:
            started.add(output.request_id)
            generated[output.request_id] = list(output.outputs[0].token_ids)
    step_s, step_cpu_s = (statistics.median(column) for column in zip(*decode, strict=True))
    prompt_tokens = batch * PROMPT_TOKENS
    return {
        "prefill": asdict(Phase(prompt_tokens / prefill_s, prefill_cpu_s / prompt_tokens * 1e3)),
        "decode": asdict(Phase(batch / step_s, step_cpu_s / batch * 1e3)),
        "tokens": generated[f"{name}-0"],
    }


def serve_batches(options: argparse.Namespace) -> None:
    """Be the engine of one side: a batch size per line of input, its figures per line of output."""
    from vllm import EngineArgs, LLMEngine

    batches = [int(batch) for batch in options.batch.split(",")]
    buckets = {"num_seqs_buckets": batches, "num_batched_tokens_buckets": [128, STEP_TOKENS]}
    ours = {"additional_config": {"neuron_config": buckets}} if options.engine == "ours" else {}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(options.model),
            dtype=options.dtype,
            max_model_len=STEP_TOKENS,
            max_num_seqs=max(batches),
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=False,
            **ours,
        )
    )
    answers = os.fdopen(options.answers, "w")
    for count, line in enumerate(sys.stdin):
        figures = run_batch(engine, str(count), batch=int(line), tokens=options.tokens)
        print(json.dumps(figures), file=answers, flush=True)


class Side:
    """The process of an engine; `run` has it do one batch."""

    def __init__(self, side: str, python: str, dtype: str, options: argparse.Namespace) -> None:
        reading, writing = os.pipe()
        processors = str(len(os.sched_getaffinity(0)))
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if side == "ours":
            environment.update(VLLM_NEURON_DEVICE="host", OMP_NUM_THREADS="1")
        else:
            # All processors, as XLA has them; by default vLLM keeps one of them free.
            environment.update(
                OMP_NUM_THREADS=processors,
                VLLM_CPU_OMP_THREADS_BIND="nobind",
                VLLM_CPU_KVCACHE_SPACE="1",
            )
        self.name = side
        self._process = subprocess.Popen(
            [
                *(python, str(Path(__file__).resolve()), "--engine", side, "--dtype", dtype),
                *("--model", str(options.model), "--batch", options.batch),
                *("--tokens", str(options.tokens), "--answers", str(writing)),
            ],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
            pass_fds=[writing],
            env=environment,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def run(self, batch: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(batch, file=self._process.stdin, flush=True)
        answer = self._answers.readline()
        if not answer:
            raise SystemExit(f"the engine ({self.name}) ended with {self._process.wait()}")
        return json.loads(answer)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all batches of a dtype in turns; returns a row for each side, batch and phase."""
    pythons = {"ours": sys.executable}
    if options.reference_python:
        pythons["vLLM's CPU backend"] = options.reference_python
    batches = [int(batch) for batch in options.batch.split(",")]
    sides = [Side(name, python, dtype, options) for name, python in pythons.items()]
    taken: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number in range(options.rounds + 1):
        for batch in batches:
            for side in sides:
                figures = side.run(batch)
                # The first round warms up.
                if number:
                    taken.setdefault((batch, side.name), []).append(figures)
    for side in sides:
        side.stop()
    rows = []
    for (batch, name), rounds in taken.items():
        for phase in ("prefill", "decode"):
            medians = {
                field: statistics.median(figures[phase][field] for figures in rounds)
                for field in Phase.__slots__
            }
            rows.append({"dtype": dtype, "batch": batch, "phase": phase, "side": name, **medians})
        ours = taken[batch, "ours"][0]["tokens"]
        agreed = next(
            (at for at, pair in enumerate(zip(ours, rounds[0]["tokens"], strict=True))
             if pair[0] != pair[1]),
            len(ours),
        )  # fmt: skip
        rows[-1]["tokens_as_ours"] = agreed
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference-python")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        serve_batches(options)
        return
    load = os.getloadavg()
    rows = [row for dtype in options.dtype.split(",") for row in measure(dtype, options)]
    print((__doc__ or "").strip().splitlines()[-1])
    print(f"load {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    print("| dtype | sequences | phase | | tokens/s | processor ms/token | tokens as ours |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            *(row["dtype"], row["batch"], row["phase"], row["side"]),
            *(f"{row['tokens_per_second']:.1f}", f"{row['processor_ms_per_token']:.2f}"),
            row.get("tokens_as_ours", ""),
        )
        print("|", " | ".join(map(str, cells)), "|")
    if options.json:
        record = {"load": [load[0], os.getloadavg()[0]], "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
