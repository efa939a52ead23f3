"""Serve tiny models of real architectures and compare their answers with transformers.

    python tests/run_models.py [--route native|xla|cpu] [--dtype float32|bfloat16] [--table FILE]
                               [--json FILE] [NAME...]

Every model of `architectures` gets a random float32 checkpoint, an engine of vLLM in a process of
its own, and four prompts: a short one, one longer than the sliding windows, one that is prefilled
in two chunks, and one that begins like it. All are generated at once, then again from the prefix
cache. The rows say:

    equal    the 64 greedy tokens of every prompt are those of transformers, both times
    within   in bfloat16: all log-probabilities of the token after each of 32 prompts are no
             further from transformers' float32 ones than `rounding` allows
    refused  the engine does not start and says which feature is not served
    wrong    other tokens, or log-probabilities beyond the bounds
    failed   any other error

`--route cpu` runs the steps eagerly instead of as NEFFs of the host emulator. Exit code 0 if no
model is wrong or failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import models, rounding
from tests.architectures import ARCHITECTURES
from tests.vllm.engine import CPU_MODE, HOST, Engine, EngineError

TOKENS = 64
CHUNK = 512
"""Tokens per step, the least that Neuron has for chunks: a longer prompt takes two."""

_ROUTES = {"native": HOST, "xla": {"VLLM_NEURON_BACKEND": "vllm_neuron"}, "cpu": CPU_MODE}
OPTIONS = {
    "max_model_len": 768,
    "max_num_batched_tokens": CHUNK,
    "additional_config": {
        "neuron_config": {"num_batched_tokens_buckets": [CHUNK], "num_seqs_buckets": [4]}
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--route", choices=sorted(_ROUTES), default="native")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--table", type=Path, help="write the rows here as a table in Markdown")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ARCHITECTURES))
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="vllm-neuron-models-") as folder:
        names, place, route = options.names or list(ARCHITECTURES), Path(folder), options.route
        for row in (
            run_in_bfloat16(names, place, route=route)
            if options.dtype == "bfloat16"
            else (run_model(name, place, route=route) for name in names)
        ):
            rows.append(row)
            print(
                f"{row['model']:12} {row['status']:8} {row['seconds']:6.1f}s  {row['detail']}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(rows, route=options.route, dtype=options.dtype))
    return 1 if any(row["status"] in ("wrong", "failed") for row in rows) else 0


def prompts() -> list[list[int]]:
    """Token ids: short, beyond the windows, in two chunks, and with a beginning in common."""
    draw = random.Random(1)
    short, middle, long = ([draw.randrange(6, 262) for _ in range(n)] for n in (5, 60, 560))
    return [short, middle, long, [*long[:500], *short]]


def run_model(name: str, folder: Path, *, route: str) -> dict[str, Any]:
    """Build, serve and compare one model; a row of the table."""
    started = time.monotonic()
    checkpoint = models.build(name, folder / name)
    given = prompts()
    expected = models.greedy(checkpoint, given, tokens=TOKENS)
    status, detail = "equal", ""
    try:
        with Engine(checkpoint, _ROUTES[route], cache_root=folder / "cache", **OPTIONS) as engine:
            first = engine.tokens(given, TOKENS)
            again, cached = engine.call(_generate_again, given)
    except EngineError as error:
        status, detail = _reason(str(error))
    else:
        for kind, found in (("at once", first), ("from the prefix cache", again)):
            if found != expected:
                status, detail = "wrong", f"{kind}: {_difference(expected, found)}"
                break
        if status == "equal" and not all(cached[1:]):
            status, detail = "failed", f"tokens from the prefix cache: {cached}"
    seconds = round(time.monotonic() - started, 1)
    return {"model": name, "status": status, "seconds": seconds, "detail": detail}


def run_in_bfloat16(names: Sequence[str], folder: Path, *, route: str) -> Iterator[dict[str, Any]]:
    """Compare the log-probabilities of each model; yields rows of the table."""
    started = time.monotonic()
    for name, result in rounding.measure_models(names, folder=folder, settings=_ROUTES[route]):
        if isinstance(result, str):
            status = "refused" if result.startswith("ConfigurationError:") else "failed"
        else:
            status = "within" if result.is_within_bounds else "wrong"
        seconds, started = time.monotonic() - started, time.monotonic()
        yield {"model": name, "status": status, "seconds": seconds, "detail": str(result)}


def _generate_again(llm: Any, given: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in given], params, use_tqdm=False
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [output.num_cached_tokens for output in outputs]


def _reason(trace: str) -> tuple[str, str]:
    """Status and message of an engine that did not start or stopped."""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    for line in reversed(lines):
        if "ConfigurationError:" in line:
            return "refused", line.partition("ConfigurationError:")[2].strip()
    return "failed", lines[-1][:300]


def _difference(expected: list[list[int]], found: list[list[int]]) -> str:
    for index, (left, right) in enumerate(zip(expected, found, strict=True)):
        for position, (one, two) in enumerate(zip(left, right, strict=True)):
            if one != two:
                return f"prompt {index}, token {position}: {two}, expected {one}"
    return "other lengths"


def table(rows: Sequence[dict[str, Any]], *, route: str, dtype: str) -> str:
    """The rows in Markdown, with the command and the date."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    command = f"python tests/run_models.py --route {route} --dtype {dtype}"
    lines = [
        f"`{command}` on {date}, host emulator:",
        "",
        "| model | result |",
        "|---|---|",
    ]
    lines += [f"| {row['model']} | {row['status']} {row['detail']}".rstrip() + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
