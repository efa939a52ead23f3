"""The arithmetic of quantised layers against weights that were packed by hand, and refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts

from tests import quantized
from vllm_neuron import capture
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm import factors, quantization
from vllm_neuron.vllm.quantization.arithmetic import expand_blocks, unpack, unpack_awq
from vllm_neuron.vllm.quantization.awq import AWQConfig, AWQLinearMethod
from vllm_neuron.vllm.quantization.compressed_tensors import NeuronCompressedTensorsConfig
from vllm_neuron.vllm.quantization.fp8 import NeuronFp8Config
from vllm_neuron.vllm.quantization.gptq import GPTQConfig, GPTQLinearMethod

GPTQ = {"bits": 4, "group_size": 16, "sym": True, "desc_act": False}
AWQ = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

sizes = st.tuples(st.integers(1, 3), st.sampled_from([16, 32, 64]), st.sampled_from([8, 24, 32]))


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer(torch.nn.Module):
    """A linear layer with given tensors."""

    def __init__(self, method, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.method = method
        for name, tensor in tensors.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)


def gptq_layer(weight: torch.Tensor, *, dtype=torch.float32, v2=False, **rule):
    """A GPTQ layer of the plugin, and the weight it stands for."""
    tensors, exact = quantized.gptq_layer("x", weight, **rule)
    settings_ = {**GPTQ, **{"bits": 4, **rule}}
    config = GPTQConfig.from_config(settings_ | ({"checkpoint_format": "gptq_v2"} if v2 else {}))
    held = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    held["scales"] = held["scales"].to(dtype)
    if config.is_sym:
        del held["qzeros"]
    return Layer(GPTQLinearMethod(config), held), exact


def awq_layer(weight: torch.Tensor, *, group_size: int):
    tensors, exact = quantized.awq_layer("x", weight, group_size=group_size)
    held = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    held["scales"] = held["scales"].float()
    return Layer(AWQLinearMethod(AWQConfig.from_config(AWQ)), held), exact


@given(st.integers(0, 2**16), st.sampled_from([2, 4, 8]), st.sampled_from([0, 1]))
@settings(max_examples=30, deadline=None)
def test_unpacking_undoes_packing(seed, bits, dim):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << bits, (32, 64), generator=generator)
    words = quantized.pack(values, bits=bits, dim=dim)
    found = unpack(words, bits=bits, dim=dim)
    assert found.dtype == torch.int32
    assert torch.equal(found, values.int())
    if bits == 4:
        words = quantized.pack(values, bits=4, dim=1, order=quantized.AWQ_ORDER)
        assert torch.equal(unpack_awq(words), values.int())


@given(
    size=sizes,
    bits=st.sampled_from([4, 8]),
    sym=st.booleans(),
    group_size=st.sampled_from([8, 16, -1]),
    desc_act=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_gptq_layer_equals_its_dequantised_weight(size, bits, sym, group_size, desc_act, seed):
    tokens, inputs, outputs = size
    weight, x = noise(seed, outputs, inputs), noise(seed + 1, tokens, inputs)
    layer, exact = gptq_layer(weight, bits=bits, sym=sym, group_size=group_size, desc_act=desc_act)
    # The weights are the same numbers; the products may be summed in another order.
    torch.testing.assert_close(layer(x), linear(x, exact), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(torch.eye(inputs)), exact.t(), rtol=0, atol=0)


@given(size=sizes, group_size=st.sampled_from([8, 16]), seed=st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_awq_layer_equals_its_dequantised_weight(size, group_size, seed):
    tokens, inputs, outputs = size
    layer, exact = awq_layer(noise(seed, outputs, inputs), group_size=group_size)
    x = noise(seed + 1, tokens, inputs)
    torch.testing.assert_close(layer(x), linear(x, exact), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(torch.eye(inputs)), exact.t(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_is_rounded_once(dtype):
    """Zero point and difference are exact in 16 bits, up to 8-bit weights."""
    layer, _ = gptq_layer(noise(3, 16, 32), bits=8, sym=False, dtype=dtype)
    values = unpack(layer.qweight, bits=8, dim=0)
    zeros = (unpack(layer.qzeros, bits=8, dim=1) + 1) & 255
    exact = (values - zeros.repeat_interleave(16, 0)).double()
    exact = (exact * layer.scales.double().repeat_interleave(16, 0)).to(dtype)
    assert torch.equal(layer(torch.eye(32, dtype=dtype)), exact)


def test_zero_points_of_gptq_wrap_and_are_stored_less_one_in_the_first_format_only():
    layer, exact = gptq_layer(noise(4, 8, 16).abs(), sym=False)
    assert torch.equal(unpack(layer.qzeros, bits=4, dim=1), torch.full((1, 8), 15))
    torch.testing.assert_close(layer(torch.eye(16)), exact.t(), rtol=0, atol=0)
    other, _ = gptq_layer(noise(4, 8, 16).abs(), sym=False, v2=True)
    with torch.no_grad():
        other.qzeros.zero_()
    torch.testing.assert_close(other(torch.eye(16)), exact.t(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gptq", "gptq-ordered", "awq"])
def test_packed_weights_are_inputs_of_the_graph_and_no_integer_is_wide(kind):
    weight = noise(5, 32, 64)
    if kind == "awq":
        layer, _ = awq_layer(weight, group_size=16)
    else:
        layer, _ = gptq_layer(weight, sym=False, desc_act=kind == "gptq-ordered")
        if kind == "gptq":
            del layer.g_idx
    graph = capture.capture(layer, (noise(6, 2, 64),), bucket="x")
    held = {item.name: item.spec for item in graph.record.inputs}
    names = {name for name, _ in layer.named_parameters()}
    assert {name for name in held if held[name].dtype == "int32"} == names - {"scales"}
    assert names < set(held)
    assert sum(p.nbytes for n, p in layer.named_parameters() if n == "qweight") == 32 * 64 // 2
    for node in graph.graph_module.graph.nodes:
        value = node.meta.get("val")
        assert getattr(value, "dtype", None) is not torch.int64, node
        # No weight became a constant.
        assert node.op != "get_attr", node


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 4), st.integers(1, 4))
)
@settings(max_examples=30, deadline=None)
def test_a_scale_covers_its_block(shape, block):
    rows, columns = (-(-size // step) for size, step in zip(shape, block, strict=True))
    scales = torch.arange(rows * columns).view(rows, columns).float()
    found = expand_blocks(scales, block=block, shape=shape)
    assert found.shape == shape
    for row in range(shape[0]):
        for column in range(shape[1]):
            assert found[row, column] == scales[row // block[0], column // block[1]]


@pytest.mark.parametrize("method", ["torchao", "bitsandbytes", "mxfp4", "modelopt"])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(ConfigurationError) as caught:
        quantization.check_method(method)
    assert caught.value.name == "--quantization"
    assert str(caught.value).startswith(
        f"--quantization ({method}) is not supported on Neuron in this version. Use a checkpoint "
        "that is quantised by one of: gptq, "
    )


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        (GPTQConfig, {"bits": 3}, "--quantization (gptq) with 3 bits is not supported on Neuron"),
        (
            GPTQConfig,
            {"dynamic": {"+:.*": {"bits": 2}}},
            "--quantization (gptq) with 2 bits is not supported on Neuron",
        ),
        (AWQConfig, {"bits": 8}, "--quantization (awq) with 8 bits is not supported on Neuron"),
        (
            AWQConfig,
            {"version": "gemv"},
            "--quantization (awq) with layout gemv is not supported on Neuron",
        ),
        (
            AWQConfig,
            {"zero_point": False},
            "--quantization (awq) with zero_point false is not supported on Neuron",
        ),
    ],
)
def test_settings_that_are_not_served_are_refused(config, changes, text):
    base = GPTQ if config is GPTQConfig else AWQ
    with pytest.raises(ConfigurationError) as caught:
        config.from_config(base | changes)
    assert str(caught.value).startswith(text)


def test_settings_of_a_checkpoint_are_factors_of_the_trace_key():
    """Shapes and dtypes are the same; only the settings tell the graphs apart."""
    first, second = (
        factors._quantization(GPTQConfig.from_config(GPTQ | {"checkpoint_format": name}))
        for name in ("gptq", "gptq_v2")
    )
    assert first != second
    assert factors._quantization(None) is None
    awq = factors._quantization(AWQConfig.from_config(AWQ))
    assert awq["class"] == "vllm_neuron.vllm.quantization.awq.AWQConfig"
    assert SimpleNamespace(**dict(awq["settings"])).version == "gemm"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            NeuronFp8Config.from_config({"quant_method": "fp8", "activation_scheme": "dynamic"}),
            "fp8",
        ),
        (
            NeuronCompressedTensorsConfig.from_config(
                {
                    "format": "pack-quantized",
                    "config_groups": {
                        "a": {
                            "targets": ["Linear"],
                            "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
                        }
                    },
                }
            ),
            "compressed-tensors",
        ),
    ],
)
def test_experts_of_fp8_and_compressed_tensors_are_refused_by_name(config, name):
    experts = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(experts)
    with pytest.raises(ConfigurationError) as caught:
        config.get_quant_method(experts, "model.layers.0.mlp.experts")
    assert str(caught.value) == (
        f"--quantization ({name}) with quantised experts (layer model.layers.0.mlp.experts) is not "
        "supported on Neuron in this version. Use a checkpoint whose experts are not quantised."
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            GPTQConfig.from_config(GPTQ | {"desc_act": True}),
            "--quantization (gptq) with desc_act and quantised experts (layer m.experts) is not",
        ),
        (
            AWQConfig.from_config(AWQ),
            "--quantization (awq) with experts that have biases (layer m.experts) is not supported",
        ),
    ],
)
def test_experts_that_are_not_computed_are_refused(config, text):
    experts = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(experts)
    experts.moe_config = SimpleNamespace(has_bias=True)
    with pytest.raises(ConfigurationError) as caught:
        config.get_quant_method(experts, "m.experts")
    assert str(caught.value).startswith(text)
