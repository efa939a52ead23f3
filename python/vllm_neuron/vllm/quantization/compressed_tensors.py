"""compressed-tensors checkpoints: which of their schemes are served, and on which vLLM classes."""

from __future__ import annotations

from typing import Any, cast

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Int8,
    CompressedTensorsW8A16Fp8,
    CompressedTensorsWNA16,
)

from vllm_neuron.vllm.quantization.layers import refuse, refuse_experts, scale_of_each_output

__all__ = ["NeuronCompressedTensorsConfig"]

_NAME = "compressed-tensors"
_SERVED = (
    "integers of 4 or 8 bits without quantised activations (pack-quantized), int8 with int8 "
    "activations, fp8 per tensor or channel with fp8 activations or without, fp8 per block with "
    "fp8 activations"
)
_SCHEMES = (
    CompressedTensorsWNA16,
    CompressedTensorsW8A8Int8,
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A16Fp8,
)


class NeuronCompressedTensorsConfig(CompressedTensorsConfig):
    """The quantisation of a compressed-tensors checkpoint."""

    @property
    def full_config(self) -> dict[str, Any]:
        """`quantization_config` as the checkpoint has it."""
        return self.config or {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NeuronCompressedTensorsConfig:
        """Reads `quantization_config`.

        Raises:
            ConfigurationError: a scheme that the arithmetic does not cover.
        """
        for name, group in config.get("config_groups", {}).items():
            if group.get("weights") is None:
                continue
            weights = QuantizationArgs.model_validate(group["weights"])
            text = f"{weights.num_bits}-bit {weights.type} weights ({name})"
            if weights.actorder in ("group", "dynamic"):
                raise refuse(
                    _NAME,
                    f"activation order {weights.actorder} ({name})",
                    "Use a checkpoint with static order or without, or one of GPTQ.",
                )
            if weights.num_bits not in (4, 8) or (weights.num_bits, weights.type) == (4, "float"):
                raise refuse(_NAME, text, f"Served are {_SERVED}.")
        cache = config.get("kv_cache_scheme") or {}
        if cache.get("strategy", "tensor") != "tensor":
            raise refuse(
                _NAME,
                f"KV cache scales per {cache['strategy']}",
                "Use a checkpoint with one scale per layer.",
            )
        if config.get("transform_config"):
            raise refuse(_NAME, "transforms", "Use a checkpoint without transform_config.")
        return cast("NeuronCompressedTensorsConfig", super().from_config(config))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns how a layer is computed; None: as vLLM does without quantisation.

        Raises:
            ConfigurationError: it cannot be.
        """
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            if self.get_scheme_dict(layer, prefix) is None:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            refuse_experts(_NAME, layer, prefix)
        method: QuantizeMethodBase | None = super().get_quant_method(layer, prefix)
        return method

    def _get_scheme_from_parts(
        self,
        weight_quant: QuantizationArgs,
        input_quant: QuantizationArgs | None,
        output_quant: QuantizationArgs | None = None,
        format: str | None = None,
        layer_name: str | None = None,
    ) -> CompressedTensorsScheme:
        described = (
            f"weights ({weight_quant.num_bits} bits, {weight_quant.type}, "
            f"{weight_quant.strategy}), activations "
            f"({_described(input_quant)}), format {format or self.quant_format}, in {layer_name}"
        )
        try:
            scheme = super()._get_scheme_from_parts(
                weight_quant, input_quant, output_quant, format, layer_name
            )
        except (NotImplementedError, ValueError) as error:
            # The constructors of some schemes look for their kernels.
            raise refuse(_NAME, described, f"Served are {_SERVED}.") from error
        if type(scheme) is CompressedTensorsW8A8Fp8:
            return _Fp8Scheme(weight_quant, scheme.is_static_input_scheme)
        blocks = weight_quant.strategy == QuantizationStrategy.BLOCK
        if type(scheme) not in _SCHEMES or (blocks and type(scheme) is CompressedTensorsW8A16Fp8):
            raise refuse(_NAME, described, f"Served are {_SERVED}.")
        return scheme


def _described(activations: QuantizationArgs | None) -> str:
    if activations is None:
        return "none"
    return f"{activations.num_bits} bits, {activations.type}, {activations.strategy}"


class _Fp8Scheme(CompressedTensorsW8A8Fp8):
    """fp8 weights and activations; scales per tensor become scales per output."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.strategy == QuantizationStrategy.TENSOR:
            scales = scale_of_each_output(layer.weight_scale, layer.logical_widths)
            layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
            self.strategy = QuantizationStrategy.CHANNEL
        super().process_weights_after_loading(layer)
