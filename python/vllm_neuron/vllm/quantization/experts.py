"""Experts with packed integer weights: GPTQ's and AWQ's, dequantised where a step applies them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod

from vllm_neuron.vllm.moe import apply_experts, check_experts
from vllm_neuron.vllm.quantization.arithmetic import dequantise, unpack, unpack_awq
from vllm_neuron.vllm.quantization.layers import keep_plain

__all__ = ["AWQExperts", "GPTQExperts"]


class _PackedExperts(FusedMoEMethodBase):
    """Routing and experts of one layer.

    vLLM's class adds the parameters; for E experts, K inputs, N outputs, G groups and b bits each
    of `w13_` and `w2_` has `qweight` int32, `qzeros` int32 and `scales` (E, G, N).
    """

    def __init__(self, quant_config: Any, moe: Any) -> None:
        # Without the base classes' look for a kernel.
        FusedMoEMethodBase.__init__(self, moe)
        self.quant_config = quant_config
        self.input_dtype = None

    @property
    def is_monolithic(self) -> bool:
        """Returns True: routing is done here, vLLM's router needs compiled kernels."""
        return True

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """Returns what tells vLLM's kernels nothing."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks the kind of the layer, and keeps the parameters as they are.

        Raises:
            ConfigurationError: the kind is not computed.
        """
        check_experts(layer)
        for part in ("w13", "w2"):
            keep_plain(layer, f"{part}_qweight", f"{part}_scales", f"{part}_qzeros")
        layer._ensure_moe_quant_config_init()

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies the experts to x (T, hidden); see `apply_experts`."""
        return apply_experts(
            layer,
            x,
            router_logits,
            gate_up_weights=self._weights(layer, "w13").transpose(1, 2),
            down_weights=self._weights(layer, "w2").transpose(1, 2),
            has_bias=self.moe.has_bias,
        )

    def _weights(self, layer: Any, part: str) -> torch.Tensor:
        """Returns the dequantised weights (E, K, N)."""
        raise NotImplementedError


class AWQExperts(_PackedExperts, AutoAWQMoEMethod):
    """Experts of an AWQ checkpoint: `qweight` (E, K, N / 8), `qzeros` (E, G, N / 8)."""

    def _weights(self, layer: Any, part: str) -> torch.Tensor:
        scales = getattr(layer, f"{part}_scales")
        zeros = unpack_awq(getattr(layer, f"{part}_qzeros")).to(scales.dtype)
        return dequantise(unpack_awq(getattr(layer, f"{part}_qweight")), scales, zeros, dim=1)


class GPTQExperts(_PackedExperts, AutoGPTQMoEMethod):
    """Experts of a GPTQ checkpoint: `qweight` (E, K * b / 32, N), `qzeros` (E, G, N * b / 32)."""

    def _weights(self, layer: Any, part: str) -> torch.Tensor:
        config = self.quant_config
        bits, scales = config.weight_bits, getattr(layer, f"{part}_scales")
        zeros: torch.Tensor | int = 1 << (bits - 1)
        if not config.is_sym:
            zeros = config.zero_points(getattr(layer, f"{part}_qzeros"), dtype=scales.dtype)
        values = unpack(getattr(layer, f"{part}_qweight"), bits=bits, dim=1)
        return dequantise(values, scales, zeros, dim=1)
