"""Lowered modules as neuronx-cc gets them: checked for what it cannot take, and written to a file.

Needs jaxlib's MLIR, as lowering does, and no XLA client.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from vllm_neuron.target import Target

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import LoweredModule

__all__ = ["InputFormat", "ModuleRefusal", "check_module", "module_file"]

InputFormat = Literal["hlo", "stablehlo"]
"""An HloModuleProto, which is neuronx-cc's documented input, or the text of a StableHLO module."""

# The operation of a constant, in StableHLO and in what jaxlib makes of HLO.
_CONSTANTS = frozenset({"stablehlo.constant", "mhlo.constant"})


class ModuleRefusal(Exception):
    """The compiler would refuse a module, or change what it computes.

    Attributes:
        reason: what is wrong, with the input or the operation.
        advice: what to do.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.advice = advice


def module_file(
    module: LoweredModule, input_format: InputFormat, *, native_int64: bool = False
) -> tuple[str, bytes]:
    """Return the name and the bytes of the file to compile.

    HLO goes as it is. StableHLO becomes text, or the HLO that XLA's own converter makes of it,
    with the aliases of arguments as `input_output_alias`. Either way the extremes of 64-bit
    integers, which reductions start from, become those of the 32 bits that are computed with,
    unless 64-bit integers are native.

    Raises:
        ModuleRefusal: it cannot be read or converted.
    """
    from vllm_neuron.lowering.mlir_context import stablehlo_context

    try:
        with stablehlo_context() as context:
            parsed = _parse(module, context)
            narrowed = not native_int64 and _narrow_extremes(parsed)
            if _is_hlo(module) and not narrowed:
                return "module.hlo", module.data
            text = str(parsed)
        if input_format == "stablehlo" and not _is_hlo(module):
            return "module.mlir", f"{text}\n".encode()
        computation = _jaxlib_mlir().mlir_module_to_xla_computation(
            text, use_tuple_args=False, return_tuple=False
        )
        return "module.hlo", _with_must_alias(computation.as_serialized_hlo_module_proto())
    except (RuntimeError, ValueError) as error:
        raise _unreadable(error) from error


def check_module(module: LoweredModule, *, target: Target, native_int64: bool) -> None:
    """Refuse what neuronx-cc would refuse after a while, or compute wrongly without a word.

    Args:
        module: StableHLO or HLO.
        target: what it is to be compiled for.
        native_int64: the compiler is asked for 64-bit integers (`--native-int64 enabled`); by
            default it computes them in 32 bits.

    Raises:
        ModuleRefusal: a dynamic dimension, a 64-bit float, a 64-bit integer constant that does not
            fit 32 bits and is not an extreme, or native 64-bit integers on a target without.
    """
    if native_int64 and not target.native_int64:
        raise ModuleRefusal(
            f"--native-int64 enabled does not exist for target {target.name}",
            "take it out of NEURON_CC_FLAGS",
        )
    for kind, specs in (("input", module.inputs), ("output", module.outputs)):
        for index, spec in enumerate(specs):
            if spec.dtype in ("float64", "complex64", "complex128"):
                raise ModuleRefusal(
                    f"{kind} {index} is {spec.dtype}{list(spec.shape)}", _wide_float_advice()
                )
    from vllm_neuron.lowering.mlir_context import stablehlo_context

    try:
        with stablehlo_context() as context:
            for operation in _operations(_parse(module, context).operation):
                _check_types(operation)
                if not native_int64 and operation.name in _CONSTANTS:
                    _check_constant(operation)
    except (RuntimeError, ValueError) as error:
        raise _unreadable(error) from error


def _check_types(operation: Any) -> None:
    from jaxlib.mlir import ir

    values = list(operation.results)
    arguments = [
        value for region in operation.regions for block in region for value in block.arguments
    ]
    for index, value in enumerate([*values, *arguments]):
        if not isinstance(value.type, ir.RankedTensorType):
            continue
        kind = value.type
        where = (
            f"result {index} of {operation.name}"
            if index < len(values)
            else f"input {index - len(values)} of {operation.name}"
        )
        for dimension in range(kind.rank):
            if kind.is_dynamic_dim(dimension):
                raise ModuleRefusal(
                    f"dimension {dimension} of {where} is dynamic ({kind})",
                    "every shape must be static: buckets are lists of fixed sizes",
                )
        if isinstance(kind.element_type, ir.F64Type):
            raise ModuleRefusal(f"{where} is a 64-bit float ({kind})", _wide_float_advice())


def _check_constant(operation: Any) -> None:
    import numpy as np

    values = _wide_integers(operation)
    if values is None:
        return
    limits = np.iinfo(np.int32 if values.dtype == np.int64 else np.uint32)
    fits = (values >= limits.min) & (values <= limits.max)
    wide = values[~fits & ~_is_extreme(values)]
    if wide.size:
        raise ModuleRefusal(
            f"a constant {operation.results[0].type} holds {wide.flat[0]}, and the compiler "
            "computes 64-bit integers in 32 bits",
            "set NEURON_CC_FLAGS='--native-int64 enabled' (trn2 and later), or keep such numbers "
            "out of the model",
        )


def _narrow_extremes(module: Any) -> bool:
    """Turn the least and the largest 64-bit integer into the 32-bit ones; tell if there were any.

    As long as every other value fits 32 bits, comparisons with them give the same.
    """
    import numpy as np
    from jaxlib.mlir import ir

    found = False
    for operation in _operations(module.operation):
        values = _wide_integers(operation) if operation.name in _CONSTANTS else None
        if values is None or values.dtype != np.int64 or not _is_extreme(values).any():
            continue
        limits = np.iinfo(np.int32)
        narrow = np.where(_is_extreme(values), values.clip(limits.min, limits.max), values)
        kind = operation.results[0].type
        # A splat is one value for the whole tensor.
        full = np.array(np.broadcast_to(narrow, kind.shape))
        operation.attributes["value"] = ir.DenseElementsAttr.get(full, context=module.context)
        found = True
    return found


def _is_extreme(values: Any) -> Any:
    import numpy as np

    limits = np.iinfo(values.dtype)
    # Zero is the least unsigned integer of any width.
    return (values == limits.max) | ((values == limits.min) & (values != 0))


def _wide_integers(operation: Any) -> Any:
    """Return the values of a constant of 64-bit integers, of a splat only one; None for others."""
    import numpy as np
    from jaxlib.mlir import ir

    element = operation.results[0].type.element_type
    if not isinstance(element, ir.IntegerType) or element.width <= 32:
        return None
    attribute = operation.attributes["value"]
    dtype = np.uint64 if element.is_unsigned else np.int64
    if attribute.is_splat:
        value = ir.IntegerAttr(attribute.get_splat_value()).value
        return np.array(value % (1 << 64) if element.is_unsigned else value, dtype)
    return np.array(attribute).astype(dtype, copy=False)


def _wide_float_advice() -> str:
    return "Neuron devices compute in 32 bits and fewer: keep 64-bit and complex numbers out of it"


def _operations(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield from _operations(inner.operation)


# Fields of XLA's hlo.proto: HloModuleProto.input_output_alias; its entries; the kind of an entry.
_ALIASES, _ENTRIES, _KIND = 8, 1, 4
_MAY_ALIAS, _MUST_ALIAS = 1, 2


def _with_must_alias(module: bytes) -> bytes:
    """Turn the aliases that XLA's converter marks "may" into "must": a copy is never acceptable."""
    changed = bytearray(module)
    for number, start, end in _fields(module, 0, len(module)):
        if number != _ALIASES:
            continue
        for entry, entry_start, entry_end in _fields(module, start, end):
            if entry != _ENTRIES:
                continue
            for field, at, _ in _fields(module, entry_start, entry_end):
                if field == _KIND and changed[at] == _MAY_ALIAS:
                    changed[at] = _MUST_ALIAS
    return bytes(changed)


