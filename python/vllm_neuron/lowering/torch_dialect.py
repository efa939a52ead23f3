"""A graph message as a module of torch-mlir's torch dialect, and its way to StableHLO.

Runs only in the lowering process. Literal tensors, and operators that `ops` lowers itself, stay out
of torch-mlir: the literals and the operators' results enter the function as further arguments, the
operators' operands leave it as further results, and `stablehlo_module` puts both back in between.
torch-mlir thus sees nothing that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.passmanager import PassManager

from vllm_neuron.lowering.failure import LoweringFailure
from vllm_neuron.lowering.worker import operand_values

__all__ = ["ImportedGraph", "import_graph", "lower_to_stablehlo"]

# Numbers of c10/core/ScalarType.h, which the torch dialect uses for dtypes.
_SCALAR_TYPES = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "complex64": 9,
    "complex128": 10,
    "bool": 11,
    "bfloat16": 15,
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
}
_TORCH_TYPES = {
    "uint8": "ui8",
    "int8": "si8",
    "int16": "si16",
    "int32": "si32",
    "int64": "si64",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "complex<f32>",
    "complex128": "complex<f64>",
    "bool": "i1",
    "bfloat16": "bf16",
    "float8_e5m2": "f8E5M2",
    "float8_e4m3fn": "f8E4M3FN",
}
_NARROW_FLOATS = {"float16", "bfloat16"}
_VTENSOR = re.compile(r"!torch\.vtensor<\[(?P<sizes>[0-9,]*)\],(?P<element>\w+)>")

_PIPELINE = (
    "builtin.module(func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{extra-library=},"
    "torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})"
)


@dataclass
class ImportedGraph:
    """A module of the torch dialect with what was left out of it.

    Attributes:
        module: the module; its only function is `main`.
        own: indices of the nodes that torch-mlir does not see.
    """

    module: ir.Module
    own: list[int] = field(default_factory=list)


def import_graph(
    header: Mapping[str, Any], *, is_own: Callable[[Mapping[str, Any]], bool]
) -> ImportedGraph:
    """Build `main` from a graph message.

    Its arguments are the graph's inputs, its literals and then the results of every own node; its
    results are the graph's outputs and then the tensor operands of every own node.

    Raises:
        LoweringFailure: an operator or dtype is unknown to torch-mlir.
    """
    context = ir.Context()
    torch_dialect.register_dialect(context)
    with context, ir.Location.unknown(context):
        return _Importer(header, is_own).build()


def lower_to_stablehlo(module: ir.Module) -> str:
    """Run torch-mlir's passes; the StableHLO module as text.

    Raises:
        LoweringFailure: a pass fails; it carries torch-mlir's own words.
    """
    messages: list[tuple[str, int | None]] = []

    def keep(diagnostic: ir.Diagnostic) -> bool:
        if diagnostic.severity == ir.DiagnosticSeverity.ERROR:
            messages.append((str(diagnostic.message), _node_of(str(diagnostic.location))))
        return True

    context = module.context
    with context:
        handler = context.attach_diagnostic_handler(keep)
        try:
            PassManager.parse(_PIPELINE).run(module.operation)
        except ir.MLIRError as error:
            for diagnostic in error.error_diagnostics:
                messages.append((diagnostic.message, _node_of(str(diagnostic.location))))
            located = [entry for entry in messages if entry[1] is not None]
            reason, node = (located or messages or [(str(error), None)])[0]
            raise LoweringFailure(f"torch-mlir: {_first_line(reason)}", node) from None
        finally:
            handler.detach()
    return module.operation.get_asm(enable_debug_info=False)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _node_of(location: str) -> int | None:
    """Index in a location `loc("node:7"...)`; fused locations name the node first."""
    _, found, rest = location.partition('"node:')
    digits = rest.partition('"')[0]
    return int(digits) if found and digits.isdigit() else None


class _Importer:
    def __init__(
        self,
        header: Mapping[str, Any],
        is_own: Callable[[Mapping[str, Any]], bool],
    ) -> None:
        self.header = header
        self.is_own = is_own
        self.values: dict[int, ir.Value] = {}

    def build(self) -> ImportedGraph:
        nodes = self.header["nodes"]
        own = [index for index, node in enumerate(nodes) if self.is_own(node)]
        numbered = [[number, *spec] for number, spec in enumerate(self.header["inputs"])]
        numbered += self.header["literals"]
        for index in own:
            numbered += [result for result in nodes[index]["results"] if result is not None]
        module = ir.Module.create()
        types = [self._tensor_type(dtype, shape) for _, dtype, shape in numbered]
        # The result types are known only once the body is there.
        with ir.InsertionPoint(module.body):
            function = ir.Operation.create(
                "func.func",
                regions=1,
                attributes={
                    "sym_name": ir.StringAttr.get("main"),
                    "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [])),
                },
            )
        block = function.regions[0].blocks.append(*types)
        for (number, _, _), value in zip(numbered, block.arguments, strict=True):
            self.values[number] = value
        with ir.InsertionPoint(block):
            returned = []
            for index, node in enumerate(nodes):
                with ir.Location.name(f"node:{index}"):
                    if index in own:
                        returned += [self.values[item] for item in operand_values(node["args"])]
                    else:
                        self._call(index, node)
            results = [self.values[item] for item in self.header["outputs"]] + returned
            ir.Operation.create("func.return", operands=results)
        function.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(types, [value.type for value in results])
        )
        return ImportedGraph(module, own)

    def _tensor_type(self, dtype: str, shape: list[int], node: int | None = None) -> ir.Type:
        if dtype not in _TORCH_TYPES:
            raise LoweringFailure(f"torch-mlir has no tensors of dtype {dtype}", node)
        sizes = ",".join(str(size) for size in shape)
        return ir.Type.parse(f"!torch.vtensor<[{sizes}],{_TORCH_TYPES[dtype]}>")

    def _call(self, index: int, node: Mapping[str, Any]) -> None:
        name, _, overload = node["op"].rpartition(".")
        name = f"torch.{name}" if overload == "default" else f"torch.{name}.{overload}"
        if not ir.Context.current.is_registered_operation(name):
            raise LoweringFailure("torch-mlir does not know this operator", index)
        operands = [self._operand(item, index) for item in node["args"]]
        wide = node["computed_wide"] and not _NARROW_FLOATS.isdisjoint(node["dtypes"])
        if wide:
            operands = [self._widened(operand) for operand in operands]
        results = [
            ir.Type.parse("!torch.none")
            if result is None
            else self._tensor_type(_wide(result[1]) if wide else result[1], result[2], index)
            for result in node["results"]
        ]
        if node["returns_list"]:
            listed = ir.Operation.create(
                name, results=[ir.Type.parse("!torch.list<vtensor>")], operands=operands
            )
            produced = ir.Operation.create(
                "torch.prim.ListUnpack", results=results, operands=[listed.result]
            )
        else:
            produced = ir.Operation.create(name, results=results, operands=operands)
        for result, value in zip(node["results"], produced.results, strict=True):
            if result is not None:
                number, dtype, shape = result
                narrowed = self._cast(value, dtype, shape) if wide else value
                self.values[number] = narrowed

    def _widened(self, operand: ir.Value) -> ir.Value:
        text = str(operand.type)
        found = _VTENSOR.fullmatch(text)
        if found is None or found["element"] not in ("f16", "bf16"):
            return operand
        return self._cast(
            operand, "float32", [int(size) for size in found["sizes"].split(",") if size]
        )

    def _cast(self, value: ir.Value, dtype: str, shape: list[int]) -> ir.Value:
        kind = self._tensor_type(dtype, shape)
        if value.type == kind:
            return value
        return ir.Operation.create(
            "torch.prims.convert_element_type",
            results=[kind],
            operands=[value, self._operand(["dtype", dtype], -1)],
        ).result

    def _operand(self, argument: list[Any], node: int) -> ir.Value:
        kind, *rest = argument
        if kind == "value":
            return self.values[rest[0]]
        if kind == "none":
            return self._constant("torch.constant.none", "!torch.none", {})
        if kind == "bool":
            value = ir.BoolAttr.get(rest[0])
            return self._constant("torch.constant.bool", "!torch.bool", {"value": value})
        if kind == "int":
            value = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), rest[0])
            return self._constant("torch.constant.int", "!torch.int", {"value": value})
        if kind == "dtype":
            if rest[0] not in _SCALAR_TYPES:
                raise LoweringFailure(f"torch-mlir has no tensors of dtype {rest[0]}", node)
            return self._operand(["int", _SCALAR_TYPES[rest[0]]], node)
        if kind == "float":
            value = ir.FloatAttr.get(ir.F64Type.get(), float.fromhex(rest[0]))
            return self._constant("torch.constant.float", "!torch.float", {"value": value})
        if kind == "str":
            value = ir.StringAttr.get(rest[0])
            return self._constant("torch.constant.str", "!torch.str", {"value": value})
        if kind == "complex":
            raise LoweringFailure("torch-mlir takes no complex numbers", node)
        if kind == "scalar_tensor":
            return self._scalar_tensor(rest, node)
        return self._list(rest[0], rest[1], node)

    def _scalar_tensor(self, literal: list[Any], node: int) -> ir.Value:
        scalar = self._operand(literal, node)
        dtype = {"bool": "bool", "int": "int64", "float": "float64"}[literal[0]]
        return ir.Operation.create(
            "torch.prim.NumToTensor.Scalar",
            results=[self._tensor_type(dtype, [])],
            operands=[scalar],
        ).result

    def _list(self, element: str, items: list[Any], node: int) -> ir.Value:
        operands = [self._operand(item, node) for item in items]
        kinds = {
            "int": "int",
            "SymInt": "int",
            "float": "float",
            "bool": "bool",
            "Tensor": "vtensor",
            "Optional[Tensor]": "optional<vtensor>",
        }
        if element not in kinds:
            raise LoweringFailure(f"an argument is a list of {element}", node)
        return ir.Operation.create(
            "torch.prim.ListConstruct",
            results=[ir.Type.parse(f"!torch.list<{kinds[element]}>")],
            operands=operands,
        ).result

    def _constant(self, name: str, kind: str, attributes: dict[str, ir.Attribute]) -> ir.Value:
        return ir.Operation.create(
            name, results=[ir.Type.parse(kind)], attributes=attributes
        ).result


def _wide(dtype: str) -> str:
    return "float32" if dtype in _NARROW_FLOATS else dtype
