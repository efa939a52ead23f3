"""Powers with a fixed exponent, and what eager puts in their place.

Eager's contract (aten/src/ATen/native/cpu/PowKernel.cpp): a float to the power of 0.5, -0.5, -1, 2,
3 and -2 is a square root, its reciprocal, a reciprocal and products, which differ from `pow` at
signed zero and negative infinity. The power of 0 is 1, also of NaN. An integer to a negative power,
which eager refuses for a number, is the truncated quotient.
"""

from __future__ import annotations

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.dtypes import compute_dtype, is_complex, is_float
from vllm_neuron.lowering.ops.registry import lowers


@lowers("pow.Tensor_Scalar")
def power(b: Builder) -> Tensor:
    """Self to the power of a number."""
    exponent = b.arg(1)
    tensor = b.tensor(0, compute_dtype(b.dtype))
    return b.convert(_power(b, tensor, exponent), b.dtype)


def _power(b: Builder, tensor: Tensor, exponent: float | int | complex) -> Tensor:
    one = b.constant(1, tensor.dtype, tensor.shape)
    if exponent == 0:
        return one
    if exponent == 1:
        return tensor
    if exponent in (2, 3) and not is_complex(tensor.dtype):
        square = b.multiply(tensor, tensor)
        return square if exponent == 2 else b.multiply(square, tensor)
    if is_float(tensor.dtype):
        if exponent == 0.5:
            return b.unary("sqrt", tensor)
        if exponent == -0.5:
            return b.binary("divide", one, b.unary("sqrt", tensor))
        if exponent == -1:
            return b.binary("divide", one, tensor)
        if exponent == -2:
            return b.binary("divide", one, b.multiply(tensor, tensor))
    return b.binary("power", tensor, b.constant(exponent, tensor.dtype, tensor.shape))
