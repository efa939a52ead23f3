"""Runs a lowered module on jaxlib's XLA:CPU client, by copies: the shortest way to its numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxlib import _jax, xla_client
from jaxlib.mlir.dialects import stablehlo
from torch.utils import dlpack

from vllm_neuron.compiler.xla_cpu import hlo_to_mlir
from vllm_neuron.lowering.mlir_context import stablehlo_context
from vllm_neuron.lowering.module import LoweredModule

# XLA may otherwise drop the rounding of a bfloat16 value between two operations.
_OPTIONS = [
    ("xla_allow_excess_precision", False),
    ("xla_cpu_enable_fast_math", False),
    ("xla_cpu_enable_fast_min_max", False),
    ("xla_backend_optimization_level", 1),
]


@functools.cache
def _client() -> Any:
    return xla_client.make_cpu_client(asynchronous=False)


def module_text(lowered: LoweredModule) -> str:
    """The StableHLO text of an artifact, as jaxlib reads it."""
    context = stablehlo_context()
    with context:
        return str(stablehlo.deserialize_portable_artifact(context, lowered.data))


def run_module(lowered: LoweredModule, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compile, run once, and return the outputs; the inputs are left alone."""
    client = _client()
    device = client.local_devices()[0]
    options = xla_client.CompileOptions()
    options.env_option_overrides = _OPTIONS
    devices = xla_client.DeviceList((device,))
    data = lowered.data
    if lowered.format == "hlo":
        data = hlo_to_mlir(data)
    executable = client.compile_and_load(data, devices, options)
    buffers = [
        _jax.dlpack_managed_tensor_to_buffer(
            dlpack.to_dlpack(tensor.detach().contiguous()), device, None, True
        )
        for tensor in tensors
    ]
    results = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [
        dlpack.from_dlpack(_jax.buffer_to_dlpack_managed_tensor(result[0])).clone()
        for result in results
    ]
