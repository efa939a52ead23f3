"""The compiler of the host emulator: a lowered module becomes a NEFF with an XLA:CPU program."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_neuron.compiler import host_kernels, xla_cpu
from vllm_neuron.compiler.arguments import HOST_TARGET
from vllm_neuron.compiler.host_program import (
    EXECUTABLE_MEMBER,
    FORMAT,
    MANIFEST_MEMBER,
    MODULE_MEMBERS,
    HostManifest,
)
from vllm_neuron.errors import CompileError

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import LoweredModule
    from vllm_neuron.trace_record import TensorSpec

__all__ = ["HostCompiler"]

# The spelling of each dtype in the text of an HLO module (XLA's primitive_util.cc).
_HLO_TYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "int64": "s64",
    "int32": "s32",
    "int16": "s16",
    "int8": "s8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "pred",
    "complex64": "c64",
    "complex128": "c128",
}

_ENTRY_LAYOUT = re.compile(r"entry_computation_layout=\{\((?P<inputs>.*?)\)->(?P<outputs>.*)\}")
_SHAPE = re.compile(r"(?P<type>[a-z][a-z0-9]*)\[(?P<dimensions>[0-9,]*)\]")
_ALIAS = re.compile(r"\{(?P<output>\d*)\}: \((?P<input>\d+), \{\}")


class HostCompiler:
    """Compiles StableHLO and HLO with XLA for the processor of this machine.

    The NEFF has target `host`, which no Neuron device has, and holds the module, the ahead-of-time
    compiled executable and a manifest that says where that executable may run. Of the compiler
    arguments only the optimization level has an effect.

    Attributes:
        name: `xla-cpu`.
        version: the version of jaxlib.
        target: `host`.
    """

    name = "xla-cpu"
    target = HOST_TARGET

    def __init__(self) -> None:
        self.version = xla_cpu.jaxlib_version()

    def key_factors(self) -> dict[str, str]:
        """Return what enters compile keys besides module and arguments.

        The processor is not among them: an executable made for another one is rebuilt at load. Nor
        is the number of threads, on which no result depends (docs/host-emulator.md). XLA_FLAGS is:
        XLA reads it whenever it compiles.
        """
        factors = {
            "compiler": self.name,
            "version": self.version,
            "target": self.target,
            "host-program-format": str(FORMAT),
            "host-kernels": str(host_kernels.VERSION),
            "xla-options": json.dumps(
                [xla_cpu.options_for_level(level) for level in (1, 2, 3)], sort_keys=True
            ),
        }
        if flags := " ".join(os.environ.get("XLA_FLAGS", "").split()):
            factors["xla-flags"] = flags
        return factors

    def stop(self) -> None:
        """Nothing: XLA compiles in this process and cannot be ended."""

    def compile(
        self,
        module: LoweredModule,
        *,
        bucket: str,
        arguments: tuple[str, ...],
        input_names: Sequence[str],
        output_names: Sequence[str],
    ) -> bytes:
        """Compile one module to a NEFF.

        Raises:
            CompileError: XLA refuses the module, or the compiled program disagrees with the
                specifications and aliases of `module`. Attributes: `bucket`, `command`,
                `exit_code` (None: no process was started), `log_path` (None), `reason`.
        """
        from vllm_neuron._core import write_neff

        options = xla_cpu.options_for_level(_level_in(arguments))
        try:
            executable = xla_cpu.compile_module(module.data, options, module_format=module.format)
            _check_program(executable, module)
            serialized = executable.serialize()
        except (xla_cpu.XlaError, RuntimeError) as error:
            reason = xla_cpu.short_reason(error)
            raise CompileError(
                f"bucket {bucket}: the host compiler (XLA:CPU of jaxlib {self.version}) failed: "
                f"{reason}",
                bucket=bucket,
                command=("xla-cpu", *arguments),
                exit_code=None,
                log_path=None,
                reason=reason,
            ) from error
        manifest = HostManifest(
            jaxlib=self.version,
            cpu=xla_cpu.cpu_features(),
            options=options,
            kernels=host_kernels.VERSION,
            arguments=tuple(arguments),
            aliases=dict(module.aliases),
        )
        return write_neff(
            name=bucket,
            target=self.target,
            compiler_version=f"{self.name} {self.version}",
            inputs=_tensors(input_names, module.inputs),
            outputs=_tensors(output_names, module.outputs),
            members=[
                (MANIFEST_MEMBER, manifest.to_json()),
                (MODULE_MEMBERS[module.format], module.data),
                (EXECUTABLE_MEMBER, serialized),
            ],
            # Packed members would have to be unpacked at every start.
            compression="none",
        )


def _level_in(arguments: Sequence[str]) -> int:
    """Return the level of the right-most `-O<n>`; 2 is neuronx-cc's own default."""
    levels = [argument for argument in arguments if re.fullmatch(r"-O[123]", argument)]
    return int(levels[-1][2:]) if levels else 2


def _tensors(
    names: Sequence[str], specs: Sequence[TensorSpec]
) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, spec.dtype, spec.shape) for name, spec in zip(names, specs, strict=True)]


def _check_program(executable: Any, module: LoweredModule) -> None:
    """Compare the signature and the aliases of a compiled program with what the module declares.

    XLA checks the sizes of its inputs only, so a declaration that disagrees with the module would
    be computed with the wrong type, and an alias that is not marked would copy a KV cache at every
    step.

    Raises:
        XlaError: they differ.
    """
    header = executable.hlo_modules()[0].to_string().partition("\n")[0]
    layout = _ENTRY_LAYOUT.search(header)
    if layout is None:
        raise xla_cpu.XlaError(f"cannot read the signature of the program: {header[:200]!r}")
    for kind, declared, text in (
        ("input", module.inputs, layout["inputs"]),
        ("output", module.outputs, layout["outputs"]),
    ):
        expected = [
            (_HLO_TYPES.get(spec.dtype, spec.dtype), ",".join(map(str, spec.shape)))
            for spec in declared
        ]
        found = [(match["type"], match["dimensions"]) for match in _SHAPE.finditer(text)]
        if expected != found:
            raise xla_cpu.XlaError(
                f"the module's {kind}s are {_signature(found)}, expected {_signature(expected)}"
            )
    aliases = {
        int(match["output"] or 0): int(match["input"])
        for match in _ALIAS.finditer(header.partition("input_output_alias=")[2])
    }
    if aliases != dict(module.aliases):
        raise xla_cpu.XlaError(
            f"the module aliases outputs to inputs {aliases}, expected {dict(module.aliases)}"
        )


def _signature(tensors: Sequence[tuple[str, str]]) -> str:
    return "(" + ", ".join(f"{dtype}[{dimensions}]" for dtype, dimensions in tensors) + ")"
