"""The plugin's kernels for compressed-tensors and fp8 against dequantised weights, and lowered."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearLayerConfig,
    MPLinearLayerConfig,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.scalar_type import scalar_types

from tests import quantized
from tests.lowering.parity import assert_parity, lower, lowering_of
from tests.vllm.test_quantization import Layer, awq_layer, gptq_layer, noise, sizes
from vllm_neuron.compiler.module_files import check_module
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.route import Route
from vllm_neuron.target import TARGETS
from vllm_neuron.vllm.moe import apply_experts
from vllm_neuron.vllm.quantization.compressed_tensors import NeuronCompressedTensorsConfig
from vllm_neuron.vllm.quantization.experts import AWQExperts, GPTQExperts
from vllm_neuron.vllm.quantization.fp8 import NeuronFp8Config
from vllm_neuron.vllm.quantization.gptq import GPTQConfig
from vllm_neuron.vllm.quantization.kernels import (
    Fp8BlockKernel,
    Fp8Kernel,
    Fp8WeightKernel,
    Int8Kernel,
    PackedIntegerKernel,
)
from vllm_neuron.vllm.quantization.layers import scale_of_each_output

INT8_NAMES = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
FP8_NAMES = ("weight", "weight_scale", "input_scale", "input_scale_ub")


class Kernel:
    """A kernel as the method of a `Layer`."""

    def __init__(self, kernel) -> None:
        self.apply = kernel.apply_weights


def held(tensors):
    return {name.removeprefix("x."): tensor for name, tensor in tensors.items()}


def packed_layer(weight, *, bits, symmetric, group_size):
    types = {
        (4, True): scalar_types.uint4b8,
        (4, False): scalar_types.uint4,
        (8, True): scalar_types.uint8b128,
        (8, False): scalar_types.uint8,
    }
    config = MPLinearLayerConfig(
        full_weight_shape=weight.shape[::-1],
        partition_weight_shape=weight.shape[::-1],
        weight_type=types[bits, symmetric],
        act_type=torch.float32,
        group_size=group_size or -1,
        zero_points=not symmetric,
    )
    assert PackedIntegerKernel.can_implement(config) == (True, None)
    kernel = PackedIntegerKernel(config, "weight_packed", "weight_scale", "weight_zero_point")
    tensors, exact = quantized.packed_weight(
        "x", weight, bits=bits, symmetric=symmetric, group_size=group_size
    )
    tensors = held(tensors)
    del tensors["weight_shape"]
    tensors["weight_scale"] = tensors["weight_scale"].float().contiguous()
    return Layer(Kernel(kernel), tensors), exact


def int8_layer(weight, *, static=False, symmetric=True):
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=static, is_channelwise=True, input_symmetric=symmetric
    )
    tensors, exact = quantized.int8_weight("x", weight, channel=True)
    tensors = held(tensors)
    if static:
        tensors["input_scale"] = torch.tensor([0.05])
        tensors["input_zero_point"] = torch.tensor([-3.0])
    return Layer(Kernel(Int8Kernel(config, INT8_NAMES)), tensors), exact


class Fp8Product(torch.nn.Module):
    """The product of `Fp8Kernel`, whose base class of vLLM rounds the activations."""

    def __init__(self, weight, scales) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scales = torch.nn.Parameter(scales, requires_grad=False)
        self.kernel = Fp8Kernel.__new__(Fp8Kernel)

    def forward(self, x, scale):
        return self.kernel.apply_scaled_mm(
            A=(x / scale).to(torch.float8_e4m3fn),
            B=self.weight.t(),
            out_dtype=torch.float32,
            As=scale,
            Bs=self.scales,
            bias=None,
            output_shape=[len(x), len(self.weight)],
        )


class Fp8BlockProduct(Fp8Product):
    """The product of `Fp8BlockKernel`."""

    def __init__(self, weight, scales, block) -> None:
        super().__init__(weight, scales)
        self.kernel = Fp8BlockKernel.__new__(Fp8BlockKernel)
        self.kernel.weight_group_shape = GroupShape(block, block)
        self.block = block

    def forward(self, x, scale):
        parts = x.unflatten(-1, (-1, self.block)) / scale.unsqueeze(-1)
        return self.kernel.apply_block_scaled_mm(
            A=parts.to(torch.float8_e4m3fn).flatten(-2),
            B=self.weight,
            As=scale,
            Bs=self.scales,
        )


def fp8_products(weight, x):
    """Both products and the weight-only one, arguments, and the results that they stand for."""
    tensors, exact = quantized.fp8_weight("x", weight, channel=True)
    scale = x.abs().amax(-1, keepdim=True) / 448
    product = Fp8Product(tensors["x.weight"], tensors["x.weight_scale"])
    yield product, (x, scale), linear(quantized.fp8_activations(x), exact)
    kernel = Fp8WeightKernel.__new__(Fp8WeightKernel)
    kernel.layer_param_names = FP8_NAMES
    stored = held(tensors)
    stored["weight"] = stored["weight"].t()
    yield Layer(Kernel(kernel), stored), (x,), linear(x, exact)
    tensors, exact = quantized.fp8_weight("x", weight, block=8)
    scale = x.unflatten(-1, (-1, 8)).abs().amax(-1) / 448
    blocks = Fp8BlockProduct(tensors["x.weight"], tensors["x.weight_scale_inv"], 8)
    yield blocks, (x, scale), linear(quantized.fp8_activations(x, group=8), exact)


class Experts(torch.nn.Module):
    """A layer of three experts, two for each token, and its dequantised weights.

    Attributes:
        exact: gate and up (E, 2 * I, H), and down (E, H, I).
    """

    def __init__(self, quantise, method) -> None:
        super().__init__()
        count, hidden, inner = 3, 32, 16
        self.exact = []
        for part, shape in (("w13", (2 * inner, hidden)), ("w2", (hidden, inner))):
            made = [quantise("x", noise(expert, *shape)) for expert in range(count)]
            self.exact.append(torch.stack([exact for _, exact in made]))
            for name in ("qweight", "qzeros", "scales"):
                stacked = torch.stack([tensors[f"x.{name}"] for tensors, _ in made])
                stacked = stacked.float() if name == "scales" else stacked
                parameter = torch.nn.Parameter(stacked, requires_grad=False)
                self.register_parameter(f"{part}_{name}", parameter)
        self.method = method
        self.scoring_func, self.activation, self.top_k = "softmax", MoEActivation.SILU, 2
        self.use_grouped_topk, self.renormalize = False, True
        self.e_score_correction_bias, self.routed_scaling_factor = None, 1.0

    def forward(self, x, router_logits):
        return self.method.apply_monolithic(self, x, router_logits)


def experts_layers():
    """Layers of packed experts: AWQ, GPTQ symmetric and not."""
    awq = AWQExperts.__new__(AWQExperts)
    awq.moe = SimpleNamespace(has_bias=False)
    yield Experts(partial(quantized.awq_layer, group_size=16), awq)
    for sym, bits in ((True, 4), (False, 8)):
        gptq = GPTQExperts.__new__(GPTQExperts)
        gptq.moe = SimpleNamespace(has_bias=False)
        gptq.quant_config = GPTQConfig.from_config(
            {"bits": bits, "group_size": 16, "sym": sym, "desc_act": False}
        )
        yield Experts(partial(quantized.gptq_layer, sym=sym, bits=bits), gptq)


def test_packed_experts_equal_their_dequantised_weights_and_lower():
    x, logits = noise(7, 5, 32), noise(8, 5, 3)
    with lowering_of(Route.NATIVE) as lowering:
        for layer in experts_layers():
            gate_up, down = layer.exact
            expected = apply_experts(
                layer, x, logits, gate_up_weights=gate_up, down_weights=down, has_bias=False
            )
            torch.testing.assert_close(layer(x, logits), expected, rtol=1e-5, atol=1e-5)
            assert_parity(lowering, layer, (x, logits), rtol=1e-4, atol=1e-4)


@given(
    size=sizes,
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    group_size=st.sampled_from([8, 16, None]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=30, deadline=None)
def test_packed_integers_equal_their_dequantised_weight(size, bits, symmetric, group_size, seed):
    tokens, inputs, outputs = size
    weight, x = noise(seed, outputs, inputs), noise(seed + 1, tokens, inputs)
    layer, exact = packed_layer(weight, bits=bits, symmetric=symmetric, group_size=group_size)
    torch.testing.assert_close(layer(x), linear(x, exact), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(torch.eye(inputs)), exact.t(), rtol=0, atol=0)


@given(size=sizes, kind=st.sampled_from(["token", "asymmetric", "static"]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_int8_equals_rounded_activations_times_the_dequantised_weight(size, kind, seed):
    tokens, inputs, outputs = size
    weight, x = noise(seed, outputs, inputs), noise(seed + 1, tokens, inputs)
    layer, exact = int8_layer(weight, static=kind == "static", symmetric=kind == "token")
    rounded = {
        "token": quantized.int8_activations,
        "asymmetric": quantized.int8_asymmetric_activations,
        "static": lambda x: quantized.int8_activations(x, scale=0.05, zero=-3.0),
    }[kind](x)
    torch.testing.assert_close(layer(x), linear(rounded, exact), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_of_zeros_is_zero(symmetric):
    layer, _ = int8_layer(noise(1, 8, 16), symmetric=symmetric)
    assert torch.equal(layer(torch.zeros(2, 16)), torch.zeros(2, 8))


def test_int8_products_are_exact_for_1040_inputs():
    values = torch.full((1, 1040), 127.0)
    scales = {"weight": torch.full((1, 1040), 127, dtype=torch.int8)}
    layer, _ = int8_layer(torch.ones(1, 1040), static=True)
    layer.input_scale.data.fill_(1.0)
    layer.weight.data.copy_(scales["weight"])
    layer.weight_scale.data.fill_(1.0)
    assert layer(values).item() == 127 * 127 * 1040 < 1 << 24


@given(st.integers(1, 3), st.sampled_from([8, 24]), st.sampled_from([3, 8, 20]), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_fp8_equals_rounded_activations_times_the_dequantised_weight(tokens, inputs, outputs, seed):
    weight, x = noise(seed, outputs, inputs), noise(seed + 1, tokens, inputs)
    for product, arguments, expected in fp8_products(weight, x):
        torch.testing.assert_close(product(*arguments), expected, rtol=1e-4, atol=1e-4)


def test_every_layer_lowers_to_what_eager_computes():
    x, weight = noise(1, 3, 64), noise(2, 24, 64)
    cases = [(product, arguments) for product, arguments, _ in fp8_products(weight, x)]
    for layer, _ in (
        gptq_layer(weight, sym=False, desc_act=True),
        awq_layer(weight, group_size=16),
        packed_layer(weight, bits=4, symmetric=False, group_size=16),
        int8_layer(weight, symmetric=False),
        int8_layer(weight, static=True, symmetric=False),
    ):
        cases.append((layer, (x,)))
    with lowering_of(Route.NATIVE) as lowering:
        for layer, arguments in cases:
            assert_parity(lowering, layer, arguments, rtol=1e-5, atol=1e-5)
            # Nothing that neuronx-cc is known to refuse.
            module = lower(lowering, layer, arguments)
            check_module(module, target=TARGETS["trn2"], native_int64=False)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        (torch.tensor([2.0, 3.0]), [2, 2, 3]),
        # Merged in the checkpoint: one scale; vLLM fills the others with the lowest number.
        (torch.tensor([2.0, torch.finfo(torch.float32).min]), [2, 2, 2]),
        (torch.tensor([[1.0], [2.0], [3.0]]), [1, 2, 3]),
    ],
)
def test_scales_of_merged_layers_stay_their_own(scales, expected):
    assert scale_of_each_output(scales, [2, 1]).flatten().tolist() == expected


def _group(bits, kind, strategy, **others):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **others}
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        (
            {"config_groups": {"a": _group(4, "float", "tensor_group", group_size=16)}},
            "--quantization (compressed-tensors) with 4-bit float weights (a) is not supported",
        ),
        (
            {"config_groups": {"a": _group(3, "int", "group", group_size=16)}},
            "--quantization (compressed-tensors) with 3-bit int weights (a) is not supported",
        ),
        (
            {"config_groups": {"a": _group(4, "int", "group", group_size=16, actorder="group")}},
            "--quantization (compressed-tensors) with activation order group (a) is not supported",
        ),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
            "--quantization (compressed-tensors) with KV cache scales per attn_head is not",
        ),
        (
            {"transform_config": {"config_groups": {}}},
            "--quantization (compressed-tensors) with transforms is not supported",
        ),
    ],
)
def test_schemes_that_are_not_served_are_refused(settings_, text):
    with pytest.raises(ConfigurationError) as caught:
        NeuronCompressedTensorsConfig.from_config({"format": "pack-quantized", **settings_})
    assert str(caught.value).startswith(text)


def test_int4_weights_with_int8_activations_are_refused():
    config = NeuronCompressedTensorsConfig.from_config(
        {
            "format": "pack-quantized",
            "config_groups": {
                "a": _group(4, "int", "channel")
                | {
                    "input_activations": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "token",
                        "dynamic": True,
                    }
                }
            },
        }
    )
    scheme = config.target_scheme_map["Linear"]
    with pytest.raises(ConfigurationError) as caught:
        config._get_scheme_from_parts(
            scheme["weights"], scheme["input_activations"], layer_name="model.layers.0.mlp"
        )
    assert "int, channel), activations (8 bits, int, token), format pack-quantized" in str(
        caught.value
    )


def test_weights_are_not_quantised_while_they_are_loaded():
    with pytest.raises(ConfigurationError) as caught:
        NeuronFp8Config().get_quant_method(SimpleNamespace(), "model.layers.0.mlp")
    assert str(caught.value).startswith(
        "--quantization (fp8) with a checkpoint that is not quantised is not supported on Neuron"
    )
