"""The runtime for Neuron devices: device tensors and NEFFs by way of libnrt."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_neuron import _core
from vllm_neuron._core import Neff
from vllm_neuron.errors import ExecutionError
from vllm_neuron.runtime.base import NeffModel, load_error
from vllm_neuron.runtime.nrt_tensor import NARROWED, DeviceMemory, NrtTensor, fit
from vllm_neuron.runtime.status import NrtStatus
from vllm_neuron.target import Target, expected_architecture

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["NrtBoundModel", "NrtModel", "NrtRuntime", "NrtTensor"]

logger = logging.getLogger(__name__)

# Statuses after which the memory of an execution is what it was before.
_NOT_STARTED = frozenset(
    {
        *(NrtStatus.INVALID, NrtStatus.INVALID_HANDLE, NrtStatus.QUEUE_FULL),
        *(NrtStatus.UNINITIALIZED, NrtStatus.CLOSED, NrtStatus.EXEC_BAD_INPUT),
    }
)
_ADVICE = {
    NrtStatus.RESOURCE: "lower --gpu-memory-utilization or use smaller buckets",
    NrtStatus.TIMEOUT: "NEURON_RT_EXEC_TIMEOUT sets the limit in seconds",
    NrtStatus.LOAD_NOT_ENOUGH_NC: "check NEURON_RT_VISIBLE_CORES and --tensor-parallel-size",
    NrtStatus.UNSUPPORTED_NEFF_VERSION: "the compiler is newer than the runtime: upgrade it",
    NrtStatus.EXEC_UNIT_UNRECOVERABLE: "the device needs a reset: restart the server",
    NrtStatus.EXEC_NC_BUSY: "another process has the core: neuron-ls shows which",
}


class NrtRuntime:
    """Keeps tensors on a logical NeuronCore and runs NEFFs there.

    Args:
        target: what the device is.
        lnc: physical cores of a logical one, as the device is configured.
        core: the logical core, counted from 0 within the visible cores of this process.
        library: path of libnrt, to be used instead of the usual places.

    Attributes:
        name: `nrt`.
        version: the runtime's version text.
        counters: `loads`, `executions`, and `executions_with_nan` that the runtime reported.

    Raises:
        ExecutionError: no library, no device, no core of that number.
    """

    name = "nrt"

    def __init__(
        self, *, target: Target, lnc: int, core: int = 0, library: Path | None = None
    ) -> None:
        self.library = _core.NrtLibrary.open(None if library is None else str(library))
        numbers, self.version = self.library.version()
        self.major = numbers[0]
        self.target = target
        self.lnc = lnc
        self.core = core
        self.counters = {"loads": 0, "executions": 0, "executions_with_nan": 0}
        self._counting = threading.Lock()
        self.library.init()
        visible = self.library.visible_cores()
        if core >= visible:
            raise ExecutionError(
                f"logical core {core} does not exist: this process sees {visible} (of "
                f"{self.library.total_cores()}); check NEURON_RT_VISIBLE_CORES",
                bucket=None,
                status=NrtStatus.LOAD_NOT_ENOUGH_NC,
                reason=f"core {core} of {visible}",
            )

    def upload(self, tensor: torch.Tensor) -> NrtTensor:
        """Copy a dense CPU tensor, strided in any way, to the device."""
        uploaded = self._new(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        uploaded.write(tensor.detach())
        return uploaded

    def allocate(self, shape: Sequence[int], dtype: str) -> NrtTensor:
        """Make a device tensor of zeros."""
        allocated = self._new(tuple(shape), dtype)
        allocated.memory.handle.clear()
        return allocated

    def load(
        self,
        neff: Buffer,
        *,
        aliases: Mapping[int, int],
        bucket: str,
        is_verified: bool = False,
        index: Buffer | None = None,
    ) -> NrtModel:
        """Validate a NEFF and load it; a view of mapped pages is read in place.

        Raises:
            NeffError: the bytes are not a sound NEFF.
            ExecutionError: it is for another target, logical core size or compiler generation, its
                tensors do not allow `aliases`, or the runtime refuses it.
        """
        parsed = Neff.parse(neff, verify_hash=not is_verified, index=index)
        self._check(parsed, aliases, bucket)
        try:
            handle = self.library.load(neff, core=self.core)
        except ExecutionError as error:
            raise _for_bucket(error, bucket, f"cannot load the NEFF {parsed.name!r}") from error
        self._check_tensors(handle, parsed, bucket)
        self.count("loads")
        return NrtModel(self, handle, parsed, aliases=aliases, bucket=bucket)

    def count(self, name: str) -> None:
        """Add one to a counter."""
        with self._counting:
            self.counters[name] += 1

    def memory(self, size: int, name: str = "") -> DeviceMemory:
        """Allocate device memory; the runtime has none of size 0, so that is a byte."""
        return DeviceMemory(self.library.allocate(max(size, 1), core=self.core, name=name))

    def _new(self, shape: tuple[int, ...], dtype: str) -> NrtTensor:
        size = NrtTensor.size_of(shape, dtype)
        return NrtTensor(self.memory(size), shape, dtype)

    def _check(self, neff: Neff, aliases: Mapping[int, int], bucket: str) -> None:
        architecture = expected_architecture(self.target, self.version)
        if neff.target != architecture:
            raise load_error(
                bucket,
                f"the NEFF {neff.name!r} is for {neff.target!r}, the device is {architecture!r} "
                f"({self.target.name}); compile with --target {self.target.name}",
            )
        if neff.lnc_size != self.lnc:
            raise load_error(
                bucket,
                f"the NEFF {neff.name!r} is for logical cores of {neff.lnc_size} physical cores, "
                f"the device has {self.lnc}: NEURON_LOGICAL_NC_CONFIG and --lnc must agree",
            )
        major = re.match(r"\d+", neff.compiler_version)
        if major is not None and int(major[0]) != self.major:
            raise load_error(
                bucket,
                f"the NEFF {neff.name!r} was made by neuronx-cc {neff.compiler_version}, and this "
                f"is runtime {self.version}; they fit within one major version",
            )
        for output, source in aliases.items():
            if not (0 <= output < len(neff.outputs) and 0 <= source < len(neff.inputs)):
                raise load_error(bucket, f"there is no output {output} or input {source} to alias")
            updated, given = neff.outputs[output], neff.inputs[source]
            if (updated.dtype, updated.shape) != (given.dtype, given.shape):
                raise load_error(
                    bucket,
                    f"output {updated.name} {updated.dtype}{list(updated.shape)} cannot be in the "
                    f"memory of input {given.name} {given.dtype}{list(given.shape)}",
                )

    def _check_tensors(self, handle: _core.NrtModel, neff: Neff, bucket: str) -> None:
        """Compare the runtime's view of names and sizes; its dtype numbers changed once."""
        told = handle.tensors()
        if told is None:
            return
        expected = {
            (tensor.name, is_output, NrtTensor.size_of(tuple(tensor.shape), tensor.dtype))
            for tensors, is_output in ((neff.inputs, False), (neff.outputs, True))
            for tensor in tensors
        }
        if set(told) != expected:
            difference = sorted(set(told) ^ expected)[:4]
            raise load_error(bucket, f"runtime and NEFF disagree about the tensors {difference}")


