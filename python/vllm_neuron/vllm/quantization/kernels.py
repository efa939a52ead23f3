"""Products with quantised weights for vLLM's methods that choose a kernel by platform.

compressed-tensors and fp8 describe a linear layer, and vLLM asks the kernels of the platform which
of them computes it. These are all of the plugin's; none needs compiled code.

What is computed in which dtype:
    * integer weights without quantised activations: as `arithmetic.dequantise`, then a product in
      the model's dtype;
    * fp8 weights without quantised activations: the weight times its scale, rounded to the model's
      dtype, then a product in it;
    * quantised activations: both operands exact in float32, their product in float32, then the
      scales, then rounded to the model's dtype. A sum of int8 products is exact below 2**24, that
      is for up to 1040 inputs, and off by at most one part in 2**24 per addition beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_FP8_BLOCK_KERNELS,
    _POSSIBLE_WFP8A16_KERNELS,
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
    MPLinearKernel,
    MPLinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import group_broadcast
from vllm.platforms.interface import PlatformEnum

from vllm_neuron.vllm.quantization.arithmetic import dequantise, expand_blocks, unpack
from vllm_neuron.vllm.quantization.layers import keep_plain, scale_of_each_output

__all__ = [
    "Fp8BlockKernel",
    "Fp8Kernel",
    "Fp8WeightKernel",
    "Int8Kernel",
    "PackedIntegerKernel",
    "register_kernels",
]

_INT8 = torch.iinfo(torch.int8)


def register_kernels() -> None:
    """Adds the kernels to vLLM's lists for platforms outside of vLLM."""
    register_linear_kernel(PackedIntegerKernel, PlatformEnum.OOT, "mp")
    register_linear_kernel(Int8Kernel, PlatformEnum.OOT, "int8")
    register_linear_kernel(Fp8Kernel, PlatformEnum.OOT, "fp8")
    # vLLM has no function for these two.
    _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.OOT] = [Fp8BlockKernel]
    _POSSIBLE_WFP8A16_KERNELS[PlatformEnum.OOT] = [Fp8WeightKernel]


class PackedIntegerKernel(MPLinearKernel):
    """4- and 8-bit integers packed along the inputs, as compressed-tensors stores them.

    Parameters for K inputs, N outputs, G groups and b bits: weights int32 (N, K * b / 32), scales
    (N, G) of the model's dtype, zero points int32 (N * b / 32, G) if it is asymmetric.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns a capability that every device has."""
        return 0

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Returns whether a layer is computed, and why not."""
        bits, (inputs, outputs) = c.weight_type.size_bits, c.partition_weight_shape
        if bits not in (4, 8):
            return False, f"{bits}-bit integers; 4 and 8 bits are computed"
        if c.group_size != -1 and inputs % c.group_size:
            return False, f"{inputs} inputs in groups of {c.group_size}"
        if inputs * bits % 32 or outputs * bits % 32:
            return False, f"{inputs} inputs or {outputs} outputs that do not fill words of 32 bits"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the parameters as they are."""
        zeros = [self.w_zp_name] if self.config.zero_points and self.w_zp_name else []
        keep_plain(layer, self.w_q_name, self.w_s_name, *zeros)

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x (..., K) times the weights, (..., N), in the model's dtype."""
        words, scales, packed_zeros = self._get_weight_params(layer)
        bits = self.config.weight_type.size_bits
        zeros: torch.Tensor | int = 1 << (bits - 1)
        if self.config.zero_points:
            assert packed_zeros is not None
            zeros = unpack(packed_zeros, bits=bits, dim=0).to(scales.dtype)
        weights = dequantise(unpack(words, bits=bits, dim=1), scales, zeros, dim=1)
        return linear(x, weights, bias)


class _ForEveryLayer:
    """What vLLM asks a kernel before it chooses it."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Returns that every device will do."""
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Returns that every layer is computed."""
        return True, None


class Int8Kernel(_ForEveryLayer, Int8ScaledMMLinearKernel):
    """int8 weights and activations.

    Parameters for K inputs and N outputs: weights int8 (N, K), their scales float32 (N, 1), and
    for static activations a scale float32 and a zero point float32, both (1,).
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Gives every output a scale."""
        weight, scale, input_scale, input_zero, _ = self.layer_param_names
        keep_plain(layer, weight)
        scales = scale_of_each_output(getattr(layer, scale), layer.logical_widths)
        layer.register_parameter(scale, torch.nn.Parameter(scales, requires_grad=False))
        if not self.config.is_static_input_scheme:
            return
        keep_plain(layer, input_scale)
        if not self.config.input_symmetric:
            zero = getattr(layer, input_zero).data.float()
            layer.register_parameter(input_zero, torch.nn.Parameter(zero, requires_grad=False))

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x (..., K) times the weights, (..., N), in the model's dtype."""
        weight, scales, input_scale, input_zero, _ = self._get_layer_params(layer)
        values, scale, zero = quantise_int8(
            x.float(), input_scale, input_zero, symmetric=self.config.input_symmetric
        )
        if zero is not None:
            values = values - zero
        output = linear(values, weight.float()) * scale * scales.view(-1)
        output = output.to(x.dtype)
        return output if bias is None else output + bias


def quantise_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    *,
    symmetric: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rounds activations to int8, as vLLM's `scaled_int8_quant` does.

    Args:
        x: float32 (..., K).
        scale: of all activations, or None: of each token, from its own values.
        zero: zero point of all activations, or None.
        symmetric: whether there is no zero point.

    Returns:
        Integers in float32 (..., K), scales, zero points or None.
    """
    if scale is None:
        if symmetric:
            scale = x.abs().amax(-1, keepdim=True) / _INT8.max
        else:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            scale = (high - low) / (_INT8.max - _INT8.min)
        # A token of zeros, or of one number, whose quotient would be NaN.
        scale = torch.where(scale > 0, scale, 1.0)
        if not symmetric:
            zero = torch.round(_INT8.min - low / scale)
    values = torch.round(x / scale)
    if zero is not None:
        values = values + zero
    return values.clamp(_INT8.min, _INT8.max), scale, zero


class Fp8Kernel(_ForEveryLayer, FP8ScaledMMLinearKernel):
    """fp8 weights and activations, scaled per tensor, output or token.

    vLLM's base class rounds the activations; the weight is float8_e4m3fn (K, N), a view of (N, K).
    """

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """Returns the product of A (T, K) and B (K, N), scaled by As and Bs, of `out_dtype`."""
        output = (A.float() @ B.float()) * As * Bs.view(-1)
        output = output.to(out_dtype).view(output_shape)
        return output if bias is None else output + bias


class Fp8WeightKernel(Fp8Kernel):
    """fp8 weights, activations of the model's dtype."""

    def apply_weights(
        self, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x (..., K) times the weights, (..., N), in the model's dtype."""
        weight, scales, _, _ = self._get_layer_params(layer)
        return linear(x, (weight.t().float() * scales.view(-1, 1)).to(x.dtype), bias)


class Fp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """fp8 weights with a scale per block, activations with a scale per token and group."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Returns that every device will do."""
        return True, None

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """Returns the product of A (T, K) and B (N, K), float32 (T, N)."""
        block: Sequence[int] = self.weight_group_shape
        weights = B.float() * expand_blocks(
            Bs.float(), block=(block[0], block[1]), shape=(B.shape[0], B.shape[1])
        )
        return linear(A.float() * group_broadcast(As, A.shape), weights)
