"""GPTQ checkpoints: 4 and 8 bits, symmetric or not, in any group size, with activation order."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    flatten_list,
    get_dynamic_override,
    get_linear_quant_method,
    override_config,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
)
from vllm.scalar_type import scalar_types

from vllm_neuron.vllm.quantization.arithmetic import dequantise, unpack
from vllm_neuron.vllm.quantization.experts import GPTQExperts
from vllm_neuron.vllm.quantization.layers import ACTIVATION_DTYPES, keep_plain, refuse

__all__ = ["GPTQConfig", "GPTQLinearMethod"]

_NAME = "gptq"
_BITS = (4, 8)


class GPTQConfig(AutoGPTQConfig):
    """The quantisation of a GPTQ checkpoint.

    vLLM's own configuration has lost asymmetric zero points and activation order to its kernels.
    """

    TYPE_MAP = {  # noqa: RUF012 - vLLM's form
        (4, True): scalar_types.uint4b8,
        (4, False): scalar_types.uint4,
        (8, True): scalar_types.uint8b128,
        (8, False): scalar_types.uint8,
    }

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        desc_act: bool,
        is_sym: bool,
        lm_head_quantized: bool,
        dynamic: dict[str, dict[str, int | bool]],
        full_config: dict[str, Any],
        modules_in_block_to_quantize: list[str] | None = None,
    ) -> None:
        for bits in (weight_bits, *(rule.get("bits", weight_bits) for rule in dynamic.values())):
            if bits not in _BITS:
                raise refuse(_NAME, f"{bits} bits", "Use a checkpoint of 4 or 8 bits.")
        # vLLM refuses activation order in here.
        super().__init__(
            weight_bits,
            group_size,
            False,
            is_sym,
            lm_head_quantized,
            {},
            full_config,
            modules_in_block_to_quantize,
        )
        # A single group has no order.
        self.desc_act = desc_act and group_size != -1
        self.dynamic = dynamic
        #: Whether zero points are stored as they are, and not less one.
        self.has_true_zeros = full_config.get("checkpoint_format") == "gptq_v2"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Returns the model dtypes; vLLM's kernels leave float32 out."""
        return list(ACTIVATION_DTYPES)

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Returns a mapping that keeps `g_idx` but for experts; vLLM's drops it."""
        return WeightsMapper(orig_to_new_regex={re.compile(r"\.experts\..*\.g_idx$"): None})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Returns how a layer is computed; None: as vLLM does without quantisation.

        Raises:
            ConfigurationError: it cannot be.
        """
        if isinstance(layer, RoutedExperts):
            skipped = get_dynamic_override(self, layer_name=prefix) is False
            if skipped or not self._has_quantised_experts():
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return self._experts(layer, prefix)
        method: QuantizeMethodBase | None = get_linear_quant_method(
            self, layer, prefix, GPTQLinearMethod
        )
        return method

    def _experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        own = deepcopy(self)
        override_config(own, prefix=prefix)
        if own.desc_act:
            raise refuse(
                _NAME,
                f"desc_act and quantised experts (layer {prefix})",
                "Use a checkpoint with desc_act false, or whose experts are not quantised.",
            )
        return GPTQExperts(own, layer.moe_config)

    def zero_points(self, words: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns zero points that are packed along the last dimension."""
        stored = unpack(words, bits=self.weight_bits, dim=words.dim() - 1)
        # 0 is stored as the largest value: less one, modulo.
        offset = 0 if self.has_true_zeros else 1
        return ((stored + offset) & ((1 << self.weight_bits) - 1)).to(dtype)

    def _has_quantised_experts(self) -> bool:
        """Whether any is; vLLM collects the quantised layers, where it can read the weights."""
        names = flatten_list(self.modules_in_block_to_quantize)
        return not names or any(".experts." in f".{name}." for name in names)


