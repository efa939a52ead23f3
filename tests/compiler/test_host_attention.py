"""Attention of the plugin, lowered and computed by the emulator's kernel, beside eager."""

from __future__ import annotations

import copy
import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from tests.compiler.modules import compiled
from tests.lowering.parity import bind
from tests.lowering.xla_cpu import module_text
from vllm_neuron.capture import capture
from vllm_neuron.compiler import host_kernels, xla_cpu
from vllm_neuron.lowering.mlir_context import stablehlo_context
from vllm_neuron.lowering.native import NativeLowering
from vllm_neuron.runtime.host import HostRuntime
from vllm_neuron.vllm.attention import NeuronAttention, NeuronAttentionMetadata, storage_dtype

# As many keys as a head is long, so that no type tells a transposition.
BLOCK, BLOCKS, NUM_BLOCKS, DIM = 4, 4, 32, 16


class Attend(torch.nn.Module):
    """One layer: the step's keys and values are written to the cache, then attended to."""

    def __init__(self, *, dtype, heads, kv_heads, window=None, soft_cap=None, sinks=False):
        super().__init__()
        self.dtype, self.heads, self.kv_heads, self.window = dtype, heads, kv_heads, window
        self.sinks = torch.nn.Parameter(torch.linspace(-2, 3, heads)) if sinks else None
        self.layer = SimpleNamespace(layer_name="layer", kv_cache_torch_dtype=dtype)
        self.attention = NeuronAttention(
            heads,
            DIM,
            DIM**-0.5,
            num_kv_heads=kv_heads,
            sliding_window=window,
            logits_soft_cap=soft_cap,
            sinks=self.sinks,
        )

    def forward(self, query, key, value, positions, slots, tables, keys, values):
        metadata = NeuronAttentionMetadata.build(
            positions=positions,
            slots=slots,
            block_tables=tables,
            kv_caches={"layer": (keys, values)},
            block_size=BLOCK,
            windows=(self.window,),
        )
        output = torch.empty_like(query)
        return self.attention.forward(
            self.layer, query, key, value, torch.empty(0), metadata, output
        )