def _fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of the value of each field of a protobuf message."""
    while at < end:
        tag, at = _varint(message, at)
        wire_type = tag & 7
        if wire_type == 2:
            size, at = _varint(message, at)
            after = at + size
        elif wire_type == 0:
            _, after = _varint(message, at)
        elif wire_type in (1, 5):
            after = at + (8 if wire_type == 1 else 4)
        else:
            raise ValueError(f"wire type {wire_type} at byte {at} of an HloModuleProto")
        yield tag >> 3, at, after
        at = after


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def _is_hlo(module: LoweredModule) -> bool:
    return module.format == "hlo"


def _parse(module: LoweredModule, context: Any) -> Any:
    """Return the module as an MLIR module in `context`."""
    from jaxlib import xla_client
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if not _is_hlo(module):
        return stablehlo.deserialize_portable_artifact(context, module.data)
    computation = xla_client.XlaComputation(module.data)
    return ir.Module.parse(_jaxlib_mlir().xla_computation_to_mlir_module(computation), context)


def _jaxlib_mlir() -> Any:
    from vllm_neuron.compiler.xla_cpu import extension

    return extension().mlir


def _unreadable(error: Exception) -> ModuleRefusal:
    text = str(error).strip().partition("\n")[0][:300]
    return ModuleRefusal(f"it cannot be read: {text}", "a defect of the lowering: please report it")
