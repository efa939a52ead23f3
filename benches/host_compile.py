"""What the host compiler's levels cost and gain, on a decode step in the shape of SmolLM2-135M.

    python -m benches.host_compile [--layers 30] [--sequences 8] [--repeat 10]

For each level it prints the processor time to compile, to load the NEFF with the executable inside
and to load it when the executable has to be rebuilt, its size, and the time of a step. Processor
time, because it is less disturbed than the clock by other load; a step has both.

These are figures of the emulator on this machine. They say nothing about Trainium.
"""

import argparse
import statistics
import time

import torch

from tests.compiler.modules import compiled, manifest_with
from vllm_neuron.capture import capture
from vllm_neuron.lowering.native import NativeLowering
from vllm_neuron.runtime.host import HostRuntime

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCABULARY = 576, 9, 3, 64, 1536, 49152
BLOCKS, BLOCK_SIZE, CONTEXT = 128, 32, 256


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(torch.nn.Module):
    """One decoder layer with attention over a paged KV cache."""

    def __init__(self) -> None:
        super().__init__()
        kv = KV_HEADS * HEAD_SIZE
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            torch.nn.Linear(inner, outer, bias=False)
            for inner, outer in (
                *((HIDDEN, HIDDEN), (HIDDEN, kv), (HIDDEN, kv), (HIDDEN, HIDDEN)),
                *((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)),
            )
        )
        self.norms = torch.nn.Parameter(torch.ones(2, HIDDEN))

    def forward(self, x, cos, sin, slots, blocks, mask, keys, values):
        count = x.shape[0]
        y = norm(x, self.norms[0])
        q = rotate(self.q(y).view(count, HEADS, HEAD_SIZE), cos, sin)
        k = rotate(self.k(y).view(count, KV_HEADS, HEAD_SIZE), cos, sin)
        v = self.v(y).view(count, KV_HEADS, HEAD_SIZE)
        keys.view(-1, KV_HEADS, HEAD_SIZE).index_put_((slots,), k)
        values.view(-1, KV_HEADS, HEAD_SIZE).index_put_((slots,), v)
        k, v = (
            cache[blocks]
            .view(count, CONTEXT, KV_HEADS, HEAD_SIZE)
            .repeat_interleave(HEADS // KV_HEADS, 2)
            for cache in (keys, values)
        )
        scores = torch.einsum("shd,schd->shc", q, k) * HEAD_SIZE**-0.5 + mask[:, None]
        attended = torch.einsum("shc,schd->shd", scores.softmax(-1), v)
        x = x + self.o(attended.reshape(count, HIDDEN))
        y = norm(x, self.norms[1])
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(torch.nn.Module):
    """Embedding, layers and logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens, cos, sin, slots, blocks, mask, kv_caches):
        x = self.embedding(tokens)
        for layer, (keys, values) in zip(self.layers, kv_caches, strict=True):
            x = layer(x, cos, sin, slots, blocks, mask, keys, values)
        return x @ self.embedding.weight.t()


def example(layers: int, sequences: int) -> tuple:
    half = HEAD_SIZE // 2
    cache = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return (
        torch.zeros(sequences, dtype=torch.long),
        *(torch.randn(sequences, 1, half) for _ in range(2)),
        torch.arange(sequences) + BLOCK_SIZE,
        torch.zeros(sequences, CONTEXT // BLOCK_SIZE, dtype=torch.long),
        torch.zeros(sequences, CONTEXT),
        [(torch.zeros(cache), torch.zeros(cache)) for _ in range(layers)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    step = Decoder(options.layers).eval()
    graph = capture(step, example(options.layers, options.sequences), bucket="decode")
    with NativeLowering() as lowering:
        module = lowering.lower(graph, bucket="decode")
    print(__doc__.strip().splitlines()[-1])
    runtime = HostRuntime()
    tensors = [
        runtime.upload(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
        if spec.dtype.startswith("int")
        else runtime.upload(torch.randn(spec.shape) * 0.05)
        for spec in module.inputs
    ]
    for level in (1, 2, 3):
        started = time.process_time()
        neff = compiled(module, level=level)
        compile_s = time.process_time() - started
        started = time.process_time()
        model = runtime.load(neff, aliases=module.aliases, bucket="decode")
        load_s = time.process_time() - started
        started = time.process_time()
        stale = manifest_with(neff, jaxlib="0")
        runtime.load(stale, aliases=module.aliases, bucket="decode")
        rebuild_s = time.process_time() - started
        bound = model.bind(dict(enumerate(tensors)))
        bound.execute([])
        clock, processor = [], []
        for _ in range(options.repeat):
            started, started_process = time.perf_counter(), time.process_time()
            bound.execute([])
            clock.append(time.perf_counter() - started)
            processor.append(time.process_time() - started_process)
        print(
            f"O{level}: compile {compile_s:.2f} s, load {load_s:.2f} s, rebuild {rebuild_s:.2f} s, "
            f"NEFF {len(neff) / 1024:.0f} KiB, step {statistics.median(clock) * 1e3:.0f} ms by the "
            f"clock, {statistics.median(processor) * 1e3:.0f} ms of processor time"
        )


if __name__ == "__main__":
    main()
