"""Constants of a module: one number everywhere, or literal elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from vllm_neuron.lowering.ops.dtypes import ELEMENT_TYPES, bits, is_complex, is_float, is_unsigned

__all__ = ["literal", "splat"]


def literal(data: bytes, dtype: str, shape: Sequence[int]) -> ir.Value:
    """A constant of the given little-endian elements in row-major order.

    Args:
        data: the elements; booleans are bytes.
        dtype: of the tensor.
        shape: of the tensor.
    """
    if is_complex(dtype):
        # jaxlib's bindings cannot hold a complex literal.
        part, size = ("float32", 4) if dtype == "complex64" else ("float64", 8)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        parts = [literal(b"".join(pieces[first::2]), part, shape) for first in (0, 1)]
        return stablehlo.complex(*parts)
    # As bytes, and then compared, since versions of MLIR differ in how they pack booleans.
    stored = "uint8" if dtype == "bool" else dtype
    kind = ir.RankedTensorType.get(list(shape), ir.Type.parse(ELEMENT_TYPES[stored]))
    text = f'"0x{data.hex().upper()}"' if data else ""
    value = stablehlo.constant(ir.Attribute.parse(f"dense<{text}> : {kind}"))
    if dtype != "bool":
        return value
    zero = stablehlo.constant(
        ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(kind.element_type, 0))
    )
    direction = stablehlo.ComparisonDirectionAttr.get("NE")
    return stablehlo.compare(value, zero, direction)


def splat(value: Any, dtype: str, kind: ir.RankedTensorType) -> ir.Attribute:
    """One number everywhere, rounded to `dtype` once; not for complex dtypes."""
    element = kind.element_type
    if is_float(dtype):
        attribute = ir.FloatAttr.get(element, float(value))
    elif dtype == "bool":
        attribute = ir.IntegerAttr.get(element, int(bool(value)))
    else:
        width = bits(dtype)
        number = int(value) & ((1 << width) - 1)
        if not is_unsigned(dtype) and number >> (width - 1):
            number -= 1 << width
        attribute = ir.IntegerAttr.get(element, number)
    return ir.DenseElementsAttr.get_splat(kind, attribute)
