"""Discrete Fourier transforms.

Eager's contract: a transform of several dimensions is that of each in turn. The normalisation is a
number: 0 leaves the sum as it is, 1 divides by the root of the number of elements, 2 by the number
(`fft_norm_mode` in aten/src/ATen/native/SpectralOpsUtils.h). A real transform gives the half of its
last dimension that is not redundant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxlib.mlir.dialects import stablehlo

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.registry import lowers


def _transform(b: Builder, kind: str, tensor: Tensor, dimension: int, length: int) -> Tensor:
    """One dimension by StableHLO's `kind`; inverse kinds divide by the length."""
    last = tensor.rank - 1
    order = [axis for axis in range(tensor.rank) if axis != dimension] + [dimension]
    moved = b.transpose(tensor, order)
    value = stablehlo.fft(moved.value, stablehlo.FftTypeAttr.get(kind), [length])
    size = length // 2 + 1 if kind == "RFFT" else length
    single = "64" in tensor.dtype if kind != "RFFT" else tensor.dtype == "float32"
    if kind == "IRFFT":
        dtype = "float32" if single else "float64"
    else:
        dtype = "complex64" if single else "complex128"
    done = Tensor(value, dtype, (*moved.shape[:last], size))
    return b.transpose(done, [order.index(axis) for axis in range(tensor.rank)])


def _scaled(b: Builder, tensor: Tensor, factor: float) -> Tensor:
    if factor == 1:
        return tensor
    return b.multiply(tensor, b.constant(factor, tensor.dtype, tensor.shape))


def _factor(mode: int, count: int, *, inverse: bool) -> float:
    """What to multiply StableHLO's result with, whose inverse is divided by the count."""
    plain = {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[mode]
    return plain * count if inverse else plain


def _dimensions(b: Builder, tensor: Tensor) -> list[int]:
    return [dimension % tensor.rank for dimension in b.arg(1)]


def _each(b: Builder, tensor: Tensor, dimensions: Sequence[int], *, forward: bool) -> Tensor:
    kind = "FFT" if forward else "IFFT"
    for dimension in dimensions:
        tensor = _transform(b, kind, tensor, dimension, tensor.shape[dimension])
    return tensor


@lowers("_fft_c2c.default")
def complex_to_complex(b: Builder) -> Tensor:
    """Transform of complex numbers."""
    tensor, forward = b.tensor(0), bool(b.arg(3))
    if tensor.size == 0:
        return tensor
    dimensions = _dimensions(b, tensor)
    count = math.prod(tensor.shape[dimension] for dimension in dimensions)
    factor = _factor(b.arg(2), count, inverse=not forward)
    return _scaled(b, _each(b, tensor, dimensions, forward=forward), factor)


@lowers("_fft_r2c.default")
def real_to_complex(b: Builder) -> Tensor:
    """Transform of real numbers."""
    tensor, one_sided = b.tensor(0), bool(b.arg(3))
    if tensor.size == 0:
        return b.constant(0, b.dtype, b.shape)
    dimensions = _dimensions(b, tensor)
    factor = _factor(
        b.arg(2), math.prod(tensor.shape[dimension] for dimension in dimensions), inverse=False
    )
    if one_sided:
        last = dimensions[-1]
        tensor = _transform(b, "RFFT", tensor, last, tensor.shape[last])
        dimensions = dimensions[:-1]
    else:
        tensor = b.convert(tensor, b.dtype)
    return _scaled(b, _each(b, tensor, dimensions, forward=True), factor)


@lowers("_fft_c2r.default")
def complex_to_real(b: Builder) -> Tensor:
    """Inverse transform of the half of a spectrum of real numbers."""
    tensor, length = b.tensor(0), b.arg(3)
    if 0 in b.shape:
        return b.constant(0, b.dtype, b.shape)
    dimensions = _dimensions(b, tensor)
    tensor = _each(b, tensor, dimensions[:-1], forward=False)
    tensor = _transform(b, "IRFFT", tensor, dimensions[-1], length)
    count = math.prod(b.shape[dimension] for dimension in dimensions)
    return _scaled(b, tensor, _factor(b.arg(2), count, inverse=True))
