"""AWQ checkpoints: 4 bits with zero points, in the layout called GEMM."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from vllm_neuron.vllm.quantization.arithmetic import dequantise, unpack_awq
from vllm_neuron.vllm.quantization.experts import AWQExperts
from vllm_neuron.vllm.quantization.layers import ACTIVATION_DTYPES, keep_plain, refuse

__all__ = ["AWQConfig", "AWQLinearMethod"]

_NAME = "awq"


class AWQConfig(AutoAWQConfig):
    """The quantisation of an AWQ checkpoint."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AWQConfig:
        """Reads `quantization_config`.

        Raises:
            ConfigurationError: a setting that the arithmetic does not cover.
        """
        bits = cls.get_from_keys(config, ["w_bit", "bits"])
        version = str(config.get("version", "gemm")).lower()
        if bits != 4:
            raise refuse(_NAME, f"{bits} bits", "Use a checkpoint of 4 bits.")
        if version != "gemm":
            raise refuse(_NAME, f"layout {version}", "Use a checkpoint of version GEMM.")
        if not cls.get_from_keys(config, ["zero_point"]):
            raise refuse(_NAME, "zero_point false", "Use a checkpoint with zero points.")
        return cast("AWQConfig", super().from_config(config))

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Returns the model dtypes; vLLM's kernels leave float32 out."""
        return list(ACTIVATION_DTYPES)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns how a layer is computed; None: as vLLM does without quantisation.

        Raises:
            ConfigurationError: it cannot be.
        """
        if isinstance(layer, RoutedExperts):
            left_out = self.modules_to_not_convert
            # vLLM collects the layers that are not quantised, each expert by its own name.
            each = any(name.startswith(f"{prefix}.") for name in left_out)
            if each or is_layer_skipped(prefix, left_out, match_mode="substring"):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            if layer.moe_config.has_bias:
                raise refuse(
                    _NAME,
                    f"experts that have biases (layer {prefix})",
                    "Use a checkpoint whose experts are not quantised.",
                )
            return AWQExperts(self, layer.moe_config)
        method = super().get_quant_method(layer, prefix)
        return AWQLinearMethod(self) if isinstance(method, AutoAWQLinearMethod) else method


@register_weight_loader_v2_supported_method
class AWQLinearMethod(AutoAWQLinearMethod):
    """A linear layer with AWQ weights.

    Parameters of a layer, as in the checkpoint, for K inputs, N outputs and G groups: `qweight`
    int32 (K, N / 8), `qzeros` int32 (G, N / 8), `scales` (G, N) of the model's dtype.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the parameters as they are."""
        keep_plain(layer, "qweight", "qzeros", "scales")

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x (..., K) times the weights, (..., N), in the model's dtype."""
        scales = layer.scales
        zeros = unpack_awq(layer.qzeros).to(scales.dtype)
        weights = dequantise(unpack_awq(layer.qweight), scales, zeros, dim=0)
        return linear(x, weights.t(), bias)
