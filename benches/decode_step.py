"""What a decode step costs in the host emulator, besides the arithmetic of the model.

    python -m benches.decode_step [--repeat 200]

It prints, from one run:

* the time of a step that writes 8 rows into a KV cache in place, for caches of 64 MiB and 1 GiB,
  and their ratio, which is 1 when the cost does not depend on the size of the cache, and the growth
  of resident memory; then the same program without the alias, which copies the cache;
* the time of a call with 300 inputs of which 60 are updated in place, almost all of it overhead.

These are figures of the emulator on this machine. They say nothing about Trainium.
"""

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.compiler.modules import compiled, lowered, write_rows
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.runtime.host import HostRuntime

WIDTH = 1024
WRITTEN_ROWS = 8
CACHE_MIB = (64, 1024)


Step = Callable[[Sequence[Any]], object]


def medians_us(steps: Sequence[tuple[Step, Sequence[Any]]], repeat: int) -> list[float]:
    """The median time of each `step(inputs)` in microseconds, after five calls to warm up.

    The steps take turns, so that other load on the machine falls on all of them.
    """
    times: list[list[float]] = [[] for _ in steps]
    for index in range(repeat + 5):
        for (step, inputs), taken in zip(steps, times, strict=True):
            started = time.perf_counter()
            step(inputs)
            if index >= 5:
                taken.append(time.perf_counter() - started)
    return [statistics.median(taken) * 1e6 for taken in times]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE / 2**20


def cache_step(runtime: HostRuntime, mib: int, *, in_place: bool) -> tuple[Step, list[Any]]:
    """A step that writes `WRITTEN_ROWS` rows into a cache of `mib` MiB."""
    rows = mib * 2**20 // (WIDTH * 4)
    module = write_rows(rows, WIDTH, WRITTEN_ROWS, in_place=in_place)
    model = runtime.load(compiled(module), aliases=module.aliases, bucket="decode_s8")
    bound = model.bind({0: runtime.allocate((rows, WIDTH), "float32")})
    slots = torch.arange(WRITTEN_ROWS).view(-1, 1)
    return bound.execute, [torch.ones(WRITTEN_ROWS, WIDTH), slots]


def many_inputs(count: int, updated: int) -> LoweredModule:
    """A program with `count` small inputs; each of the first `updated` is doubled in place."""
    kind = "tensor<8xf32>"
    arguments = ", ".join(
        f"%a{i}: {kind} {{tf.aliasing_output = {i} : i32}}" if i < updated else f"%a{i}: {kind}"
        for i in range(count)
    )
    kinds = ", ".join([kind] * updated)
    body = "\n".join(f"%r{i} = stablehlo.add %a{i}, %a{i} : {kind}" for i in range(updated))
    results = ", ".join(f"%r{i}" for i in range(updated))
    return lowered(f"({arguments}) -> ({kinds})", f"{body}\nreturn {results} : {kinds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=200)
    repeat = parser.parse_args().repeat
    runtime = HostRuntime()
    print(__doc__.strip().splitlines()[-1])
    for in_place in (True, False):
        steps = [cache_step(runtime, mib, in_place=in_place) for mib in CACHE_MIB]
        for step, inputs in steps:
            step(inputs)
        before = resident_mib()
        medians = medians_us(steps, repeat if in_place else 3)
        how = "in place" if in_place else "copied"
        for mib, us in zip(CACHE_MIB, medians, strict=True):
            print(f"KV cache {mib:5d} MiB, {how:8s}: {us:10.1f} us per step")
        print(
            f"ratio of the two, {how}: {medians[1] / medians[0]:.2f}; resident memory grew by "
            f"{resident_mib() - before:.1f} MiB"
        )
        del steps
    module = many_inputs(300, 60)
    model = runtime.load(compiled(module), aliases=module.aliases, bucket="decode_s8")
    tensors = [runtime.allocate((8,), "float32") for _ in range(300)]
    bound = model.bind({index: tensor for index, tensor in enumerate(tensors) if index < 292})
    arguments = [torch.ones(8) for _ in range(8)]
    part, whole = medians_us([(bound.execute, arguments), (model.execute, tensors)], repeat * 5)
    print(f"300 inputs, 60 updated in place, 8 passed as torch tensors: {part:.1f} us per call")
    print(f"the same, all 300 passed anew as device tensors: {whole:.1f} us per call")


if __name__ == "__main__":
    main()
