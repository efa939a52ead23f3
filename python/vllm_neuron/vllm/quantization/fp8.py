"""Checkpoints of vLLM's method fp8: float8_e4m3fn weights scaled per tensor or per block."""

from __future__ import annotations

from typing import Any, cast

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    is_layer_skipped,
    kFp8DynamicTokenSym,
)

from vllm_neuron.vllm.quantization.layers import (
    ACTIVATION_DTYPES,
    keep_plain,
    refuse,
    refuse_experts,
    scale_of_each_output,
)

__all__ = ["NeuronFp8Config", "NeuronFp8LinearMethod"]

_NAME = "fp8"


class NeuronFp8Config(Fp8Config):
    """The quantisation of an fp8 checkpoint.

    Attributes:
        full_config: `quantization_config` as the checkpoint has it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full_config: dict[str, Any] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NeuronFp8Config:
        """Reads `quantization_config`.

        Raises:
            ConfigurationError: a setting that the arithmetic does not cover.
        """
        if config.get("store_dtype") is not None:
            raise refuse(
                _NAME, f"store_dtype {config['store_dtype']}", "Use a checkpoint without it."
            )
        made = cast("NeuronFp8Config", super().from_config(config))
        made.full_config = dict(config)
        return made

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Returns the model dtypes; vLLM's kernels leave float32 out."""
        return list(ACTIVATION_DTYPES)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns how a layer is computed; None: as vLLM does without quantisation.

        Raises:
            ConfigurationError: it cannot be, or the checkpoint is not quantised.
        """
        if not self.full_config:
            raise refuse(
                _NAME,
                "a checkpoint that is not quantised",
                "Weights are not quantised while they are loaded: use a quantised checkpoint.",
            )
        if isinstance(layer, RoutedExperts):
            if is_layer_skipped(prefix, self.ignored_layers, self.packed_modules_mapping):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            refuse_experts(_NAME, layer, prefix)
        method = super().get_quant_method(layer, prefix)
        return NeuronFp8LinearMethod(self) if isinstance(method, Fp8LinearMethod) else method


@register_weight_loader_v2_supported_method
class NeuronFp8LinearMethod(Fp8LinearMethod):
    """A linear layer with fp8 weights.

    Activations without a scale of the checkpoint get one per token, as vLLM gives them where its
    kernels can: one for all tokens of a step would let padding and other requests into the answer.
    """

    def __init__(self, quant_config: NeuronFp8Config) -> None:
        super().__init__(quant_config)
        if not self.block_quant and not self.act_q_static:
            self.activation_quant_key = kFp8DynamicTokenSym

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x times the weights; the same for every batch, unlike vLLM's choice of two."""
        return self.fp8_linear.apply_weights(layer, x, bias)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Gives every output a scale, and merged layers one of the activations."""
        if self.block_quant:
            layer.input_scale = None
            keep_plain(layer, "weight", "weight_scale_inv")
            return
        scales = scale_of_each_output(layer.weight_scale, layer.logical_widths)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        layer.weight = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)
        if self.act_q_static:
            scale = layer.input_scale.data.max()
            layer.input_scale = torch.nn.Parameter(scale, requires_grad=False)
        else:
            layer.input_scale = None
