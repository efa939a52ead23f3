"""Complex tensors, by StableHLO's complex type.

The host emulator's compiler takes that type; neuronx-cc does not, and says so. Arithmetic on
complex operands is in `arithmetic`, since it is the same operators.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, stablehlo

from vllm_neuron.lowering.ops.builder import Builder, Tensor
from vllm_neuron.lowering.ops.registry import lowers, lowers_complex


def _join(b: Builder, real: Tensor, imaginary: Tensor) -> Tensor:
    value = stablehlo.complex(real.value, imaginary.value)
    return Tensor(value, b.dtype, real.shape)


def _part_dtype(dtype: str) -> str:
    return "float32" if dtype == "complex64" else "float64"


def _part(b: Builder, tensor: Tensor, name: str) -> Tensor:
    return b.unary(name, tensor, _part_dtype(tensor.dtype))


@lowers("complex.default")
def make_complex(b: Builder) -> Tensor:
    """Real + i * imaginary."""
    dtype = _part_dtype(b.dtype)
    return _join(b, *(b.expand(b.tensor(index, dtype), b.shape) for index in (0, 1)))


@lowers("polar.default")
def polar(b: Builder) -> Tensor:
    """Absolute * e^(i * angle)."""
    dtype = _part_dtype(b.dtype)
    size, angle = (b.expand(b.tensor(index, dtype), b.shape) for index in (0, 1))
    real = b.multiply(size, b.unary("cosine", angle))
    return _join(b, real, b.multiply(size, b.unary("sine", angle)))


@lowers("view_as_complex.default")
def view_as_complex(b: Builder) -> Tensor:
    """Pairs of the last dimension."""
    tensor = b.tensor(0)
    last = tensor.rank - 1
    parts = [b.reshape(b.slice(tensor, last, i, i + 1), b.shape) for i in (0, 1)]
    return _join(b, *parts)


@lowers("view_as_real.default")
def view_as_real(b: Builder) -> Tensor:
    """Real and imaginary part in a new last dimension."""
    tensor = b.tensor(0)
    parts = [b.reshape(_part(b, tensor, name), (*tensor.shape, 1)) for name in ("real", "imag")]
    return b.concatenate(parts, tensor.rank)


@lowers("real.default")
def real(b: Builder) -> Tensor:
    """Real part."""
    tensor = b.tensor(0)
    return _part(b, tensor, "real") if tensor.dtype.startswith("complex") else tensor


@lowers("imag.default")
def imaginary(b: Builder) -> Tensor:
    """Imaginary part."""
    return _part(b, b.tensor(0), "imag")


@lowers("_conj.default", "_conj_physical.default", "conj_physical.default")
def conjugate(b: Builder) -> Tensor:
    """Complex conjugate."""
    tensor = b.tensor(0)
    return _join(b, _part(b, tensor, "real"), b.negate(_part(b, tensor, "imag")))


@lowers("angle.default")
def angle(b: Builder) -> Tensor:
    """Argument of a complex number."""
    tensor = b.tensor(0)
    if not tensor.dtype.startswith("complex"):
        pi = b.constant(3.141592653589793, b.dtype, b.shape)
        zero = b.constant(0, b.dtype, b.shape)
        wide = b.convert(tensor, b.dtype)
        turned = b.select(b.compare("LT", wide, zero), pi, zero)
        return b.select(b.is_nan(wide), wide, turned)
    return b.binary("atan2", _part(b, tensor, "imag"), _part(b, tensor, "real"))


@lowers_complex(
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "unsqueeze.default",
    "squeeze.dim",
    "squeeze.default",
)
def view(b: Builder) -> Tensor:
    """The same elements in another shape."""
    return b.reshape(b.tensor(0), b.shape)


@lowers_complex("expand.default")
def expand(b: Builder) -> Tensor:
    """Repeated along dimensions of size 1."""
    return b.expand(b.tensor(0), b.shape)


@lowers_complex("permute.default")
def permute(b: Builder) -> Tensor:
    """Reordered dimensions."""
    tensor = b.tensor(0)
    return b.transpose(tensor, [dimension % tensor.rank for dimension in b.arg(1)])


_FUNCTIONS = {
    "acos": chlo.acos,
    "asin": chlo.asin,
    "atan": chlo.atan,
    "cos": stablehlo.cosine,
    "cosh": chlo.cosh,
    "exp": stablehlo.exponential,
    "expm1": stablehlo.exponential_minus_one,
    "log": stablehlo.log,
    "log1p": stablehlo.log_plus_one,
    "rsqrt": stablehlo.rsqrt,
    "sigmoid": stablehlo.logistic,
    "sin": stablehlo.sine,
    "sinh": chlo.sinh,
    "sqrt": stablehlo.sqrt,
    "tan": stablehlo.tan,
    "tanh": stablehlo.tanh,
}


def _function(b: Builder, function: Callable[..., ir.Value]) -> Tensor:
    return Tensor(function(b.tensor(0).value), b.dtype, b.shape)


for _name, _operation in _FUNCTIONS.items():
    lowers_complex(f"{_name}.default")(lambda b, operation=_operation: _function(b, operation))


@lowers_complex("reciprocal.default")
def reciprocal(b: Builder) -> Tensor:
    """One by the tensor."""
    return b.binary("divide", b.constant(1, b.dtype, b.shape), b.tensor(0))


@lowers_complex("pow.Tensor_Tensor", "pow.Scalar")
def power(b: Builder) -> Tensor:
    """The first operand to the power of the second."""
    base, exponent = (b.expand(b.tensor(index, b.dtype), b.shape) for index in (0, 1))
    return b.binary("power", base, exponent)


@lowers_complex("neg.default")
def neg(b: Builder) -> Tensor:
    """Additive inverse."""
    return b.negate(b.tensor(0))


@lowers_complex("mm.default", "bmm.default")
def matmul(b: Builder) -> Tensor:
    """Matrix product."""
    left, right = b.tensor(0), b.tensor(1)
    batch = list(range(left.rank - 2))
    numbers = stablehlo.DotDimensionNumbers.get(batch, batch, [left.rank - 1], [left.rank - 2])
    value = stablehlo.dot_general(b.type(b.dtype, b.shape), left.value, right.value, numbers)
    return Tensor(value, b.dtype, b.shape)