class _GroupIndex(BasevLLMParameter):
    """Group of each input: the same for all layers that vLLM merges into one.

    Args:
        group_size: inputs of a group.
        ordered: whether groups are consecutive.
    """

    def __init__(self, *, group_size: int, ordered: bool, **parameter: Any) -> None:
        self._group_size = group_size
        self._ordered = ordered
        self._loaded = False
        super().__init__(**parameter)

    def _assert_and_load(self, loaded_weight: torch.Tensor) -> None:
        groups = loaded_weight.to(torch.int32)
        if self._ordered:
            expected = torch.arange(len(groups), dtype=torch.int32) // self._group_size
            if not torch.equal(groups, expected):
                raise refuse(
                    _NAME,
                    "desc_act false and groups (g_idx) that are not consecutive",
                    "Set desc_act to true in the checkpoint's quantization_config.",
                )
        if self._loaded and not torch.equal(groups, self.data):
            raise refuse(
                _NAME,
                "desc_act and another order of the inputs (g_idx) in layers that vLLM merges",
                "Quantise the checkpoint again, all layers of one input with the same order.",
            )
        super()._assert_and_load(groups)
        self._loaded = True


@register_weight_loader_v2_supported_method
class GPTQLinearMethod(LinearMethodBase):
    """A linear layer with GPTQ weights.

    Parameters of a layer, as in the checkpoint, for K inputs, N outputs, G groups and b bits:
    `qweight` int32 (K * b / 32, N), `scales` (G, N) of the model's dtype, `qzeros` int32
    (G, N * b / 32) if it is asymmetric, `g_idx` int32 (K,) if it has activation order.
    """

    def __init__(self, quant_config: GPTQConfig) -> None:
        self.quant_config = quant_config
        self.bits = quant_config.weight_bits
        self.group_size = quant_config.group_size
        self.is_symmetric = quant_config.is_sym
        self.has_order = quant_config.desc_act

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters that the checkpoint is loaded into.

        Raises:
            ConfigurationError: the layer's sizes do not divide into words and groups.
        """
        loader = extra_weight_attrs.get("weight_loader")
        outputs = sum(output_partition_sizes)
        group_size = self.group_size if self.group_size != -1 else input_size
        packed = 32 // self.bits
        if input_size % group_size or input_size % packed or outputs % packed:
            raise refuse(
                _NAME,
                f"a layer of {input_size} inputs and {outputs} outputs in groups of {group_size}",
                f"Inputs must be a multiple of the group size, both sizes of {packed}.",
            )
        groups = input_size // group_size
        layer.register_parameter(
            "qweight",
            PackedvLLMParameter(
                data=torch.empty(input_size // packed, outputs, dtype=torch.int32),
                input_dim=0,
                output_dim=1,
                packed_dim=0,
                packed_factor=packed,
                weight_loader=loader,
            ),
        )
        layer.register_parameter(
            "qzeros",
            PackedvLLMParameter(
                data=torch.empty(groups, outputs // packed, dtype=torch.int32),
                input_dim=0,
                output_dim=1,
                packed_dim=1,
                packed_factor=packed,
                weight_loader=loader,
            ),
        )
        layer.register_parameter(
            "scales",
            GroupQuantScaleParameter(
                data=torch.empty(groups, outputs, dtype=params_dtype),
                input_dim=0,
                output_dim=1,
                weight_loader=loader,
            ),
        )
        layer.register_parameter(
            "g_idx",
            _GroupIndex(
                data=torch.arange(input_size, dtype=torch.int32) // group_size,
                group_size=group_size,
                ordered=not self.has_order,
                weight_loader=loader,
            ),
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Drops what the arithmetic does not read."""
        keep_plain(layer, "qweight", "scales")
        if self.is_symmetric:
            del layer.qzeros
        else:
            keep_plain(layer, "qzeros")
        if self.has_order:
            keep_plain(layer, "g_idx")
        else:
            del layer.g_idx

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x (..., K) times the weights, (..., N), in the model's dtype."""
        zeros: torch.Tensor | int = 1 << (self.bits - 1)
        if not self.is_symmetric:
            zeros = self.quant_config.zero_points(layer.qzeros, dtype=layer.scales.dtype)
        weights = dequantise(
            unpack(layer.qweight, bits=self.bits, dim=0),
            layer.scales,
            zeros,
            dim=0,
            groups=layer.g_idx if self.has_order else None,
        )
        return linear(x, weights.t(), bias)
