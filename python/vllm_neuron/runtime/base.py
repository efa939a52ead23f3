"""The interface of the runtimes: device tensors, loaded NEFFs, execution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from vllm_neuron.errors import ExecutionError
from vllm_neuron.runtime.status import NrtStatus

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from vllm_neuron._core import Neff, NeffTensor

__all__ = ["BoundModel", "DeviceTensor", "LoadedModel", "NeffModel", "Runtime", "load_error"]


class DeviceTensor(Protocol):
    """A dense row-major tensor in the memory of the device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        ...

    @property
    def dtype(self) -> str:
        """A torch dtype's name without `torch.`, e.g. `bfloat16`."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        ...

    def data_ptr(self) -> int:
        """Return the address of the first element in device memory; 0 if there is none."""
        ...

    def read(self) -> torch.Tensor:
        """Return the contents as a CPU tensor, without a copy where the runtime can.

        The result may share memory with the device tensor: do not write to it.

        Raises:
            ExecutionError: the contents were lost in a failed execution.
        """
        ...

    def write(self, source: torch.Tensor) -> None:
        """Overwrite the contents with a CPU tensor of the same shape and dtype.

        Raises:
            ExecutionError: shape or dtype differ, or the memory was lost in a failed execution.
        """
        ...


class BoundModel(Protocol):
    """A loaded model with some inputs fixed, so that a step passes only the others."""

    def execute(self, arguments: Sequence[Any]) -> Sequence[DeviceTensor]:
        """Run one step with the inputs that are not fixed, in input order.

        Takes, returns and raises as `LoadedModel.execute`.
        """
        ...


class LoadedModel(Protocol):
    """A NEFF that is ready to run."""

    @property
    def inputs(self) -> Sequence[NeffTensor]:
        """Name, dtype and shape of each input, in order."""
        ...

    @property
    def outputs(self) -> Sequence[NeffTensor]:
        """Name, dtype and shape of each output, in order."""
        ...

    def bind(self, fixed: Mapping[int, Any]) -> BoundModel:
        """Fix the inputs with the given indices, as a rule the weights and the KV caches.

        Args:
            fixed: device tensors of this model's own runtime, by index of the input.

        Raises:
            ExecutionError: an index, a shape or a dtype is not the model's.
        """
        ...

    def execute(self, inputs: Sequence[Any]) -> Sequence[DeviceTensor]:
        """Run the model once.

        Args:
            inputs: all inputs, in order, as device tensors of this model's own runtime. CPU
                tensors are taken too, for small step arguments; the
                caller may overwrite them as soon as this returns.

        Returns:
            All outputs, in order. An output that is aliased to an input is the very device tensor
            given for that input, updated in place; the others are new device tensors. When the
            input is a CPU tensor, it is updated and the output is a new device tensor.

        Raises:
            ExecutionError: an input does not fit, or the execution failed. Device tensors that
                were to be updated in place may have lost their contents: using them raises too.
        """
        ...


_Tensor = TypeVar("_Tensor")
_Bound = TypeVar("_Bound", bound=BoundModel)


class NeffModel(ABC, Generic[_Tensor, _Bound]):
    """What every runtime's loaded model has; a `LoadedModel`.

    Attributes:
        inputs: name, dtype and shape of each input, in order, as the NEFF says.
        outputs: name, dtype and shape of each output, in order.
        aliases: output index to the index of the input that is updated in place.
        bucket: the name of the bucket.
    """

    def __init__(self, neff: Neff, *, aliases: Mapping[int, int], bucket: str) -> None:
        self.inputs: tuple[NeffTensor, ...] = tuple(neff.inputs)
        self.outputs: tuple[NeffTensor, ...] = tuple(neff.outputs)
        self.aliases = dict(aliases)
        self.bucket = bucket
        self._unbound: _Bound | None = None

    @abstractmethod
    def bind(self, fixed: Mapping[int, _Tensor]) -> _Bound:
        """Fix the inputs with the given indices; see `LoadedModel.bind`."""

    def execute(self, inputs: Sequence[_Tensor | torch.Tensor]) -> Sequence[_Tensor]:
        """Run the model once with all inputs given; see `LoadedModel.execute`."""
        if self._unbound is None:
            self._unbound = self.bind({})
        return cast(Sequence[_Tensor], self._unbound.execute(inputs))

    def check_bindable(self, index: int) -> None:
        """Raise ExecutionError unless the model has an input of this index."""
        if not 0 <= index < len(self.inputs):
            raise self.bad_input(
                f"input {index} cannot be bound, the model has {len(self.inputs)} inputs"
            )

    def check_count(self, arguments: Sequence[object], open_inputs: Sequence[int]) -> None:
        """Raise ExecutionError unless there is one argument for each input that is not fixed."""
        if len(arguments) != len(open_inputs):
            names = ", ".join(self.inputs[index].name for index in open_inputs)
            raise self.bad_input(
                f"{len(arguments)} inputs given, expected {len(open_inputs)}: {names}"
            )

    def bad_input(self, reason: str) -> ExecutionError:
        """Return the error for inputs that do not fit the model."""
        return ExecutionError(
            f"bucket {self.bucket}: {reason}",
            bucket=self.bucket,
            status=NrtStatus.EXEC_BAD_INPUT,
            reason=reason,
        )


def load_error(bucket: str, reason: str) -> ExecutionError:
    """Return the error for a NEFF that the runtime does not take."""
    return ExecutionError(
        f"bucket {bucket}: cannot load: {reason}",
        bucket=bucket,
        status=NrtStatus.INVALID,
        reason=reason,
    )


class Runtime(Protocol):
    """What keeps tensors on a device and runs NEFFs there.

    Attributes:
        name: the runtime for a person, e.g. `host`.
    """

    name: str

    def upload(self, tensor: torch.Tensor) -> DeviceTensor:
        """Make a device tensor of a CPU tensor, e.g. a weight.

        The runtime may share the memory instead of copying it: afterwards the caller must not
        write to `tensor`.
        """
        ...

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceTensor:
        """Make a device tensor of zeros, e.g. a KV cache."""
        ...

    def load(
        self,
        neff: Buffer,
        *,
        aliases: Mapping[int, int],
        bucket: str,
        is_verified: bool = False,
        index: Buffer | None = None,
    ) -> LoadedModel:
        """Validate a NEFF and make it ready to run.

        Args:
            neff: the file's bytes; a view of mapped pages is not copied as a whole.
            aliases: output index to the index of the input that is updated in place.
            bucket: the name of the bucket, for messages.
            is_verified: the caller has compared the bytes with a checksum, so the NEFF's own digest
                need not be computed.
            index: what `_core.Neff.index` gave for these bytes, so that the archive is not read.

        Raises:
            NeffError: the bytes are not a sound NEFF.
            ExecutionError: it is for another device, or the device refuses it.
        """
        ...
