"""Products with weights and attention in programs of the host emulator, computed by our kernels.

XLA's product of a few rows with a large weight rearranges the weight at each call, and attention
gathers as much of the KV cache as a bucket has room for; see docs/host-emulator.md. `with_kernels`
puts custom calls in their place, which `register` makes known to XLA before a program with them is
compiled or loaded. The handlers are in rust/host/src/calls.rs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_neuron import _core
from vllm_neuron.compiler.host_attention import PagedAttention, paged_attention

__all__ = ["LINEAR", "PAGED_ATTENTION", "VERSION", "register", "with_kernels"]

VERSION = _core.HOST_KERNELS_VERSION
"""Version of the custom calls: operands, results, order of sums. Programs rely on one."""

LINEAR = "vllm_neuron.linear"
"""x times the transpose of a weight."""

PAGED_ATTENTION = "vllm_neuron.paged_attention"
"""Attention over a paged KV cache."""

# Element types of x, weight and result that the handler takes.
_TYPES = {("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("bf16", "bf16", "f32")}

# `API_VERSION_TYPED_FFI` of StableHLO's custom_call, and what jaxlib calls the same.
_TYPED_FFI = 4
_JAXLIB_TYPED_FFI = 1


def register(xla_client: Any) -> None:
    """Make the custom calls known to XLA in this process.

    Args:
        xla_client: the module `jaxlib.xla_client`.
    """
    for name, handler in _core.host_kernels().items():
        xla_client.register_custom_call_target(
            name, handler, platform="cpu", api_version=_JAXLIB_TYPED_FFI
        )


def with_kernels(module: bytes) -> bytes:
    """Replace what the kernels compute in a module by custom calls.

    Args:
        module: a StableHLO portable artifact.

    Returns:
        MLIR bytecode for `compile_and_load`; `module` itself if there is nothing to replace, or if
        it is no StableHLO, which XLA then refuses.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    from vllm_neuron.lowering.mlir_context import stablehlo_context

    context = stablehlo_context()
    with context, ir.Location.unknown(context):
        try:
            parsed = stablehlo.deserialize_portable_artifact(context, module)
        except ValueError:
            return module
        replaced = False
        products = [
            operation
            for operation in _operations(parsed)
            if operation.name == "stablehlo.dot_general"
        ]
        for product in products:
            # Operands are read here: one may be the result of a product that was just replaced.
            if (operands := _linear_operands(product)) is not None:
                _replace(product, LINEAR, operands)
            elif (attention := paged_attention(product)) is not None:
                _replace_attention(product, attention)
            else:
                continue
            replaced = True
        if not replaced:
            return module
        bytecode = io.BytesIO()
        parsed.operation.write_bytecode(bytecode)
        return bytecode.getvalue()


def _operations(module: Any) -> Iterator[Any]:
    """Yield the operations of a module's functions, without those in regions of operations."""
    for function in module.body.operations:
        for block in function.operation.regions[0].blocks:
            for operation in block.operations:
                yield operation.operation


def _linear_operands(product: Any) -> tuple[Any, Any] | None:
    """Return x and weight if a product is x times the transpose of a weight that is an input."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    x, weight = product.operands
    attributes = product.attributes
    if "algorithm" in attributes:
        return None
    numbers = stablehlo.DotDimensionNumbers(attributes["dot_dimension_numbers"])
    if numbers.lhs_batching_dimensions or list(numbers.lhs_contracting_dimensions) != [1]:
        return None
    contracted = list(numbers.rhs_contracting_dimensions)
    while not isinstance(weight.owner, ir.Block) and weight.owner.name == "stablehlo.transpose":
        if list(ir.DenseI64ArrayAttr(weight.owner.attributes["permutation"])) != [1, 0]:
            return None
        contracted = [1 - dimension for dimension in contracted]
        weight = weight.owner.operands[0]
    types = [ir.RankedTensorType(value.type) for value in (x, weight, product.results[0])]
    if (
        contracted != [1]
        or not isinstance(weight.owner, ir.Block)
        or any(kind.rank != 2 or not kind.has_static_shape for kind in types)
        or tuple(str(kind.element_type) for kind in types) not in _TYPES
    ):
        return None
    return x, weight


def _replace_attention(product: Any, attention: PagedAttention) -> None:
    """Put a call in the place of the last product of an attention; XLA drops the rest."""
    from jaxlib.mlir import ir

    with ir.InsertionPoint(product):
        kind = ir.RankedTensorType.get([1], ir.F32Type.get())
        cap = ir.FloatAttr.get(ir.F32Type.get(), attention.soft_cap or 0.0)
        soft_cap = ir.Operation.create(
            "stablehlo.constant",
            results=[kind],
            attributes={"value": ir.DenseElementsAttr.get_splat(kind, cap)},
        ).results[0]
    operands = [
        attention.queries,
        attention.keys,
        attention.values,
        attention.blocks,
        attention.visible,
        attention.live,
        soft_cap,
    ]
    if attention.sinks is not None:
        operands.append(attention.sinks)
    _replace(product, PAGED_ATTENTION, operands)


def _replace(product: Any, target: str, operands: Sequence[Any]) -> None:
    """Put a call in the place of a product."""
    from jaxlib.mlir import ir

    result = product.results[0]
    with ir.InsertionPoint(product):
        call = ir.Operation.create(
            "stablehlo.custom_call",
            results=[result.type],
            operands=list(operands),
            attributes={
                "call_target_name": ir.StringAttr.get(target),
                "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _TYPED_FFI),
                "backend_config": ir.DictAttr.get({}),
                "operand_layouts": ir.ArrayAttr.get([_row_major(value) for value in operands]),
                "result_layouts": ir.ArrayAttr.get([_row_major(result)]),
            },
        )
    result.replace_all_uses_with(call.results[0])
    product.erase()


def _row_major(value: Any) -> Any:
    from jaxlib.mlir import ir

    index = ir.IndexType.get()
    rank = ir.RankedTensorType(value.type).rank
    return ir.DenseElementsAttr.get(
        [ir.IntegerAttr.get(index, at) for at in reversed(range(rank))],
        ir.RankedTensorType.get([rank], index),
    )
