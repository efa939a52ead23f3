"""Products with weights in programs of the host emulator, computed by kernels of our own.

XLA's product of a few rows with a large weight rearranges the weight at each call; see
docs/host-emulator.md. `with_kernels` puts custom calls in their place, which `register` makes known
to XLA before a program with them is compiled or loaded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from vllm_neuron import _core

__all__ = ["LINEAR", "VERSION", "register", "with_kernels"]

VERSION = _core.HOST_KERNELS_VERSION
"""Version of the custom calls: operands, results, order of sums. Programs rely on one."""

LINEAR = "vllm_neuron.linear"
"""x times the transpose of a weight; the handler is rust/host/src/xla_ffi.rs."""

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
    """Replace the products of a module that the kernels compute by custom calls.

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
        products = [
            (operation, weight)
            for operation in _operations(parsed)
            if operation.name == "stablehlo.dot_general"
            and (weight := _linear_weight(operation)) is not None
        ]
        if not products:
            return module
        for operation, weight in products:
            _replace(operation, weight)
        bytecode = io.BytesIO()
        parsed.operation.write_bytecode(bytecode)
        return bytecode.getvalue()


def _operations(module: Any) -> Iterator[Any]:
    """Yield the operations of a module's functions, without those in regions of operations."""
    for function in module.body.operations:
        for block in function.operation.regions[0].blocks:
            for operation in block.operations:
                yield operation.operation


def _linear_weight(product: Any) -> Any | None:
    """Return the weight if a product is x times the transpose of a weight that is an input."""
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
    return weight


def _replace(product: Any, weight: Any) -> None:
    from jaxlib.mlir import ir

    index = ir.IndexType.get()
    row_major = ir.DenseElementsAttr.get(
        [ir.IntegerAttr.get(index, 1), ir.IntegerAttr.get(index, 0)],
        ir.RankedTensorType.get([2], index),
    )
    with ir.InsertionPoint(product):
        call = ir.Operation.create(
            "stablehlo.custom_call",
            results=[product.results[0].type],
            # Read here: x may be the result of a product that was replaced just before.
            operands=[product.operands[0], weight],
            attributes={
                "call_target_name": ir.StringAttr.get(LINEAR),
                "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _TYPED_FFI),
                "backend_config": ir.DictAttr.get({}),
                "operand_layouts": ir.ArrayAttr.get([row_major, row_major]),
                "result_layouts": ir.ArrayAttr.get([row_major]),
            },
        )
    product.results[0].replace_all_uses_with(call.results[0])
    product.erase()
