"""The emulator's own products: which products of a module become one, and what they compute."""

import pytest
import torch
from jaxlib.mlir import ir

from tests.compiler.modules import compiled, lowered, tensor_type
from vllm_neuron.compiler import host_kernels, xla_cpu
from vllm_neuron.lowering.mlir_context import stablehlo_context
from vllm_neuron.runtime.host import HostRuntime

# The result of one product beside its exact value, relative to the size of its terms.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def product(left: str, right: str, result: str, *, dims: str = "[1] x [1]") -> str:
    return f"contracting_dims = {dims} : ({left}, {right}) -> {result}"


def calls(module) -> int:
    """How many products of a module the kernels compute."""
    rewritten = host_kernels.with_kernels(module.data)
    if rewritten is module.data:
        return 0
    context = stablehlo_context()
    with context:
        text = str(ir.Module.parse(rewritten))
    return text.count(f"stablehlo.custom_call @{host_kernels.LINEAR}")


def run(module, *arguments):
    model = HostRuntime().load(compiled(module), aliases=module.aliases, bucket="decode_s1")
    return [output.read() for output in model.execute(list(arguments))]


def linear_with_bias(rows: int, inner: int, columns: int, dtype: str):
    """x W^T + b, and the product itself: a bias and a second user of the product."""
    x, weight, bias, result = (
        tensor_type(dtype, shape)
        for shape in ((rows, inner), (columns, inner), (columns,), (rows, columns))
    )
    return lowered(
        f"(%x: {x}, %weight: {weight}, %bias: {bias}) -> ({result}, {result})",
        f"""%0 = stablehlo.dot_general %x, %weight, {product(x, weight, result)}
        %1 = stablehlo.broadcast_in_dim %bias, dims = [1] : ({bias}) -> {result}
        %2 = stablehlo.add %0, %1 : {result}
        return %2, %0 : {result}, {result}""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(1, 576, 1536), (2, 33, 7), (3, 1, 5), (16, 577, 129), (17, 64, 64), (128, 96, 67), (4, 0, 3)],
)
def test_a_linear_layer_equals_torch(rows, inner, columns, dtype):
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(shape).to(dtype) for shape in ((rows, inner), (columns, inner), (columns,))
    )
    module = linear_with_bias(rows, inner, columns, str(dtype).removeprefix("torch."))
    assert calls(module) == 1
    biased, plain = run(module, x, weight, bias)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((plain.double() - exact).abs() <= size * TOLERANCE[dtype]).all()
    assert torch.equal(biased, plain + bias)


def test_a_bfloat16_product_may_have_a_float32_result():
    x, weight = tensor_type("bfloat16", (3, 64)), tensor_type("bfloat16", (5, 64))
    result = tensor_type("float32", (3, 5))
    module = lowered(
        f"(%x: {x}, %weight: {weight}) -> ({result})",
        f"%0 = stablehlo.dot_general %x, %weight, {product(x, weight, result)}\n"
        f"return %0 : {result}",
    )
    assert calls(module) == 1
    torch.manual_seed(0)
    left, right = torch.randn(3, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    (found,) = run(module, left, right)
    torch.testing.assert_close(found, left.float() @ right.float().T, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_transposed_and_one_that_is_used_twice():
    """x W^T by way of transpose(W), then times W again as it lies: the second stays XLA's."""
    x, weight = tensor_type("float32", (2, 64)), tensor_type("float32", (48, 64))
    turned, inner = tensor_type("float32", (64, 48)), tensor_type("float32", (2, 48))
    module = lowered(
        f"(%x: {x}, %weight: {weight}) -> ({inner}, {x}, {inner}, {turned})",
        f"""%0 = stablehlo.transpose %weight, dims = [1, 0] : ({weight}) -> {turned}
        %1 = stablehlo.dot_general %x, %0, {product(x, turned, inner, dims="[1] x [0]")}
        %2 = stablehlo.dot_general %1, %weight, {product(inner, weight, x, dims="[1] x [0]")}
        %3 = stablehlo.dot_general %2, %weight, {product(x, weight, inner)}
        return %1, %2, %3, %0 : {inner}, {x}, {inner}, {turned}""",
    )
    assert calls(module) == 2
    torch.manual_seed(0)
    left, right = torch.randn(2, 64), torch.randn(48, 64) / 8
    first, second, third, transposed = run(module, left, right)
    torch.testing.assert_close(first, left @ right.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second, first @ right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(third, second @ right.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(transposed, right.T)


def test_a_product_of_a_product():
    kind = tensor_type("float32", (3, 3))
    module = lowered(
        f"(%x: {kind}, %a: {kind}, %b: {kind}) -> {kind}",
        f"""%0 = stablehlo.dot_general %x, %a, {product(kind, kind, kind)}
        %1 = stablehlo.dot_general %0, %b, {product(kind, kind, kind)}
        %2 = stablehlo.dot_general %1, %a, {product(kind, kind, kind)}
        return %2 : {kind}""",
    )
    x, a, b = (torch.randn(3, 3) for _ in range(3))

    assert calls(module) == 3
    (found,) = run(module, x, a, b)

    torch.testing.assert_close(found, x @ a.T @ b.T @ a.T)


def test_a_weight_that_the_step_updates_in_place_is_read_before():
    x, weight = tensor_type("float32", (2, 8)), tensor_type("float32", (8, 8))
    module = lowered(
        f"(%weight: {weight} {{tf.aliasing_output = 0 : i32}}, %x: {x}) -> ({weight}, {x})",
        f"""%0 = stablehlo.add %weight, %weight : {weight}
        %1 = stablehlo.dot_general %x, %weight, {product(x, weight, x)}
        return %0, %1 : {weight}, {x}""",
    )
    assert calls(module) == 1
    runtime = HostRuntime()
    state = runtime.upload(torch.eye(8))
    model = runtime.load(compiled(module), aliases=module.aliases, bucket="decode_s1")
    left = torch.arange(16.0).view(2, 8)
    for scale in (1, 2, 4):
        _, result = model.execute([state, left])
        assert torch.equal(result.read(), left * scale)


@pytest.mark.parametrize(
    ("left", "right", "result", "dims"),
    [
        # Three dimensions, integers, a type without a kernel, the weight not transposed.
        (("float32", (2, 3, 8)), ("float32", (5, 8)), ("float32", (2, 3, 5)), "[2] x [1]"),
        (("int32", (3, 8)), ("int32", (5, 8)), ("int32", (3, 5)), "[1] x [1]"),
        (("float64", (3, 8)), ("float64", (5, 8)), ("float64", (3, 5)), "[1] x [1]"),
        (("float32", (3, 8)), ("float32", (8, 5)), ("float32", (3, 5)), "[1] x [0]"),
        (("float32", (8, 3)), ("float32", (5, 8)), ("float32", (3, 5)), "[0] x [1]"),
        (("float32", (8,)), ("float32", (5, 8)), ("float32", (5,)), "[0] x [1]"),
        (("float32", (3, 8)), ("float32", (5, 8)), ("float32", ()), "[0, 1] x [0, 1]"),
    ],
)
def test_other_products_stay_as_they_are(left, right, result, dims):
    if not result[1]:
        right = ("float32", (3, 8))
    kinds = [tensor_type(*kind) for kind in (left, right, result)]
    module = lowered(
        f"(%x: {kinds[0]}, %weight: {kinds[1]}) -> ({kinds[2]})",
        f"%0 = stablehlo.dot_general %x, %weight, {product(*kinds, dims=dims)}\n"
        f"return %0 : {kinds[2]}",
    )
    assert calls(module) == 0
    assert host_kernels.with_kernels(module.data) is module.data


def test_a_product_with_what_the_graph_computed_stays_as_it_is():
    """Attention's products: neither operand is an input, or there are batch dimensions."""
    x, weight = tensor_type("float32", (3, 8)), tensor_type("float32", (5, 8))
    result = tensor_type("float32", (3, 5))
    module = lowered(
        f"(%x: {x}, %weight: {weight}) -> ({result})",
        f"""%0 = stablehlo.add %weight, %weight : {weight}
        %1 = stablehlo.dot_general %x, %0, {product(x, weight, result)}
        return %1 : {result}""",
    )
    assert calls(module) == 0
    q, k, scores = (tensor_type("float32", shape) for shape in ((4, 3, 8), (4, 5, 8), (4, 3, 5)))
    module = lowered(
        f"(%q: {q}, %k: {k}) -> ({scores})",
        f"%0 = stablehlo.dot_general %q, %k, batching_dims = [0] x [0], "
        f"{product(q, k, scores, dims='[2] x [2]')}\nreturn %0 : {scores}",
    )
    assert calls(module) == 0


def test_what_is_no_stablehlo_is_left_to_xla():
    assert host_kernels.with_kernels(b"not a module") == b"not a module"


def test_an_executable_with_kernels_calls_them():
    """The compiled program has the call, and not a product of XLA's beside it."""
    module = linear_with_bias(2, 64, 48, "float32")
    executable = xla_cpu.compile_module(
        module.data, xla_cpu.options_for_level(2), module_format="stablehlo"
    )
    text = executable.hlo_modules()[0].to_string()
    assert text.count(f'custom_call_target="{host_kernels.LINEAR}"') == 1
    assert " dot(" not in text
