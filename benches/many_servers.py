"""Real servers that start together on one empty cache: each key is compiled once on the node.

    python -m benches.many_servers [--servers 8] [--folder FOLDER]

`vllm serve` processes of one tiny Llama with two buckets share one `VLLM_CACHE_ROOT` and start at
the same time on the host emulator. The counters of each one's `/metrics` are added up and held
against the log lines and the entries on disk; all must give the same answer. Prints a table; the
exit code is 0 only if everything held. A server takes some 1.2 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests import models
from tests.serving import Server
from vllm_neuron import _core

ARGUMENTS = (
    *("--max-model-len", "128", "--max-num-batched-tokens", "128", "--max-num-seqs", "1"),
    *("--dtype", "float32", "--kv-cache-memory-bytes", str(8 << 20)),
)
BUCKETS = ("decode_b1", "prefill_s128")
COMPILED = re.compile(
    r"Compilation complete in [\d.]+ seconds \((?P<bucket>\w+), key (?P<key>\w+)\)"
)
ASKED = re.compile(r"Compilation cache key: (?P<key>\w+) \((?P<bucket>\w+)\)")


@dataclass(frozen=True, slots=True)
class Start:
    """What one server did and answered."""

    ready_s: float
    #: Seconds by phase and bucket, of `/metrics`.
    phases: dict[tuple[str, str], float]
    waited_s: float
    #: NEFF keys by bucket, and the keys that it compiled, of the log.
    keys: dict[str, str]
    compiled_keys: tuple[str, ...]
    answer: tuple[int, ...]
    #: How often each bucket ran for the answer, of `/metrics`.
    steps: dict[str, float]

    def compiled(self) -> int:
        """How many graphs it compiled, by its metrics."""
        return sum(phase == "compile" for phase, _ in self.phases)


def start_together(model: Path, folder: Path, count: int) -> list[Start]:
    """Start servers at the same time on the empty cache `folder/cache` and ask each one."""
    with ExitStack() as stack:
        servers = [
            Server(
                model,
                cache_root=folder / "cache",
                folder=folder,
                arguments=ARGUMENTS,
                fork=True,
                start_timeout_s=900,
            )
            for _ in range(count)
        ]
        for server in servers:
            stack.callback(server.close)
            server.start()
        for server in servers:
            server.wait_ready()
        return [_look_at(server) for server in servers]


def _look_at(server: Server) -> Start:
    body = server.complete(
        "The quick brown fox", max_tokens=12, ignore_eos=True, return_token_ids=True
    )
    phases, steps, waited_s = {}, {}, 0.0
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if sample.name == "vllm_neuron:compile_seconds":
                phases[sample.labels["phase"], sample.labels["bucket"]] = sample.value
            elif sample.name == "vllm_neuron:neff_execution_count_total":
                steps[sample.labels["bucket_name"]] = sample.value
            elif sample.name == "vllm_neuron:compile_cache_wait_seconds":
                waited_s = sample.value
    messages = server.messages("INFO")
    asked = [match for line in messages if (match := ASKED.fullmatch(line))]
    compiled = [match["key"] for line in messages if (match := COMPILED.fullmatch(line))]
    assert server.ready_s is not None
    return Start(
        ready_s=server.ready_s,
        phases=phases,
        waited_s=waited_s,
        keys={match["bucket"]: match["key"] for match in asked},
        compiled_keys=tuple(compiled),
        answer=tuple(body["choices"][0]["token_ids"]),
        steps=steps,
    )


def check(starts: list[Start], cache_root: Path) -> None:
    """Raise unless every key was compiled once in all and every server gives the same answer."""
    keys = starts[0].keys
    assert tuple(sorted(keys)) == BUCKETS, keys
    assert all(start.keys == keys for start in starts), [start.keys for start in starts]
    compiled = Counter(key for start in starts for key in start.compiled_keys)
    assert compiled == dict.fromkeys(keys.values(), 1), compiled
    assert sum(start.compiled() for start in starts) == len(keys)
    store = _core.Store(str(cache_root / "neuron" / "compile_cache"))
    neffs = [info.key for info in store.entries() if info.kind == "neff"]
    assert sorted(key[:32] for key in neffs) == sorted(keys.values()), neffs
    assert len({start.answer for start in starts}) == 1, [start.answer for start in starts]
    assert len(starts[0].answer) == 12
    # The first token is the prefill's.
    assert all(start.steps == {"prefill_s128": 1, "decode_b1": 11} for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="an empty folder, where logs and cache stay")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="many_servers_"))
            folder = Path(name)
        model = models.build("llama", folder / "llama")
        load = os.getloadavg()[0]
        starts = start_together(model, folder, options.servers)
        print(f"load before: {load:.1f}")
        print("server  ready    traced  lowered  compiled  waited")
        for number, start in enumerate(starts, 1):
            phases = Counter(phase for phase, _ in start.phases)
            print(
                f"{number:6}  {start.ready_s:5.1f} s  {phases['trace']:6}  {phases['lower']:7}"
                f"  {phases['compile']:8}  {start.waited_s:4.1f} s"
            )
        check(starts, folder / "cache")
        print(
            f"{len(starts)} servers, {len(BUCKETS)} keys: each compiled once in all, "
            f"{len(starts)} equal answers"
        )


if __name__ == "__main__":
    main()
