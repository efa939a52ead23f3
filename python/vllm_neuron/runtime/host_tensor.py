"""Device tensors of the host emulator: memory that XLA:CPU programs read and update in place."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from vllm_neuron.compiler import xla_cpu
from vllm_neuron.errors import ExecutionError
from vllm_neuron.runtime.status import NrtStatus

__all__ = ["DTYPES", "HostTensor", "check_argument", "export_tensor", "import_tensor"]

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
"""The dtypes that a device tensor may have, by name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory the system provides only when it is first written.

    `torch.zeros` writes all of it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


class HostTensor:
    """A dense row-major tensor in the memory of the emulated device.

    Its memory is either XLA's own or, after an upload without a copy, that of a torch tensor. A
    program that updates the tensor in place needs XLA's own: the first such program moves the
    contents there, once.

    Attributes:
        buffer: jaxlib's array, or None after a failed execution took the contents.
        shape: the sizes of its dimensions.
        dtype: a torch dtype's name without `torch.`.
        nbytes: its size in bytes.
    """

    __slots__ = ("_lost_because", "_torch_memory", "_updated", "buffer", "dtype", "nbytes", "shape")

    def __init__(self, buffer: Any, shape: tuple[int, ...], dtype: str) -> None:
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        self._torch_memory: torch.Tensor | None = None
        self._updated = False
        self._lost_because: str | None = None

    @classmethod
    def upload(cls, tensor: torch.Tensor) -> HostTensor:
        """Make a device tensor of a CPU tensor; see `HostRuntime.upload`."""
        source = _plain(tensor)
        buffer = import_tensor(source, copy=None)
        uploaded = cls(buffer, tuple(source.shape), _NAMES[source.dtype])
        if uploaded.nbytes and buffer.unsafe_buffer_pointer() == tensor.data_ptr():
            uploaded._torch_memory = source
        return uploaded

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: str) -> HostTensor:
        """Make a device tensor of zeros in memory of XLA's own."""
        if dtype not in DTYPES:
            raise _unknown_dtype(dtype)
        source = lazy_zeros(tuple(shape), DTYPES[dtype])
        allocated = cls(import_tensor(source, copy=True), tuple(source.shape), dtype)
        allocated._updated = True
        return allocated

    @property
    def shares_torch_memory(self) -> bool:
        """Whether the memory is that of the uploaded torch tensor."""
        return self._torch_memory is not None

    def data_ptr(self) -> int:
        """Return the address of the first element; 0 for a tensor without elements."""
        return self._live_buffer().unsafe_buffer_pointer() if self.nbytes else 0

    def read(self) -> torch.Tensor:
        """Return the contents as a CPU tensor.

        It is a copy for an allocated tensor and for one that a program has updated in place, since
        the next program overwrites those; otherwise it shares the memory: do not write to it.

        Raises:
            ExecutionError: the contents were lost in a failed execution.
        """
        buffer = self._live_buffer()
        if self._torch_memory is not None:
            return self._torch_memory
        return self.memory().clone() if self._updated else export_tensor(buffer)

    def write(self, source: torch.Tensor) -> None:
        """Overwrite the contents.

        A torch tensor that shared its memory keeps its values and shares it no more: its owner may
        want them again, and `source` may be another such tensor's next contents.

        Raises:
            ExecutionError: shape or dtype differ, or the memory was lost in a failed execution.
        """
        self._live_buffer()
        check_argument(source, self.shape, DTYPES[self.dtype], what="the source of a write")
        if source.is_contiguous() and source.data_ptr() == self.data_ptr():
            return  # The memory is shared: whoever wrote to the source has written here.
        if self._torch_memory is not None:
            self.buffer = import_tensor(_plain(source), copy=True)
            self._torch_memory = None
            return
        self.memory().copy_(source)

    def memory(self) -> torch.Tensor:
        """Return the device memory itself as a CPU tensor that does not keep it alive."""
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.data_ptr())
        return torch.frombuffer(memory, dtype=DTYPES[self.dtype]).view(self.shape)

    def replace(self, buffer: Any) -> None:
        """Take the output of a program that updated this tensor in place."""
        self.buffer = buffer
        self._torch_memory = None
        self._updated = True

    def lose(self, reason: str) -> None:
        """Note that a failed execution took the contents."""
        self.buffer = None
        self._torch_memory = None
        self._lost_because = reason

    def _live_buffer(self) -> Any:
        if self.buffer is None:
            raise ExecutionError(
                f"the contents of a device tensor {self.dtype}{list(self.shape)} were lost when an "
                f"execution that updates it in place failed: {self._lost_because}; allocate or "
                "upload it again",
                bucket=None,
                status=NrtStatus.FAILURE,
                reason=self._lost_because,
            )
        return self.buffer

    def __repr__(self) -> str:
        state = "lost" if self.buffer is None else f"at {self.data_ptr():#x}"
        return f"HostTensor({self.dtype}{list(self.shape)} {state})"


def import_tensor(tensor: torch.Tensor, *, copy: bool | None) -> Any:
    """Return a jaxlib array of a dense row-major CPU tensor.

    Args:
        tensor: any dtype of `DTYPES`.
        copy: True for memory of XLA's own; None to share the memory where it is aligned to the 64
            bytes that XLA:CPU code relies on, and to copy otherwise.
    """
    device = xla_cpu.client().device
    buffer = xla_cpu.extension().dlpack_managed_tensor_to_buffer(
        dlpack.to_dlpack(tensor), device, None, copy
    )
    # Memory that is not aligned is copied by another thread, after the call returns.
    return buffer.block_until_ready()


def export_tensor(buffer: Any) -> torch.Tensor:
    """Return a CPU tensor that shares the memory of a jaxlib array and keeps it alive."""
    return dlpack.from_dlpack(xla_cpu.extension().buffer_to_dlpack_managed_tensor(buffer))


def check_argument(
    argument: torch.Tensor | HostTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    what: str,
    bucket: str | None = None,
) -> None:
    """Refuse a tensor of another shape or dtype; XLA itself compares only sizes in bytes.

    Raises:
        ExecutionError: they differ, or the tensor is not in the memory of the CPU.
    """
    found = DTYPES[argument.dtype] if isinstance(argument, HostTensor) else argument.dtype
    if argument.shape == shape and found is dtype:
        if isinstance(argument, HostTensor) or argument.device.type == "cpu":
            return
        where = f" on {argument.device}"
    else:
        where = ""
    expected = f"{_NAMES[dtype]}{list(shape)}"
    described = f"{_NAMES.get(found, found)}{list(argument.shape)}{where}"
    raise ExecutionError(
        f"{f'bucket {bucket}: ' if bucket else ''}{what}: expected {expected}, found {described}",
        bucket=bucket,
        status=NrtStatus.EXEC_BAD_INPUT,
        reason=f"expected {expected}, found {described}",
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a CPU tensor as a dense row-major one, the same memory if it can be."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ExecutionError(
            f"only dense CPU tensors can be uploaded, found {tensor.layout} on {tensor.device}",
            bucket=None,
            status=NrtStatus.INVALID,
            reason=f"{tensor.layout} on {tensor.device}",
        )
    if tensor.dtype not in _NAMES:
        raise _unknown_dtype(str(tensor.dtype))
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _unknown_dtype(dtype: str) -> ExecutionError:
    return ExecutionError(
        f"the host emulator has no tensors of dtype {dtype}, only of {', '.join(DTYPES)}",
        bucket=None,
        status=NrtStatus.INVALID,
        reason=f"dtype {dtype}",
    )
