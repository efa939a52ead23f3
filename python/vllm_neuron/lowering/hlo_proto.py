"""The HLO module that PyTorch/XLA writes, made into the one that a compiler takes.

PyTorch/XLA numbers parameters as it meets them, makes parameters of constants, drops unused inputs
and knows no aliases. Here the module's protobuf form is rewritten: one parameter for each graph
input, in graph order; constants in place of the other parameters; the aliases; no locations.

Only the fields below are understood, the others are carried along. Field numbers: `hlo.proto` and
`xla_data.proto` of OpenXLA; wire format: protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from vllm_neuron.lowering.failure import LoweringFailure

__all__ = ["Literal", "finish_module"]

# HloModuleProto
_ENTRY_NAME, _COMPUTATIONS, _HOST_PROGRAM_SHAPE, _ENTRY_ID = 2, 3, 4, 6
_INPUT_OUTPUT_ALIAS, _STACK_FRAMES = 8, 17
# HloComputationProto
_INSTRUCTIONS, _PROGRAM_SHAPE, _COMPUTATION_ID, _ROOT_ID = 2, 4, 5, 6
# HloInstructionProto
_NAME, _OPCODE, _SHAPE, _METADATA, _LITERAL, _PARAMETER_NUMBER = 1, 2, 3, 7, 8, 9
_ID, _OPERAND_IDS, _CONTROL_PREDECESSOR_IDS, _CALLED_COMPUTATION_IDS = 35, 36, 37, 38
# ProgramShapeProto, ShapeProto, LiteralProto
_PARAMETERS, _RESULT, _PARAMETER_NAMES = 1, 2, 3
_ELEMENT_TYPE, _TUPLE_SHAPES = 2, 4
_LITERAL_SHAPE = 1
# HloInputOutputAliasProto and its AliasEntryProto
_ENTRIES, _OUTPUT_SHAPE_INDEX, _ALIASED_PARAMETER, _ALIAS_KIND = 1, 1, 2, 4

_TUPLE = 13  # PrimitiveType
_MUST_ALIAS = 2  # xla_data.proto, Kind

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# By dtype: its PrimitiveType, the field of its values in LiteralProto, and whether these are
# varints (else their own bytes).
_TYPES = {
    "bool": (1, 2, True),
    "int8": (2, 15, False),
    "int16": (3, 17, False),
    "int32": (4, 4, True),
    "int64": (5, 5, True),
    "uint8": (6, 3, False),
    "uint16": (7, 16, False),
    "uint32": (8, 6, True),
    "uint64": (9, 7, True),
    "float16": (10, 11, False),
    "float32": (11, 8, False),
    "float64": (12, 9, False),
    "complex64": (15, 12, False),
    "bfloat16": (16, 13, False),
    "complex128": (18, 18, False),
    "float8_e5m2": (19, 19, False),
    "float8_e4m3fn": (20, 20, False),
}

# The dtype, the values as Python integers (for the varint dtypes) and as bytes.
Literal = tuple[str, Sequence[int], bytes]


def finish_module(
    data: bytes,
    *,
    inputs: int,
    outputs: Sequence[str],
    aliases: Iterable[tuple[int, int]],
    constant: Callable[[int], Literal],
) -> bytes:
    """Rewrite a module whose root is a tuple of the graph's inputs and then its outputs.

    Whatever instruction stands for an input becomes the parameter of its number.

    Args:
        data: the serialised HloModuleProto.
        inputs: how many of the root's operands are inputs.
        outputs: dtypes of the others; PyTorch/XLA has some indices in int32 that torch has in
            int64, and they are converted here.
        aliases: output index and index of the input that it updates.
        constant: the value of a parameter of `data` by its number.

    Raises:
        LoweringFailure: an input has no instruction of its own.
    """
    module = _Message.parse(data)
    computations = [_Computation(item) for item in module.messages(_COMPUTATIONS)]
    entry = next(item for item in computations if item.id == module.number(_ENTRY_ID))
    root = entry.instructions[entry.message.number(_ROOT_ID)]
    operands = root.numbers(_OPERAND_IDS)
    parameters, results = operands[:inputs], operands[inputs:]
    if len(set(parameters)) != inputs:
        raise LoweringFailure("PyTorch/XLA made one value of two inputs")
    for number, identity in enumerate(parameters):
        _become_parameter(entry.instructions[identity], number)
    results = [
        entry.converted(identity, dtype) for identity, dtype in zip(results, outputs, strict=True)
    ]
    _set_result(root, entry, results)
    entry.keep_live({*parameters, entry.message.number(_ROOT_ID)})
    for identity, instruction in entry.instructions.items():
        if instruction.text(_OPCODE) == "parameter" and identity not in parameters:
            _become_constant(instruction, constant(instruction.number(_PARAMETER_NUMBER)))

    program = _Message()
    for identity in parameters:
        program.add(_PARAMETERS, entry.instructions[identity].bytes(_SHAPE))
    program.add(_RESULT, root.bytes(_SHAPE))
    for identity in parameters:
        program.add(_PARAMETER_NAMES, entry.instructions[identity].bytes(_NAME))
    entry.message.replace(_PROGRAM_SHAPE, [program.encode()])
    module.replace(_HOST_PROGRAM_SHAPE, [program.encode()])
    called = _called(entry, {item.id: item for item in computations})
    module.replace(
        _COMPUTATIONS,
        [item.encode() for item in computations if item is entry or item.id in called],
    )
    module.replace(_STACK_FRAMES, [])
    module.replace(_INPUT_OUTPUT_ALIAS, [_alias_message(aliases)])
    return module.encode()


def _become_parameter(instruction: _Message, number: int) -> None:
    kept = [field for field in instruction.fields if field[0] in (_SHAPE, _ID)]
    instruction.fields = kept
    instruction.add(_NAME, f"input.{number}".encode())
    instruction.add(_OPCODE, b"parameter")
    instruction.add(_PARAMETER_NUMBER, number)


def _become_constant(instruction: _Message, value: Literal) -> None:
    dtype, integers, raw = value
    _, field, is_varint = _TYPES[dtype]
    literal = _Message()
    literal.add(_LITERAL_SHAPE, instruction.bytes(_SHAPE))
    literal.add(field, b"".join(map(_varint, integers)) if is_varint else raw)
    instruction.replace(_OPCODE, [b"constant"])
    instruction.replace(_PARAMETER_NUMBER, [])
    instruction.replace(_NAME, [f"constant.{instruction.number(_ID)}".encode()])
    instruction.add(_LITERAL, literal.encode())


def _set_result(root: _Message, entry: _Computation, outputs: Sequence[int]) -> None:
    shape = _Message()
    shape.add(_ELEMENT_TYPE, _TUPLE)
    for identity in outputs:
        shape.add(_TUPLE_SHAPES, entry.instructions[identity].bytes(_SHAPE))
    root.replace(_SHAPE, [shape.encode()])
    root.replace(_OPERAND_IDS, [b"".join(map(_varint, outputs))])


def _called(entry: _Computation, by_id: Mapping[int, _Computation]) -> set[int]:
    found: set[int] = set()
    pending = [entry]
    while pending:
        for instruction in pending.pop().instructions.values():
            for identity in instruction.numbers(_CALLED_COMPUTATION_IDS):
                if identity not in found:
                    found.add(identity)
                    pending.append(by_id[identity])
    return found


def _alias_message(aliases: Iterable[tuple[int, int]]) -> bytes:
    message = _Message()
    for output, source in aliases:
        entry = _Message()
        entry.add(_OUTPUT_SHAPE_INDEX, _varint(output))
        entry.add(_ALIASED_PARAMETER, source)
        entry.add(_ALIAS_KIND, _MUST_ALIAS)
        message.add(_ENTRIES, entry.encode())
    return message.encode()


class _Computation:
    """A computation with its instructions by id, in order."""

    def __init__(self, message: _Message) -> None:
        self.message = message
        self.id = message.number(_COMPUTATION_ID)
        self.instructions = {item.number(_ID): item for item in message.messages(_INSTRUCTIONS)}

    def converted(self, identity: int, dtype: str) -> int:
        """The value of an instruction in a dtype: itself, or a conversion of it."""
        shape = _Message.parse(self.instructions[identity].bytes(_SHAPE))
        element_type, _, _ = _TYPES[dtype]
        if shape.number(_ELEMENT_TYPE) == element_type:
            return identity
        shape.replace(_ELEMENT_TYPE, [element_type])
        fresh = max(self.instructions) + 1
        conversion = _Message()
        conversion.add(_NAME, f"convert.{fresh}".encode())
        conversion.add(_OPCODE, b"convert")
        conversion.add(_SHAPE, shape.encode())
        conversion.add(_ID, fresh)
        conversion.add(_OPERAND_IDS, _varint(identity))
        # In the order of the root: after what it converts.
        root = self.message.number(_ROOT_ID)
        last = self.instructions.pop(root)
        self.instructions |= {fresh: conversion, root: last}
        return fresh

    def keep_live(self, roots: set[int]) -> None:
        """Drop the instructions that no root depends on."""
        live: set[int] = set()
        pending = list(roots)
        while pending:
            identity = pending.pop()
            if identity not in live:
                live.add(identity)
                instruction = self.instructions[identity]
                pending += instruction.numbers(_OPERAND_IDS)
                pending += instruction.numbers(_CONTROL_PREDECESSOR_IDS)
        self.instructions = {key: item for key, item in self.instructions.items() if key in live}

    def encode(self) -> bytes:
        for instruction in self.instructions.values():
            instruction.replace(_METADATA, [])
        self.message.replace(_INSTRUCTIONS, [item.encode() for item in self.instructions.values()])
        return self.message.encode()


class _Message:
    """A protobuf message as its fields: number, wire type, value."""

    def __init__(self) -> None:
        self.fields: list[tuple[int, int, int | bytes]] = []

    @classmethod
    def parse(cls, data: bytes) -> Self:
        message, position = cls(), 0
        while position < len(data):
            tag, position = _read_varint(data, position)
            number, wire = tag >> 3, tag & 7
            value: int | bytes
            if wire == _VARINT:
                value, position = _read_varint(data, position)
            else:
                size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
                if size is None:
                    size, position = _read_varint(data, position)
                value, position = data[position : position + size], position + size
            message.fields.append((number, wire, value))
        return message

    def encode(self) -> bytes:
        parts = []
        for number, wire, value in self.fields:
            parts.append(_varint(number << 3 | wire))
            if isinstance(value, int):
                parts.append(_varint(value))
            else:
                if wire == _BYTES:
                    parts.append(_varint(len(value)))
                parts.append(value)
        return b"".join(parts)

    def add(self, number: int, value: int | bytes) -> None:
        self.fields.append((number, _VARINT if isinstance(value, int) else _BYTES, value))

    def replace(self, number: int, values: Sequence[int | bytes]) -> None:
        self.fields = [field for field in self.fields if field[0] != number]
        for value in values:
            self.add(number, value)

    def number(self, number: int) -> int:
        """The integer of a field; 0, as in proto3, where it is left out."""
        found = [value for key, _, value in self.fields if key == number]
        return found[-1] if found and isinstance(found[-1], int) else 0

    def bytes(self, number: int) -> bytes:
        found = [value for key, _, value in self.fields if key == number]
        return found[-1] if found and isinstance(found[-1], bytes) else b""

    def text(self, number: int) -> str:
        return self.bytes(number).decode()

    def messages(self, number: int) -> list[_Message]:
        return [
            _Message.parse(value)
            for key, _, value in self.fields
            if key == number and isinstance(value, bytes)
        ]

    def numbers(self, number: int) -> list[int]:
        """The integers of a repeated field, packed or not."""
        found: list[int] = []
        for key, _, value in self.fields:
            if key != number:
                continue
            if isinstance(value, int):
                found.append(value)
                continue
            position = 0
            while position < len(value):
                item, position = _read_varint(value, position)
                found.append(item)
        return found


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _varint(value: int) -> bytes:
    # Negative numbers are written as 64-bit two's complement.
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
