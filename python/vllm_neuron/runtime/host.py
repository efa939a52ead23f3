"""The runtime of the host emulator: runs NEFFs of target `host` on XLA's CPU client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_neuron._core import Neff, NeffTensor
from vllm_neuron.compiler import host_kernels, xla_cpu
from vllm_neuron.compiler.arguments import HOST_TARGET
from vllm_neuron.compiler.host_program import (
    EXECUTABLE_MEMBER,
    MANIFEST_MEMBER,
    MODULE_MEMBERS,
    HostManifest,
)
from vllm_neuron.errors import ExecutionError, NeffFormatError
from vllm_neuron.runtime.base import NeffModel, load_error
from vllm_neuron.runtime.host_tensor import DTYPES, HostTensor, check_argument, import_tensor
from vllm_neuron.runtime.status import NrtStatus

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HostBoundModel", "HostModel", "HostRuntime", "HostTensor"]

logger = logging.getLogger(__name__)

# A step argument up to this size is copied into memory that is kept for it (about 1 us); to make
# a jaxlib array of a torch tensor costs 15 to 40 us whatever its size, as measured with jaxlib
# 0.10.2.
_COPIED_ARGUMENT_BYTES = 1 << 20


class HostRuntime:
    """Keeps tensors in the memory of this process and runs programs on its processor.

    One program runs at a time, as on a NeuronCore, without the interpreter's lock; a large
    operation uses all processors of the process (`xla_cpu.client`).

    Attributes:
        name: `host`.
        counters: `executables_loaded` and `executables_rebuilt`: NEFFs whose executable was loaded
            or had to be compiled from the module; `executions`: programs run.
        lock: held while a program runs and while counting.
    """

    name = "host"

    def __init__(self) -> None:
        self.counters = {"executables_loaded": 0, "executables_rebuilt": 0, "executions": 0}
        self.lock = threading.Lock()
        self._rebuild_explained = False

    def upload(self, tensor: torch.Tensor) -> HostTensor:
        """Make a device tensor of a CPU tensor of any dtype of `DTYPES`, strided in any way.

        A dense row-major tensor whose address is a multiple of 64 is not copied: the device tensor
        shares and keeps its memory, `HostTensor.shares_torch_memory` says so, and whoever writes to
        the tensor afterwards changes the device tensor too. Any other tensor is copied.

        Raises:
            ExecutionError: not a dense CPU tensor of a known dtype.
        """
        return HostTensor.upload(tensor)

    def allocate(self, shape: Sequence[int], dtype: str) -> HostTensor:
        """Make a device tensor of zeros that programs update in place."""
        return HostTensor.zeros(shape, dtype)

    def load(
        self,
        neff: Buffer,
        *,
        aliases: Mapping[int, int],
        bucket: str,
        is_verified: bool = False,
        index: Buffer | None = None,
    ) -> HostModel:
        """Validate a NEFF of target `host` and make it ready to run.

        The executable inside is machine code of the jaxlib and the processor that the manifest
        names. On any other, the module inside is compiled again.

        Raises:
            NeffError: the bytes are not a sound NEFF.
            ExecutionError: another target, no program of the host emulator inside, other aliases
                than `aliases`, or a module that XLA refuses.
        """
        parsed = Neff.parse(neff, verify_hash=not is_verified, index=index)
        if parsed.target != HOST_TARGET:
            raise load_error(
                bucket,
                f"the NEFF {parsed.name!r} is for target {parsed.target!r}; this is the host "
                f"emulator, which runs only NEFFs of target {HOST_TARGET!r} (compiled under "
                "VLLM_NEURON_DEVICE=host)",
            )
        manifest = _manifest(parsed, bucket=bucket)
        if dict(manifest.aliases) != dict(aliases):
            raise load_error(
                bucket,
                f"the NEFF {parsed.name!r} aliases outputs to inputs {dict(manifest.aliases)}, "
                f"expected {dict(aliases)}",
            )
        executable = self._executable(parsed, manifest, bucket=bucket)
        return HostModel(self, executable, parsed, aliases=manifest.aliases, bucket=bucket)

    def _executable(self, neff: Neff, manifest: HostManifest, *, bucket: str) -> Any:
        obstacle = _why_not_loadable(manifest)
        if obstacle is None:
            try:
                executable = xla_cpu.load_executable(neff.member(EXECUTABLE_MEMBER))
            except (xla_cpu.XlaError, NeffFormatError) as error:
                obstacle = f"it cannot be loaded ({error})"
            else:
                self._count("executables_loaded")
                return executable
        first, self._rebuild_explained = not self._rebuild_explained, True
        logger.log(
            logging.INFO if first else logging.DEBUG,
            "Host emulator: the executable in the NEFF of bucket %s is compiled again from its "
            "module, because %s%s",
            bucket,
            obstacle,
            "; further ones are logged at DEBUG" if first else "",
        )
        try:
            names = {name for name, _ in neff.members}
            module_format = next(
                (key for key, name in MODULE_MEMBERS.items() if name in names), "stablehlo"
            )
            module = neff.member(MODULE_MEMBERS[module_format])
            executable = xla_cpu.compile_module(
                module, manifest.options, module_format=module_format
            )
        except (xla_cpu.XlaError, NeffFormatError) as error:
            raise load_error(
                bucket, f"the module in the NEFF {neff.name!r} cannot be compiled: {error}"
            ) from error
        self._count("executables_rebuilt")
        return executable

    def _count(self, name: str) -> None:
        with self.lock:
            self.counters[name] += 1


class HostModel(NeffModel["HostTensor", "HostBoundModel"]):
    """A loaded NEFF of the host emulator; see `NeffModel`."""

    def __init__(
        self,
        runtime: HostRuntime,
        executable: Any,
        neff: Neff,
        *,
        aliases: Mapping[int, int],
        bucket: str,
    ) -> None:
        super().__init__(neff, aliases=aliases, bucket=bucket)
        self.runtime = runtime
        self.executable = executable
        self.result_handlers = [_result_handler(output) for output in self.outputs]
        self.output_types = [(tuple(output.shape), output.dtype) for output in self.outputs]
        self.sources = [self.aliases.get(index) for index in range(len(self.outputs))]

    def bind(self, fixed: Mapping[int, HostTensor]) -> HostBoundModel:
        """Fix the inputs with the given indices, as a rule the weights and the KV caches.

        Raises:
            ExecutionError: an index, a shape or a dtype is not the model's.
        """
        return HostBoundModel(self, fixed)


class HostBoundModel:
    """A loaded model with some inputs fixed; see `BoundModel`.

    Args:
        model: the loaded model.
        fixed: the device tensors of some inputs by index. They may be updated, written and bound
            to other models too: a step uses the contents that they have when it starts.

    Raises:
        ExecutionError: an index, a shape or a dtype is not the model's.
    """

    def __init__(self, model: HostModel, fixed: Mapping[int, HostTensor]) -> None:
        self._model = model
        self._fixed: list[HostTensor | None] = [None] * len(model.inputs)
        for index, tensor in fixed.items():
            model.check_bindable(index)
            self._check(tensor, index)
            self._fixed[index] = tensor
        updated = set(model.aliases.values())
        self._open = [
            _OpenInput(index, spec, updated=index in updated)
            for index, spec in enumerate(model.inputs)
            if index not in fixed
        ]

    def execute(self, arguments: Sequence[HostTensor | torch.Tensor]) -> list[HostTensor]:
        """Run one step with the inputs that are not fixed, in order; see `LoadedModel.execute`."""
        model = self._model
        model.check_count(arguments, [item.index for item in self._open])
        for item, argument in zip(self._open, arguments, strict=True):
            if not item.fits(argument):
                self._check(argument, item.index)
        with model.runtime.lock:
            tensors = self._fixed.copy()
            buffers = [tensor and tensor.buffer for tensor in tensors]
            updated: dict[int, torch.Tensor] = {}
            for item, argument in zip(self._open, arguments, strict=True):
                if isinstance(argument, HostTensor):
                    tensors[item.index] = argument
                    buffers[item.index] = argument.buffer
                else:
                    buffers[item.index] = item.take(argument)
                    if item.updated:
                        updated[item.index] = argument
            try:
                results = model.executable.execute_sharded(buffers).consume_with_handlers(
                    model.result_handlers
                )
            except (RuntimeError, ValueError, TypeError) as error:
                raise self._failure(error, tensors) from error
            model.runtime.counters["executions"] += 1
            outputs = []
            for result, source, kind in zip(
                results, model.sources, model.output_types, strict=True
            ):
                output = None if source is None else tensors[source]
                if output is None:
                    output = HostTensor(result, *kind)
                    if source is not None:
                        updated[source].copy_(output.memory())
                else:
                    output.replace(result)
                outputs.append(output)
            return outputs

    def _failure(self, error: Exception, tensors: Sequence[HostTensor | None]) -> ExecutionError:
        """Note which tensors a failed execution took, and return the error to raise."""
        model = self._model
        for tensor in tensors:
            if tensor is not None and tensor.buffer is None:
                # An earlier failure took its contents; asked for its address, it says so.
                tensor.data_ptr()
        reason = xla_cpu.short_reason(error)
        lost = []
        for source in model.aliases.values():
            tensor = tensors[source]
            if tensor is not None and tensor.buffer.is_deleted():
                tensor.lose(reason)
                lost.append(model.inputs[source].name)
        return ExecutionError(
            f"bucket {model.bucket}: the execution failed: {reason}"
            + (f"; lost are the contents of {', '.join(lost)}" if lost else ""),
            bucket=model.bucket,
            status=NrtStatus.RESOURCE if "RESOURCE_EXHAUSTED" in reason else NrtStatus.FAILURE,
            reason=reason,
        )

    def _check(self, tensor: HostTensor | torch.Tensor, index: int) -> None:
        spec = self._model.inputs[index]
        check_argument(
            tensor,
            tuple(spec.shape),
            DTYPES[spec.dtype],
            what=f"input {index} ({spec.name})",
            bucket=self._model.bucket,
        )


class _OpenInput:
    """An input that each step passes anew, with the memory that small CPU tensors go through."""

    __slots__ = ("_dtype", "_dtype_name", "_memory", "_shape", "_staged", "index", "updated")

    def __init__(self, index: int, spec: NeffTensor, *, updated: bool) -> None:
        self.index = index
        self.updated = updated
        self._shape = tuple(spec.shape)
        self._dtype_name = spec.dtype
        self._dtype = DTYPES[spec.dtype]
        self._staged: Any = None
        self._memory: torch.Tensor | None = None

    def fits(self, argument: HostTensor | torch.Tensor) -> bool:
        if argument.shape != self._shape:
            return False
        if isinstance(argument, HostTensor):
            return argument.dtype == self._dtype_name
        return argument.dtype is self._dtype and argument.is_cpu

    def take(self, argument: torch.Tensor) -> Any:
        """Return a jaxlib array with the values of a CPU tensor that fits."""
        if self.updated:
            return import_tensor(argument.detach().contiguous(), copy=True)
        if argument.nbytes > _COPIED_ARGUMENT_BYTES:
            return HostTensor.upload(argument).buffer
        if self._memory is None:
            staged = HostTensor.zeros(self._shape, self._dtype_name)
            self._staged, self._memory = staged.buffer, staged.memory()
        self._memory.copy_(argument)
        return self._staged


def _result_handler(output: NeffTensor) -> Any:
    """Return what makes jaxlib arrays of one output.

    Without it jaxlib looks for jax to describe each array, which takes longer than a small step.
    """
    jaxlib = xla_cpu.extension()
    sharding = jaxlib.SingleDeviceSharding(xla_cpu.client().device)
    return jaxlib.array_result_handler(_ArrayType(output), sharding, True, True)


class _ArrayType:
    """What jaxlib wants to know of an array: its shape and NumPy dtype."""

    weak_type = False

    def __init__(self, output: NeffTensor) -> None:
        import ml_dtypes
        import numpy

        self.shape = tuple(output.shape)
        extended = getattr(ml_dtypes, output.dtype, None)
        self.dtype = numpy.dtype(output.dtype if extended is None else extended)


def _manifest(neff: Neff, *, bucket: str) -> HostManifest:
    try:
        return HostManifest.from_json(neff.member(MANIFEST_MEMBER))
    except (NeffFormatError, ValueError) as error:
        raise load_error(
            bucket, f"the NEFF {neff.name!r} holds no program of the host emulator: {error}"
        ) from error


def _why_not_loadable(manifest: HostManifest) -> str | None:
    """Return why the executable of another process cannot run here, or None if it can."""
    here = xla_cpu.jaxlib_version()
    if manifest.jaxlib != here:
        return f"it was made by jaxlib {manifest.jaxlib}, here is {here}"
    if manifest.cpu != xla_cpu.cpu_features():
        return "it was made for another processor"
    if manifest.kernels != host_kernels.VERSION:
        return (
            f"it was made for version {manifest.kernels} of the host kernels, here is "
            f"{host_kernels.VERSION}"
        )
    return None
