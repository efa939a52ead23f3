"""Facts about dtypes, by torch's names."""

from __future__ import annotations

import math

__all__ = [
    "E4M3_MAX",
    "ELEMENT_TYPES",
    "bits",
    "compute_dtype",
    "element_bytes",
    "highest",
    "is_complex",
    "is_float",
    "is_unsigned",
    "lowest",
]

ELEMENT_TYPES = {
    "bool": "i1",
    "uint8": "ui8",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
}
_BITS = {"bool": 1, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
# The largest finite value of float8_e4m3fn, which has no infinity (S.1111.110 in OCP's OFP8).
E4M3_MAX = 448.0


def is_float(dtype: str) -> bool:
    """Whether `dtype` is a real floating-point type."""
    return "float" in dtype


def is_complex(dtype: str) -> bool:
    """Whether `dtype` is a complex type."""
    return dtype.startswith("complex")


def is_unsigned(dtype: str) -> bool:
    """Whether values of `dtype` have no sign."""
    return dtype.startswith("uint") or dtype == "bool"


def compute_dtype(dtype: str) -> str:
    """The dtype in which eager's CPU kernels compute on `dtype`: float32 for narrower floats."""
    return "float32" if is_float(dtype) and dtype not in ("float32", "float64") else dtype


def bits(dtype: str) -> int:
    """Width of one element."""
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return _BITS[dtype] if dtype in _BITS else int(digits)


def element_bytes(dtype: str) -> int:
    """Bytes of one element in memory."""
    return 1 if dtype == "bool" else bits(dtype) // 8


def lowest(dtype: str) -> float | int:
    """The least value of `dtype`; -infinity where there is one."""
    if is_float(dtype):
        return -E4M3_MAX if dtype == "float8_e4m3fn" else -math.inf
    return 0 if is_unsigned(dtype) else -(1 << (bits(dtype) - 1))


def highest(dtype: str) -> float | int:
    """The greatest value of `dtype`; infinity where there is one."""
    if is_float(dtype):
        return E4M3_MAX if dtype == "float8_e4m3fn" else math.inf
    if dtype == "bool":
        return 1
    return (1 << (bits(dtype) - (0 if is_unsigned(dtype) else 1))) - 1
