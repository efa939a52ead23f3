"""Small StableHLO modules, as the lowering hands them to a compiler, and NEFFs made of them."""

import json
import re
from collections.abc import Sequence

from jaxlib import _jax

from vllm_neuron._core import Neff, write_neff
from vllm_neuron.compiler.base import compiler_arguments
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.trace_record import TensorSpec

# StableHLO keeps reading its artifacts for five years; 1.0.0 is its oldest version.
STABLEHLO_VERSION = "1.0.0"

STABLEHLO_TYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "ui64",
    "uint32": "ui32",
    "uint16": "ui16",
    "uint8": "ui8",
    "bool": "i1",
    "complex64": "complex<f32>",
}
_NAMES = {hlo: name for name, hlo in STABLEHLO_TYPES.items()}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(complex<f32>|\w+)>(?: \{tf\.aliasing_output = (\d+))?")


def lowered(signature: str, body: str) -> LoweredModule:
    """Make a module of the text `(inputs) -> (outputs)` and the operations of its function."""
    inputs, outputs = signature.split("->")
    text = f"module @m {{ func.func @main{signature} {{\n{body}\n}} }}"
    aliases = {}
    for index, (_, _, output) in enumerate(_TENSOR.findall(inputs)):
        if output:
            aliases[int(output)] = index
    return LoweredModule(
        route="native",
        data=_jax.mlir.serialize_portable_artifact(text, STABLEHLO_VERSION),
        inputs=_specs(inputs),
        outputs=_specs(outputs),
        aliases=aliases,
    )


def _specs(text: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(shape=tuple(int(n) for n in sizes.split("x") if n), dtype=_NAMES[hlo])
        for sizes, hlo, _ in _TENSOR.findall(text)
    )


def tensor_type(dtype: str, shape: Sequence[int]) -> str:
    """The StableHLO spelling of a tensor type."""
    return f"tensor<{'x'.join([*map(str, shape), STABLEHLO_TYPES[dtype]])}>"


def reverse(dtype: str, shape: Sequence[int]) -> LoweredModule:
    """The input with every dimension reversed; an operation that every dtype has."""
    kind = tensor_type(dtype, shape)
    dimensions = ", ".join(map(str, range(len(shape))))
    return lowered(
        f"(%a: {kind}) -> ({kind})",
        f"%0 = stablehlo.reverse %a, dims = [{dimensions}] : {kind}\nreturn %0 : {kind}",
    )


def add_in_place(shape: Sequence[int]) -> LoweredModule:
    """state += x, in place, and the sum of two x as a second output."""
    kind = tensor_type("float32", shape)
    return lowered(
        f"(%state: {kind} {{tf.aliasing_output = 0 : i32}}, %x: {kind}) -> ({kind}, {kind})",
        f"%0 = stablehlo.add %state, %x : {kind}\n%1 = stablehlo.add %x, %x : {kind}\n"
        f"return %0, %1 : {kind}, {kind}",
    )


def write_rows(rows: int, width: int, count: int, *, in_place: bool = True) -> LoweredModule:
    """A KV cache of `rows` rows: `count` rows are written, as a rule in place, and read back."""
    alias = "{tf.aliasing_output = 0 : i32}" if in_place else ""
    cache = f"tensor<{rows}x{width}xf32>"
    new = f"tensor<{count}x{width}xf32>"
    slots = f"tensor<{count}x1xi64>"
    return lowered(
        f"(%cache: {cache} {alias}, %new: {new}, %slots: {slots}) -> ({cache}, {new})",
        f"""
    %0 = "stablehlo.scatter"(%cache, %slots, %new) <{{
        indices_are_sorted = false, unique_indices = false,
        scatter_dimension_numbers = #stablehlo.scatter<
          update_window_dims = [1], inserted_window_dims = [0],
          scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}}> ({{
      ^bb0(%old: tensor<f32>, %value: tensor<f32>):
        stablehlo.return %value : tensor<f32>
    }}) : ({cache}, {slots}, {new}) -> {cache}
    %1 = "stablehlo.gather"(%0, %slots) <{{
        dimension_numbers = #stablehlo.gather<
          offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0],
          index_vector_dim = 1>,
        slice_sizes = array<i64: 1, {width}>, indices_are_sorted = false}}>
      : ({cache}, {slots}) -> {new}
    return %0, %1 : {cache}, {new}""",
    )


def linear(rows: int, inner: int, columns: int) -> LoweredModule:
    """x times the transpose of a weight, as torch.nn.Linear."""
    x, weight = f"tensor<{rows}x{inner}xf32>", f"tensor<{columns}x{inner}xf32>"
    out = f"tensor<{rows}x{columns}xf32>"
    return lowered(
        f"(%x: {x}, %weight: {weight}) -> ({out})",
        f"%0 = stablehlo.dot_general %x, %weight, contracting_dims = [1] x [1] : "
        f"({x}, {weight}) -> {out}\nreturn %0 : {out}",
    )


def compiled(module: LoweredModule, *, level: int = 2, bucket: str = "decode_s1") -> bytes:
    """The NEFF of a module, with inputs `in0`... and outputs `out0`..."""
    return HostCompiler().compile(
        module,
        bucket=bucket,
        arguments=compiler_arguments(level, extra=None, target="host").arguments,
        input_names=[f"in{index}" for index in range(len(module.inputs))],
        output_names=[f"out{index}" for index in range(len(module.outputs))],
    )


def with_members(neff: bytes, *, target: str = "host", **members: bytes | None) -> bytes:
    """The same NEFF with host members replaced or, by None, left out."""
    parsed = Neff.parse(neff)
    kept = {name: parsed.member(name) for name, _ in parsed.members if name.startswith("host/")}
    for name, data in members.items():
        path = next(path for path in kept if path.startswith(f"host/{name}."))
        if data is None:
            del kept[path]
        else:
            kept[path] = data
    return write_neff(
        name=parsed.name,
        target=target,
        compiler_version=parsed.compiler_version,
        inputs=[(t.name, t.dtype, t.shape) for t in parsed.inputs],
        outputs=[(t.name, t.dtype, t.shape) for t in parsed.outputs],
        members=list(kept.items()),
        compression="none",
    )


def manifest_with(neff: bytes, **changes: object) -> bytes:
    """The same NEFF with some fields of its manifest changed."""
    fields = json.loads(Neff.parse(neff).member("host/manifest.json"))
    return with_members(neff, manifest=json.dumps({**fields, **changes}).encode())
