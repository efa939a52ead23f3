"""Device tensors of a Neuron device, and the copies between them and CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm_neuron import _core
from vllm_neuron.errors import ExecutionError
from vllm_neuron.runtime.host_tensor import DTYPES
from vllm_neuron.runtime.status import NrtStatus

__all__ = ["NARROWED", "DeviceMemory", "NrtTensor", "fit"]

NARROWED = {"int64": ("int32",), "uint64": ("uint32",), "bool": ("uint8", "int8")}
"""What a NEFF may declare where the graph has a dtype that the device does not compute with."""


class DeviceMemory:
    """An allocation of the runtime, given back when nothing refers to it any more."""

    __slots__ = ("handle",)

    def __init__(self, handle: _core.NrtTensor) -> None:
        self.handle = handle


class NrtTensor:
    """A dense row-major tensor in device memory.

    Args:
        memory: at least its size.
        shape: the sizes of its dimensions.
        dtype: a torch dtype's name without `torch.`.
        returned_to: where the memory goes when nothing refers to the tensor any more, to be used
            for another one of the same size.
    """

    __slots__ = ("_lost_because", "_returned_to", "dtype", "memory", "nbytes", "shape")

    def __init__(
        self,
        memory: DeviceMemory,
        shape: tuple[int, ...],
        dtype: str,
        *,
        returned_to: list[DeviceMemory] | None = None,
    ) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.nbytes = self.size_of(shape, dtype)
        self._returned_to = returned_to
        self._lost_because: str | None = None

    def __del__(self) -> None:
        if self._returned_to is not None:
            self._returned_to.append(self.memory)

    @staticmethod
    def size_of(shape: tuple[int, ...], dtype: str) -> int:
        """Return the bytes of a tensor.

        Raises:
            ExecutionError: no tensor has this dtype.
        """
        if dtype not in DTYPES:
            raise ExecutionError(
                f"there are no device tensors of dtype {dtype}, only of {', '.join(DTYPES)}",
                bucket=None,
                status=NrtStatus.INVALID,
                reason=f"dtype {dtype}",
            )
        return math.prod(shape) * DTYPES[dtype].itemsize

    def data_ptr(self) -> int:
        """Return the address that the runtime tells, 0 if it tells none."""
        self.check_live()
        return self.memory.handle.address() if self.nbytes else 0

    def read(self) -> torch.Tensor:
        """Return a copy of the contents.

        Raises:
            ExecutionError: the contents were lost in a failed execution, or the read failed.
        """
        self.check_live()
        target = torch.empty(self.shape, dtype=DTYPES[self.dtype])
        if self.nbytes:
            self.memory.handle.read(_bytes(target))
        return target

    def write(self, source: torch.Tensor) -> None:
        """Overwrite the contents with a CPU tensor of the same shape and dtype.

        Raises:
            ExecutionError: shape or dtype differ, the memory was lost, or the write failed.
        """
        self.check_live()
        found = str(source.dtype).removeprefix("torch.")
        if tuple(source.shape) != self.shape or found != self.dtype or not source.is_cpu:
            reason = (
                f"expected {self.dtype}{list(self.shape)}, found {found}{list(source.shape)} on "
                f"{source.device}"
            )
            raise ExecutionError(
                f"the source of a write: {reason}",
                bucket=None,
                status=NrtStatus.EXEC_BAD_INPUT,
                reason=reason,
            )
        if self.nbytes:
            self.memory.handle.write(_bytes(source.resolve_conj().resolve_neg().contiguous()))

    def lose(self, reason: str) -> None:
        """Note that a failed execution may have left anything in the memory."""
        self._lost_because = reason

    def check_live(self) -> None:
        """Raise if a failed execution took the contents."""
        if self._lost_because is not None:
            raise ExecutionError(
                f"the contents of a device tensor {self.dtype}{list(self.shape)} were lost when an "
                f"execution that updates it in place failed: {self._lost_because}; allocate or "
                "upload it again",
                bucket=None,
                status=NrtStatus.FAILURE,
                reason=self._lost_because,
            )

    def __repr__(self) -> str:
        state = "lost" if self._lost_because is not None else "on the device"
        return f"NrtTensor({self.dtype}{list(self.shape)} {state})"


def fit(values: torch.Tensor, dtype: str, *, what: str) -> torch.Tensor:
    """Return CPU values in the dtype that a NEFF declares for them.

    Raises:
        ExecutionError: a 64-bit value does not fit the narrower dtype.
    """
    wanted = DTYPES[dtype]
    if values.dtype is wanted:
        return values
    limits = torch.iinfo(wanted)
    if values.dtype is not torch.bool and values.numel():
        low, high = (int(extreme) for extreme in torch.aminmax(values))
        if low < limits.min or high > limits.max:
            reason = f"{what}: values from {low} to {high} do not fit {dtype}"
            raise ExecutionError(
                reason, bucket=None, status=NrtStatus.EXEC_BAD_INPUT, reason=reason
            )
    return values.to(wanted)


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the memory of a dense row-major CPU tensor as a NumPy array of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
