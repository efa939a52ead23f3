"""The NRT status codes that this package reports or acts on."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["NrtStatus"]


class NrtStatus(IntEnum):
    """A subset of NRT_STATUS (nrt/nrt_status.h of the Neuron runtime).

    Errors carry plain numbers, so that one which is not here survives; `_core.nrt_status` knows
    all that are documented.
    """

    FAILURE = 1
    """Non-specific failure."""
    INVALID = 2
    """Invalid NEFF, or its inputs do not have the names, sizes or target expected."""
    INVALID_HANDLE = 3
    """Invalid handle."""
    RESOURCE = 4
    """A resource, as a rule memory, could not be allocated."""
    TIMEOUT = 5
    """The operation timed out."""
    QUEUE_FULL = 7
    """Too many pending executions."""
    LOAD_NOT_ENOUGH_NC = 9
    """Not enough NeuronCores."""
    UNSUPPORTED_NEFF_VERSION = 10
    """The version or a feature of the NEFF is not supported."""
    UNINITIALIZED = 13
    """Called before nrt_init."""
    CLOSED = 14
    """Called after nrt_close."""
    EXEC_UNIT_UNRECOVERABLE = 101
    """The execution unit needs a reset."""
    EXEC_BAD_INPUT = 1002
    """Invalid input to an execution."""
    EXEC_COMPLETED_WITH_NUM_ERR = 1003
    """Completed, and produced NaN."""
    EXEC_NC_BUSY = 1005
    """The core is locked by another model or process."""
