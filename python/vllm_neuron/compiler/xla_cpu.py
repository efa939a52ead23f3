"""XLA's CPU client by way of jaxlib: the one client of a process, its options and its errors.

Only `jaxlib` is needed, never `jax`. The calls used here and in `vllm_neuron.runtime.host` are
those of jaxlib 0.10 (`jaxlib.xla_client`), through which jax itself goes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_neuron.compiler import host_kernels

if TYPE_CHECKING:
    from vllm_neuron.lowering.module import ModuleFormat

__all__ = [
    "CpuClient",
    "XlaError",
    "client",
    "compile_module",
    "cpu_features",
    "extension",
    "hlo_to_mlir",
    "jaxlib_version",
    "load_executable",
    "options_for_level",
    "short_reason",
]

# Whatever the level: results must equal eager as closely as XLA can, so nothing is computed in
# another precision than the model wrote (a cast to bfloat16 and back rounds), and the minimum or
# maximum with a NaN is NaN. Names: `DebugOptions` in XLA's xla.proto.
_SAME_AS_EAGER: dict[str, bool | int] = {
    "xla_allow_excess_precision": False,
    "xla_cpu_enable_fast_math": False,
    "xla_cpu_enable_fast_min_max": False,
}

_MESSAGE_LIMIT = 600

_lock = threading.Lock()
_client: CpuClient | None = None


class XlaError(Exception):
    """XLA or jaxlib refused a program; the message is XLA's own on one line."""


@dataclass(frozen=True, slots=True)
class CpuClient:
    """The CPU client of this process and its single device, as jaxlib objects."""

    client: Any
    device: Any
    devices: Any


def client() -> CpuClient:
    """Return the CPU client of this process, made on first use.

    It runs programs in the calling thread, without the interpreter's lock, and spreads large
    operations over a thread pool. The pool has one thread for each processor that the process may
    run on, or `NPROC` threads when that variable is set (XLA's rule); OMP_NUM_THREADS has no
    influence.

    The custom calls of `host_kernels` are registered before it is returned, so that no program
    with them is compiled or loaded earlier.
    """
    global _client
    with _lock:
        if _client is None:
            # At level 0 XLA reports that it found a CPU; its warnings and errors stay visible.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
            host_kernels.register(_xla_client())
            cpu = _xla_client().make_cpu_client(asynchronous=False)
            device = cpu.devices()[0]
            _client = CpuClient(cpu, device, _xla_client().DeviceList((device,)))
        return _client


def jaxlib_version() -> str:
    """Return the version of the installed jaxlib without importing it."""
    return importlib.metadata.version("jaxlib")


@functools.cache
def cpu_features() -> str:
    """Return what tells whether machine code made elsewhere runs here.

    It is the machine type and the sorted feature flags of the first processor of /proc/cpuinfo
    (`flags` on x86-64, `Features` on Arm).
    """
    flags: list[str] = []
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = sorted(set(value.split()))
            break
    return " ".join([platform.machine(), *flags])


def options_for_level(level: int) -> dict[str, bool | int]:
    """Return the XLA options, by their name in XLA, for an optimization level of 1 to 3.

    The level is that of LLVM, to which XLA:CPU hands its loops; 0 would switch off XLA's own
    optimizations as well.
    """
    return {**_SAME_AS_EAGER, "xla_backend_optimization_level": level}


def compile_module(
    module: bytes, options: Mapping[str, bool | int], *, module_format: ModuleFormat
) -> Any:
    """Compile a module for this processor, a StableHLO module with the kernels of `host_kernels`.

    Args:
        module: a StableHLO portable artifact or a serialised HloModuleProto.
        options: XLA options by their name in XLA.
        module_format: which of the two it is.

    Returns:
        jaxlib's loaded executable.

    Raises:
        XlaError: XLA refuses the module or an option.
    """
    cpu = client()
    compile_options = _xla_client().CompileOptions()
    compile_options.env_option_overrides = list(options.items())
    try:
        if module_format == "hlo":
            program: bytes | str = hlo_to_mlir(module)
        else:
            program = host_kernels.with_kernels(module)
        return cpu.client.compile_and_load(program, cpu.devices, compile_options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise XlaError(short_reason(error)) from error


def hlo_to_mlir(module: bytes) -> str:
    """Convert a serialised HloModuleProto to MLIR, the only form that the client compiles.

    Aliases travel along, as the module attribute mhlo.input_output_alias.
    """
    computation = _xla_client().XlaComputation(module)
    text: str = extension().mlir.xla_computation_to_mlir_module(computation)
    if len(computation.program_shape().result_shape().tuple_shapes()) == 1:
        # A result that is a tuple of one is unpacked on this way, its alias is not.
        text = text.replace("output_index = array<i64: 0>", "output_index = array<i64>")
    return text


def load_executable(serialized: bytes) -> Any:
    """Load an executable that `LoadedExecutable.serialize` of the same jaxlib wrote.

    The bytes hold machine code, which will run in this process.

    Raises:
        XlaError: the bytes cannot be loaded.
    """
    cpu = client()
    try:
        return cpu.client.deserialize_executable(
            serialized, cpu.devices, _xla_client().CompileOptions()
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise XlaError(short_reason(error)) from error


@functools.cache
def extension() -> Any:
    """Return jaxlib's extension module, where its arrays and shardings live."""
    return importlib.import_module("jaxlib._jax")


def _xla_client() -> Any:
    return importlib.import_module("jaxlib.xla_client")


def short_reason(error: BaseException) -> str:
    """Return XLA's message on one line, without the dump of the program that may follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:3]) or type(error).__name__
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 4] + " ..."
