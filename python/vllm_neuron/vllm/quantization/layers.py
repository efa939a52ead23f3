"""What the quantisation methods share: refusals, parameters, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts

from vllm_neuron.errors import ConfigurationError

__all__ = [
    "ACTIVATION_DTYPES",
    "keep_plain",
    "refuse",
    "refuse_experts",
    "scale_of_each_output",
]

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse(method: str, feature: str, advice: str) -> ConfigurationError:
    """Returns the error of a quantised checkpoint that cannot be served.

    Args:
        method: vLLM's name of the quantisation method.
        feature: what of it is not implemented.
        advice: what to do.
    """
    return ConfigurationError(
        f"--quantization ({method}) with {feature} is not supported on Neuron in this version. "
        f"{advice}",
        name="--quantization",
        value=method,
    )


def refuse_experts(method: str, layer: Any, prefix: str) -> None:
    """Refuses a mixture-of-experts layer that a method would quantise.

    Raises:
        ConfigurationError: `layer` is one.
    """
    if isinstance(layer, RoutedExperts):
        raise refuse(
            method,
            f"quantised experts (layer {prefix})",
            "Use a checkpoint whose experts are not quantised.",
        )


def keep_plain(layer: torch.nn.Module, *names: str) -> None:
    """Replaces vLLM's parameters, which know how to load themselves, by plain ones."""
    for name in names:
        parameter = torch.nn.Parameter(getattr(layer, name).data, requires_grad=False)
        setattr(layer, name, parameter)


def scale_of_each_output(scales: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Returns a scale per output, float32 (N, 1), whatever the scales of a checkpoint are for.

    A scale per merged layer stays exact; vLLM's kernels round the weights again to one scale.

    Args:
        scales: (N, 1); or one per merged layer; or one, with what vLLM fills the others with.
        widths: outputs of each layer that vLLM merged, N in all.
    """
    if scales.dim() == 2:
        return scales.data
    scales = scales.data.view(-1)
    # A checkpoint with merged layers has one scale; vLLM fills the others with the lowest number.
    scales = torch.where(scales > 0, scales, scales[0])
    return torch.repeat_interleave(scales, torch.tensor(widths)).view(-1, 1)
