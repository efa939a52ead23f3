"""Every exception that vllm-neuron raises on purpose.

A message says what, where, expected, found and what to do. The parts are also attributes, so that
a caller need not read the message, and every class survives pickling (vLLM sends exceptions
between processes).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CacheMissError",
    "CaptureError",
    "CompileError",
    "ConfigurationError",
    "ExecutionError",
    "GraphFormatError",
    "GraphKeyError",
    "LoweringError",
    "NeffChecksumError",
    "NeffError",
    "NeffFormatError",
    "NeffUnsupportedError",
    "NeuronError",
    "StoreError",
    "StoreCorruptError",
    "StoreReadOnlyError",
    "StoreUntrustedError",
]


def _rebuild(cls: type[NeuronError], message: str, details: dict[str, Any]) -> NeuronError:
    return cls(message, **details)


class NeuronError(Exception):
    """Root of the exceptions of vllm-neuron.

    Args:
        message: the whole text for a person.
        details: the parts of the message by name; each becomes an attribute.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        for name, value in details.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.details))


class ConfigurationError(NeuronError, ValueError):
    """A variable or option has a value that cannot be served. Attributes: `name`, `value`."""


class CaptureError(NeuronError, ValueError):
    """A step function is not one static graph. Attributes: `bucket`, `reason`, `source`.

    `source` is `file:line` of the model, or None.
    """


class GraphKeyError(NeuronError):
    """A graph has no key, so it is not cached. Attributes: `node`, `type_name`, `reason`.

    `node` is the name of the FX node, `type_name` the type of what cannot be keyed.
    """


class GraphFormatError(NeuronError):
    """Bytes are not a canonical graph that can be built. Attributes: `offset`, `expected`, `found`.

    `offset` counts bytes from the start of the graph bytes.
    """


class CacheMissError(NeuronError, RuntimeError):
    """Graphs are in no cache and compiling is forbidden. Attribute: `missing`.

    `missing` is a list of `[bucket, key]`.
    """


class LoweringError(NeuronError):
    """A graph could not be lowered. Attributes: `bucket`, `op`, `reason`, `source`.

    `op` is the ATen operator (`aten.topk.default`), or None when the lowering could not tell;
    `source` is `file:line` of the model, or None.
    """


class CompileError(NeuronError):
    """A compiler failed. Attributes: `bucket`, `command`, `exit_code`, `log_path`, `reason`."""


class ExecutionError(NeuronError):
    """A NEFF did not load or run. Attributes: `bucket`, `status` (an NRT status), `reason`."""


class NeffError(NeuronError):
    """Bytes are not a NEFF that can be used. Attributes: `path`, `offset`, `expected`, `found`.

    `offset` counts bytes from the start of the file; `path` is None for bytes without a file;
    `status` is the NRT status that the host runtime reports (neff.md 1.8).
    """


class NeffFormatError(NeffError):
    """The container breaks a rule of the format (status 2)."""


class NeffChecksumError(NeffError):
    """The digest in the header is not the digest of the payload (status 2)."""


class NeffUnsupportedError(NeffError):
    """A version or a feature that this reader does not know (status 10)."""


class StoreError(NeuronError):
    """A cache directory cannot be used as asked. Attribute: `path`."""


class StoreCorruptError(StoreError):
    """An entry fails its checks. Attributes: `path`, `offset`, `expected`, `found`."""


class StoreReadOnlyError(StoreError):
    """The directory takes no writes. Attributes: `path`, `errno`."""


class StoreUntrustedError(StoreError):
    """Another user could have written the file or directory. Attributes: `path`, `reason`."""
