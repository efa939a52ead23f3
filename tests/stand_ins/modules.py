"""Module files as a compiler gets them: StableHLO text or an HLO protobuf, back to a module."""

import re
from pathlib import Path

from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from vllm_neuron.lowering.mlir_context import stablehlo_context
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.trace_record import TensorSpec

DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "f8E4M3FN": "float8_e4m3fn", "f8E5M2": "float8_e5m2", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "ui64": "uint64", "ui32": "uint32", "ui16": "uint16",
    "ui8": "uint8", "i1": "bool", "complex<f32>": "complex64",
}  # fmt: skip
HLO_ALIAS = re.compile(r"\{(?P<output>\d*)\}: \((?P<input>\d+), \{\}, must-alias\)")
PORTABLE_VERSION = "1.8.0"


def read_module(path: Path) -> LoweredModule:
    """Read a module by the suffix of its file, `.mlir` or `.hlo`."""
    data = path.read_bytes()
    if path.suffix == ".mlir":
        text, aliases = data.decode(), None
    elif path.suffix == ".hlo":
        computation = xla_client.XlaComputation(data)
        text = _jax.mlir.xla_computation_to_mlir_module(computation)
        header = computation.as_hlo_text().partition("\n")[0]
        aliases = {int(m["output"] or 0): int(m["input"]) for m in HLO_ALIAS.finditer(header)}
    else:
        raise SystemExit(f"{path}: neither .mlir nor .hlo")
    context = stablehlo_context()
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        main = next(op for op in module.body.operations if op.name.value == "main")
        inputs, outputs = specs(main.type.inputs), specs(main.type.results)
        if aliases is None:
            attributes = main.arg_attrs if "arg_attrs" in main.attributes else []
            marked = [(i, ir.DictAttr(a)) for i, a in enumerate(attributes)]
            aliases = {
                ir.IntegerAttr(a["tf.aliasing_output"]).value: i
                for i, a in marked
                if "tf.aliasing_output" in a
            }
        elif aliases:
            int32 = ir.IntegerType.get_signless(32)
            attributes = [{} for _ in inputs]
            for output, source in aliases.items():
                attributes[source] = {"tf.aliasing_output": ir.IntegerAttr.get(int32, output)}
            main.attributes["arg_attrs"] = ir.ArrayAttr.get(
                [ir.DictAttr.get(a) for a in attributes]
            )
        for name in [a for a in module.operation.attributes if a.startswith("mhlo.")]:
            del module.operation.attributes[name]
        artifact = stablehlo.serialize_portable_artifact(
            ir.Module.parse(module.operation.get_asm(enable_debug_info=False)), PORTABLE_VERSION
        )
    return LoweredModule("native", artifact, inputs, outputs, aliases)


def specs(types) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(shape=tuple(t.shape), dtype=DTYPES[str(t.element_type)])
        for t in map(ir.RankedTensorType, types)
    )