def arguments(step: Attend, starts: list[int], queries: int, garbage: float) -> tuple:
    """A sequence for each of `starts` cached tokens, the last of several being padding."""
    generator = torch.Generator().manual_seed(len(starts))

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(step.dtype)

    batch = len(starts)
    tables = torch.zeros(batch, BLOCKS, dtype=torch.int64)
    positions, slots = (torch.zeros(batch, queries, dtype=torch.int64) for _ in range(2))
    caches = [
        torch.full((NUM_BLOCKS, BLOCK, step.kv_heads, DIM), garbage).to(step.dtype)
        for _ in range(2)
    ]
    for row, start in enumerate(starts[:-1] if batch > 1 else starts):
        count = -(-(start + queries) // BLOCK)
        tables[row, :count] = 1 + row * BLOCKS + torch.arange(count)
        positions[row] = start + torch.arange(queries)
        slots[row] = tables[row][positions[row] // BLOCK] * BLOCK + positions[row] % BLOCK
        at = torch.arange(start)
        rows = tables[row][at // BLOCK] * BLOCK + at % BLOCK
        for cache in caches:
            cache.view(-1, step.kv_heads, DIM)[rows] = noise(start, step.kv_heads, DIM)
    return (
        *(
            noise(batch * queries, heads, DIM)
            for heads in (step.heads, step.kv_heads, step.kv_heads)
        ),
        *(positions.flatten(), slots.flatten(), tables),
        *(cache.view(storage_dtype(step.dtype)) for cache in caches),
    )


@pytest.fixture(scope="module")
def lowering():
    with NativeLowering() as lowering:
        yield lowering


@pytest.fixture(scope="module")
def capped_text(lowering) -> str:
    """The text of a module with a soft cap."""
    step = Attend(dtype=torch.float32, heads=4, kv_heads=4, soft_cap=2.0).eval()
    return module_text(lower(lowering, step, arguments(step, [4, 0], 1, 0.0))[0])


def artifact(text: str) -> bytes:
    return _jax.mlir.serialize_portable_artifact(text, stablehlo.get_current_version())


def text_of(module) -> str:
    context = stablehlo_context()
    with context:
        return str(ir.Module.parse(host_kernels.with_kernels(module.data)))


def lower(lowering, step, args):
    captured = capture(step, args, bucket="test")
    return lowering.lower(captured, bucket="test"), functools.partial(bind, captured, step)


def loaded(module):
    return HostRuntime().load(compiled(module), aliases=module.aliases, bucket="decode_s1")


def assert_equals_eager(model, tensors_of, step, args, *, eager_args=None, rows=None) -> None:
    tolerance = 1e-5 if step.dtype == torch.float32 else 1e-2
    expected = step(*copy.deepcopy(eager_args or args))
    runtime = HostRuntime()
    updated = set(model.aliases.values())
    given = [
        runtime.upload(tensor.detach().clone()) if index in updated else tensor.detach()
        for index, tensor in enumerate(tensors_of(args))
    ]
    (found,) = [
        output.read()
        for index, output in enumerate(model.execute(given))
        if index not in model.aliases
    ]
    torch.testing.assert_close(
        found[:rows].float(), expected[:rows].detach().float(), rtol=tolerance, atol=tolerance
    )


DECODE, SEVERAL, PREFILL, LONG = ([0, 1, 3, 4, 15, 0], 1), ([0, 8, 0], 3), ([0], 9), ([14], 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "soft_cap", "sinks", "dtype", "starts", "queries"),
    [
        (6, 2, None, None, False, torch.float32, *DECODE),
        (6, 2, None, None, False, torch.bfloat16, *PREFILL),
        (4, 4, 3, None, False, torch.float32, *SEVERAL),
        (4, 4, 3, None, False, torch.bfloat16, *LONG),
        (4, 1, None, 2.0, False, torch.float32, *PREFILL),
        (4, 1, None, 2.0, False, torch.bfloat16, *SEVERAL),
        (6, 2, 5, None, True, torch.float32, *LONG),
        (6, 2, 2, 0.5, True, torch.bfloat16, *DECODE),
    ],
)
def test_the_kernel_equals_eager(
    lowering, heads, kv_heads, window, soft_cap, sinks, dtype, starts, queries
):
    step = Attend(
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    ).eval()
    args = arguments(step, starts, queries, math.nan)
    module, tensors_of = lower(lowering, step, args)
    assert text_of(module).count(f"stablehlo.custom_call @{host_kernels.PAGED_ATTENTION}") == 1
    model = loaded(module)
    live = (len(starts) - 1 or 1) * queries
    assert_equals_eager(model, tensors_of, step, args, rows=live)
    # The padded rows see block 0, which is finite here.
    assert_equals_eager(model, tensors_of, step, arguments(step, starts, queries, 0.5))


def test_blocks_that_are_not_in_the_cache_are_those_nearest(lowering):
    """As a gather of StableHLO takes them; eager refuses them."""
    step = Attend(dtype=torch.float32, heads=6, kv_heads=2).eval()
    args = arguments(step, [4, 11, 0], 1, 0.5)
    module, tensors_of = lower(lowering, step, args)
    nearest = copy.deepcopy(args)
    args[5][0, 0], nearest[5][0, 0] = 1 << 40, NUM_BLOCKS - 1
    args[5][1, 1], nearest[5][1, 1] = -3, 0
    args[5][1, 2], nearest[5][1, 2] = -(1 << 63), 0
    assert_equals_eager(loaded(module), tensors_of, step, args, eager_args=nearest)


def test_nothing_of_the_attention_but_the_call_is_left(lowering):
    """No product, no gather of the cache, and the caches still updated in place."""
    step = Attend(dtype=torch.bfloat16, heads=6, kv_heads=2, sinks=True).eval()
    module, _ = lower(lowering, step, arguments(step, [4, 11, 0], 1, 0.0))
    executable = xla_cpu.compile_module(
        module.data, xla_cpu.options_for_level(2), module_format="stablehlo"
    )
    text = executable.hlo_modules()[0].to_string()
    assert text.count(f'custom_call_target="{host_kernels.PAGED_ATTENTION}"') == 1
    for operation in (" dot(", " gather(", " exponential(", " copy("):
        assert operation not in text, operation
    assert len(module.aliases) == 2


def test_float16_is_left_to_xla(lowering):
    step = Attend(dtype=torch.float16, heads=6, kv_heads=2).eval()
    module, _ = lower(lowering, step, arguments(step, [4, 11, 0], 1, 0.0))
    assert host_kernels.with_kernels(module.data) is module.data


@pytest.mark.parametrize(
    ("found", "replaced"),
    [
        # Each a step of the pattern that then means something else.
        ("stablehlo.exponential", "stablehlo.exponential_minus_one"),
        ("dense<0xFF800000> : tensor<f32>", "dense<0xFF7FFFFF> : tensor<f32>"),
        ("dims = [0, 2, 1]", "dims = [0, 1, 2]"),
        ("stablehlo.divide", "stablehlo.multiply"),
        ("applies stablehlo.maximum", "applies stablehlo.minimum"),
        ("stablehlo.tanh", "stablehlo.logistic"),
        ("start_index_map = [0]", "start_index_map = [1]"),
        ("dense<2.000000e+00> : tensor<f32>", "dense<-2.000000e+00> : tensor<f32>"),
    ],
)
def test_what_differs_from_the_pattern_is_left_to_xla(capped_text, found, replaced):
    assert found in capped_text
    changed = artifact(capped_text.replace(found, replaced))
    assert host_kernels.with_kernels(changed) is changed


def test_shares_of_the_wrong_rows_are_left_to_xla(lowering):
    """With as many queries as keys, what is reduced can be broadcast along the other dimension."""
    step = Attend(dtype=torch.float32, heads=4, kv_heads=4).eval()
    module, _ = lower(lowering, step, arguments(step, [0], BLOCK * BLOCKS, 0.0))
    text, count = re.subn(
        r"= stablehlo.broadcast_in_dim %(\d+), dims = \[0, 1, 2\] : \(tensor<1x4x16xf32>\)",
        r"= stablehlo.broadcast_in_dim %row\1, dims = [0, 1, 2, 3] : (tensor<1x4x1x16xf32>)",
        module_text(module),
    )
    assert count == 2
    text, count = re.subn(
        r"%(\d+)( = stablehlo.reduce\(.*-> tensor<1x4x16xf32>)",
        r"%\1\2\n%row\1 = stablehlo.reshape %\1 : (tensor<1x4x16xf32>) -> tensor<1x4x1x16xf32>",
        text,
    )
    assert count == 2
    changed = artifact(text)
    assert host_kernels.with_kernels(changed) is changed
    assert host_kernels.with_kernels(module.data) is not module.data


def test_the_pattern_as_text_is_the_pattern(capped_text):
    """What the test above changes is recognised without a change."""
    unchanged = artifact(capped_text)
    assert host_kernels.with_kernels(unchanged) is not unchanged
