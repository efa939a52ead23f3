"""The compile part of a warm start against the cold one, and the cost of reading many entries.

    python -m benches.warm_start

32 buckets of one step on the host emulator, cold and warm in new pipelines of one process; then 80
entries of 10 MiB read by a new store. Prints a table.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from pathlib import Path

import torch

from tests.pipeline.step_modules import CachedProjection, build, make_pipeline
from vllm_neuron import _core
from vllm_neuron.cache import keys
from vllm_neuron.cache.tiers import Tiers

BUCKETS = 32
ENTRIES, ENTRY_BYTES = 80, 10 << 20


def start(root: Path) -> tuple[float, float, dict[str, float]]:
    """Seconds of the whole build, of its compile part, and the counters."""
    pipeline = make_pipeline(root)
    begun = time.perf_counter()
    build(pipeline, CachedProjection(), batches=tuple(range(1, BUCKETS + 1)))
    whole = time.perf_counter() - begun
    done = pipeline.counters
    return whole, done.trace_s + done.lower_s + done.compile_s, done.totals()


def main() -> None:
    logging.disable()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="warm_start_"))
    try:
        cold, work, counters = start(folder)
        assert counters["compilations"] == BUCKETS
        best = min((start(folder) for _ in range(5)), key=lambda found: found[0])
        warm, _, counters = best
        assert counters["traces"] == counters["compilations"] == 0
        print(f"{BUCKETS} buckets cold: {cold:.2f} s; its threads worked {work:.2f} s")
        print(f"{BUCKETS} buckets warm: {warm:.3f} s: look-ups, checks, loading, binding")
        print(f"{cold / warm:.0f} times faster")

        store = _core.Store(str(folder / "large"))
        made = [keys.key_of("neff", {"number": number}) for number in range(ENTRIES)]
        for number, key in enumerate(made):
            store.put("neff", key.hex, {"record": b"{}", "neff": bytes([number]) * ENTRY_BYTES})
        del store
        seconds = []
        for _ in range(5):
            tiers = Tiers(folder / "large", name="c", logger=logging.getLogger("c"))
            begun = time.perf_counter()
            for key in made:
                assert tiers.find_near("neff", key) is not None
            seconds.append(time.perf_counter() - begun)
            del tiers
        print(
            f"{ENTRIES} entries of {ENTRY_BYTES >> 20} MiB found, mapped and verified: "
            f"best {min(seconds) * 1e3:.0f} ms, worst {max(seconds) * 1e3:.0f} ms of 5"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
