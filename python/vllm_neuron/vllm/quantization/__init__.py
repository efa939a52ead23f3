"""Quantised checkpoints: which methods are served, and how vLLM comes to use the plugin's classes.

vLLM's own methods call compiled kernels of other devices. It asks `register_quantization_config`
for a replacement by name, and for linear layers of compressed-tensors and fp8 a list of kernels by
platform.
"""

from __future__ import annotations

from functools import cache

from vllm_neuron.errors import ConfigurationError

__all__ = ["METHODS", "check_method", "register"]

#: What a user or a checkpoint may call the methods that are served, all of vLLM's names of them.
METHODS = (
    *("gptq", "gptq_marlin", "auto_gptq"),
    *("awq", "awq_marlin", "auto_awq"),
    "compressed-tensors",
    "fp8",
)


def check_method(method: str) -> None:
    """Refuses a quantisation method that is not served.

    Raises:
        ConfigurationError: `method` is one.
    """
    if method not in METHODS:
        raise ConfigurationError(
            f"--quantization ({method}) is not supported on Neuron in this version. Use a "
            f"checkpoint that is quantised by one of: {', '.join(METHODS)}, or not quantised.",
            name="--quantization",
            value=method,
        )


@cache
def register() -> None:
    """Tells vLLM, once per process, to use the plugin's classes."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from vllm_neuron.vllm.quantization.awq import AWQConfig
    from vllm_neuron.vllm.quantization.compressed_tensors import NeuronCompressedTensorsConfig
    from vllm_neuron.vllm.quantization.fp8 import NeuronFp8Config
    from vllm_neuron.vllm.quantization.gptq import GPTQConfig
    from vllm_neuron.vllm.quantization.kernels import register_kernels

    for name in ("gptq", "gptq_marlin", "auto_gptq"):
        register_quantization_config(name)(GPTQConfig)
    for name in ("awq", "awq_marlin", "auto_awq"):
        register_quantization_config(name)(AWQConfig)
    register_quantization_config("compressed-tensors")(NeuronCompressedTensorsConfig)
    register_quantization_config("fp8")(NeuronFp8Config)
    register_kernels()
