"""From torch-mlir's StableHLO text to the portable artifact that compilers take.

Runs only in the lowering process, on jaxlib's MLIR. Puts the operators of `ops` back where
`torch_dialect` left them out, replaces what is not StableHLO, marks aliased arguments, drops all
locations and serialises at a fixed version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from vllm_neuron.lowering.failure import LoweringFailure
from vllm_neuron.lowering.mlir_context import stablehlo_context
from vllm_neuron.lowering.ops import Builder, Refusal, Tensor, literal, own_lowering
from vllm_neuron.lowering.ops.dtypes import element_bytes
from vllm_neuron.lowering.worker import operand_values

__all__ = ["finish_module"]

stablehlo.register_stablehlo_passes()

# The StableHLO version that artifacts are written for. Readers take artifacts of older versions
# (StableHLO's compatibility promise is 5 years back), so it only rises when a newer op is needed.
PORTABLE_VERSION = "1.8.0"

_CHLO_TO_STABLEHLO = "builtin.module(func.func(chlo-legalize-to-stablehlo))"


def finish_module(
    text: str, header: Mapping[str, Any], literals: bytes, own: Sequence[int]
) -> bytes:
    """Complete a lowered `main` and serialise it.

    Args:
        text: the module as torch-mlir prints it.
        header: the graph message that it was made from.
        literals: bytes of the graph's literal tensors.
        own: the nodes that were left out, in order.

    Raises:
        LoweringFailure: an own lowering refuses its operands, or something that is not StableHLO
            is left.
    """
    context = stablehlo_context()
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        function = next(op for op in module.body.operations if op.name.value == "main")
        block = function.regions[0].blocks[0]
        _replace_arith_constants(block)
        _insert_literals(block, header, literals)
        _insert_own(function, block, header, own)
        if any(op.name.startswith("chlo.") for op in _walk(block)):
            PassManager.parse(_CHLO_TO_STABLEHLO).run(module.operation)
        _mark_aliases(function, header)
        _check_dialects(block)
        module.operation.verify()
        stripped = ir.Module.parse(module.operation.get_asm(enable_debug_info=False))
        return stablehlo.serialize_portable_artifact(stripped, PORTABLE_VERSION)


def _walk(block: ir.Block) -> Iterator[ir.Operation]:
    for op in list(block.operations):
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from _walk(inner)


def _replace_arith_constants(block: ir.Block) -> None:
    for op in [op for op in _walk(block) if op.name == "arith.constant"]:
        with ir.InsertionPoint(op):
            constant = stablehlo.constant(op.attributes["value"])
        op.result.replace_all_uses_with(constant)
        op.erase()


def _insert_literals(block: ir.Block, header: Mapping[str, Any], data: bytes) -> None:
    """Put constants where the block's arguments after the graph's inputs are used."""
    position = 0
    with ir.InsertionPoint.at_block_begin(block):
        for index, (_, dtype, shape) in enumerate(header["literals"]):
            size = math.prod(shape) * element_bytes(dtype)
            constant = literal(data[position : position + size], dtype, shape)
            block.arguments[len(header["inputs"]) + index].replace_all_uses_with(constant)
            position += size


def _insert_own(
    function: ir.Operation, block: ir.Block, header: Mapping[str, Any], own: Sequence[int]
) -> None:
    """Emit the left-out nodes, feed them, and put the block in order again.

    The block's arguments beyond the graph's inputs and literals stand for the results of the
    left-out nodes, and what it returns beyond the graph's outputs are their operands.
    """
    inputs, outputs = len(header["inputs"]), len(header["outputs"])
    terminator = block.operations[len(block.operations) - 1].operation
    specs = {number: spec for number, *spec in _all_values(header)}
    operand, stand_in = outputs, inputs + len(header["literals"])
    for index in own:
        node = header["nodes"][index]
        values = {}
        for number in operand_values(node["args"]):
            dtype, shape = specs[number]
            values[number] = Tensor(terminator.operands[operand], dtype, tuple(shape))
            operand += 1
        with ir.InsertionPoint(terminator):
            results = _emit(node, index, values)
        for result, tensor in zip(node["results"], results, strict=True):
            if result is not None:
                argument = block.arguments[stand_in]
                stand_in += 1
                if tensor.value.type != argument.type:
                    raise LoweringFailure(
                        f"it gives {tensor.value.type}, not {argument.type}", index
                    )
                argument.replace_all_uses_with(tensor.value)
    returned = list(terminator.operands)[:outputs]
    with ir.InsertionPoint(terminator):
        ir.Operation.create("func.return", operands=returned)
    terminator.erase()
    _sort(block)
    for position in reversed(range(inputs, stand_in)):
        block.erase_argument(position)
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(
            [argument.type for argument in block.arguments], [value.type for value in returned]
        )
    )


def _all_values(header: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Number, dtype and shape of every value of a graph message."""
    for number, spec in enumerate(header["inputs"]):
        yield [number, *spec]
    yield from header["literals"]
    for node in header["nodes"]:
        yield from (result for result in node["results"] if result is not None)


def _emit(node: Mapping[str, Any], index: int, values: Mapping[int, Tensor]) -> list[Tensor]:
    try:
        emitted = own_lowering(node)(Builder(node, values))
    except (Refusal, ir.MLIRError, ValueError) as error:
        raise LoweringFailure(str(error).partition("\n")[0][:300], index) from None
    return [emitted] if isinstance(emitted, Tensor) else list(emitted)


def _sort(block: ir.Block) -> None:
    """Order the operations of a block so that each value is defined before its uses."""
    operations = [op.operation for op in block.operations]
    by_value: dict[Any, int] = {}
    for index, op in enumerate(operations):
        for result in op.results:
            by_value[result] = index
    placed: set[int] = set()
    order: list[int] = []

    def used(op: ir.Operation) -> Iterator[int]:
        for operand in op.operands:
            if operand in by_value:
                yield by_value[operand]
        for region in op.regions:
            for inner in region.blocks:
                for nested in _walk(inner):
                    for operand in nested.operands:
                        if operand in by_value:
                            yield by_value[operand]

    for start in range(len(operations)):
        stack = [(start, used(operations[start]))]
        if start in placed:
            continue
        placed.add(start)
        while stack:
            index, pending = stack[-1]
            for needed in pending:
                if needed not in placed:
                    placed.add(needed)
                    stack.append((needed, used(operations[needed])))
                    break
            else:
                order.append(index)
                stack.pop()
    # The terminator depends on results only, so it can come before an unused operation.
    last = len(operations) - 1
    order.remove(last)
    for index in order:
        operations[index].move_before(operations[last])


def _mark_aliases(function: ir.Operation, header: Mapping[str, Any]) -> None:
    if not header["aliases"]:
        return
    int32 = ir.IntegerType.get_signless(32)
    attributes: list[dict[str, ir.Attribute]] = [{} for _ in header["inputs"]]
    for output, graph_input in header["aliases"]:
        attributes[graph_input] = {"tf.aliasing_output": ir.IntegerAttr.get(int32, output)}
    function.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [ir.DictAttr.get(item) for item in attributes]
    )


def _check_dialects(block: ir.Block) -> None:
    for op in _walk(block):
        if not op.name.startswith(("stablehlo.", "func.")):
            raise LoweringFailure(f"torch-mlir left the operation {op.name}")
