"""The NRT status codes that the runtimes of this package report."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["NrtStatus"]


class NrtStatus(IntEnum):
    """A subset of NRT_STATUS (nrt/nrt_status.h of the Neuron runtime)."""

    FAILURE = 1
    """Non-specific failure."""
    INVALID = 2
    """Invalid NEFF, or its inputs do not have the names, sizes or target expected."""
    RESOURCE = 4
    """A resource, as a rule memory, could not be allocated."""
    EXEC_BAD_INPUT = 1002
    """Invalid input to an execution."""