class NrtModel(NeffModel["NrtTensor", "NrtBoundModel"]):
    """A NEFF on the device, unloaded when nothing refers to it any more; see `NeffModel`."""

    def __init__(
        self,
        runtime: NrtRuntime,
        handle: _core.NrtModel,
        neff: Neff,
        *,
        aliases: Mapping[int, int],
        bucket: str,
    ) -> None:
        super().__init__(neff, aliases=aliases, bucket=bucket)
        self.runtime = runtime
        self.handle = handle

    def bind(self, fixed: Mapping[int, NrtTensor]) -> NrtBoundModel:
        """Fix the inputs with the given indices, as a rule the weights and the KV caches.

        Raises:
            ExecutionError: an index, a shape or a dtype is not the model's.
        """
        return NrtBoundModel(self, fixed)


class NrtBoundModel:
    """A model on the device with some inputs fixed; see `BoundModel`.

    It has an input and an output set of its own, so one thread executes it at a time.
    """

    def __init__(self, model: NrtModel, fixed: Mapping[int, NrtTensor]) -> None:
        self._model = model
        library = model.runtime.library
        self._lock = threading.Lock()
        self._input_set, self._output_set = library.tensor_set(), library.tensor_set()
        self._fixed = dict(fixed)
        for index, tensor in fixed.items():
            model.check_bindable(index)
            self._check(tensor, index)
            self._input_set.add(model.inputs[index].name, tensor.memory.handle)
        self._open = [index for index in range(len(model.inputs)) if index not in fixed]
        self._sources = {source: output for output, source in model.aliases.items()}
        # Memory of small step arguments and of outputs, used again from step to step.
        self._staged: dict[int, DeviceMemory] = {}
        self._spare: list[list[DeviceMemory]] = [[] for _ in model.outputs]

    def execute(self, arguments: Sequence[NrtTensor | torch.Tensor]) -> list[NrtTensor]:
        """Run one step with the inputs that are not fixed, in order; see `LoadedModel.execute`."""
        model = self._model
        model.check_count(arguments, self._open)
        with self._lock:
            tensors = dict(self._fixed)
            to_update: dict[int, torch.Tensor] = {}
            for index, argument in zip(self._open, arguments, strict=True):
                self._check(argument, index)
                if isinstance(argument, NrtTensor):
                    tensors[index] = argument
                else:
                    tensors[index] = self._put(index, argument)
                    if index in self._sources:
                        to_update[index] = argument
            for index in sorted(self._sources):
                tensors[index].check_live()
            for index in self._open:
                self._input_set.add(model.inputs[index].name, tensors[index].memory.handle)
            outputs = [self._output(index, tensors) for index in range(len(model.outputs))]
            for spec, output in zip(model.outputs, outputs, strict=True):
                self._output_set.add(spec.name, output.memory.handle)
            self._run(tensors)
            for index, argument in to_update.items():
                argument.copy_(tensors[index].read())
            return outputs

    def _run(self, tensors: Mapping[int, NrtTensor]) -> None:
        model = self._model
        try:
            model.handle.execute(self._input_set, self._output_set)
        except ExecutionError as error:
            status = error.details["status"]
            if status == NrtStatus.EXEC_COMPLETED_WITH_NUM_ERR:
                # The program ran to its end; a NaN in padding is ordinary.
                model.runtime.count("executions_with_nan")
                if model.runtime.counters["executions_with_nan"] == 1:
                    logger.warning(
                        "bucket %s: the runtime reports NaN in a result; further reports are "
                        "counted only",
                        model.bucket,
                    )
            else:
                lost = []
                if status not in _NOT_STARTED:
                    for index in self._sources:
                        tensors[index].lose(error.details["reason"])
                        lost.append(model.inputs[index].name)
                text = "the execution failed"
                if lost:
                    text += f" (lost are the contents of {', '.join(lost)})"
                raise _for_bucket(error, model.bucket, text) from error
        model.runtime.count("executions")

    def _put(self, index: int, argument: torch.Tensor) -> NrtTensor:
        """Copy a step argument to the device; an updated one gets memory of its own."""
        spec = self._model.inputs[index]
        values = fit(argument, spec.dtype, what=f"input {index} ({spec.name})")
        size = NrtTensor.size_of(tuple(spec.shape), spec.dtype)
        memory = self._staged.get(index)
        if memory is None or index in self._sources:
            memory = self._model.runtime.memory(size, spec.name)
            if index not in self._sources:
                self._staged[index] = memory
        tensor = NrtTensor(memory, tuple(spec.shape), spec.dtype)
        tensor.write(values)
        return tensor

    def _output(self, index: int, tensors: Mapping[int, NrtTensor]) -> NrtTensor:
        source = self._model.aliases.get(index)
        if source is not None:
            return tensors[source]
        spec = self._model.outputs[index]
        shape, spare = tuple(spec.shape), self._spare[index]
        if spare:
            memory = spare.pop()
        else:
            memory = self._model.runtime.memory(NrtTensor.size_of(shape, spec.dtype), spec.name)
        return NrtTensor(memory, shape, spec.dtype, returned_to=spare)

    def _check(self, tensor: NrtTensor | torch.Tensor, index: int) -> None:
        spec = self._model.inputs[index]
        taken: tuple[str, ...]
        if isinstance(tensor, NrtTensor):
            found, taken, is_reachable = tensor.dtype, (tensor.dtype,), True
        else:
            found = str(tensor.dtype).removeprefix("torch.")
            # 64-bit step arguments become what the compiler computes with.
            taken, is_reachable = (found, *NARROWED.get(found, ())), tensor.is_cpu
        if tuple(tensor.shape) == tuple(spec.shape) and is_reachable and spec.dtype in taken:
            return
        raise self._model.bad_input(
            f"input {index} ({spec.name}): expected {spec.dtype}{list(spec.shape)}, found "
            f"{found}{list(tensor.shape)}"
        )


def _for_bucket(error: ExecutionError, bucket: str, what: str) -> ExecutionError:
    """Return the error of a call with the bucket, and advice for statuses that have some."""
    details: dict[str, Any] = {**error.details, "bucket": bucket}
    advice = _ADVICE.get(details["status"])
    text = f"bucket {bucket}: {what}: {error}"
    return ExecutionError(text if advice is None else f"{text}; {advice}", **details)
