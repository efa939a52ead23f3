"""The compiler targets that Neuron devices have: architecture, logical cores, memory.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_neuron.errors import ConfigurationError

__all__ = [
    "STAND_IN",
    "TARGETS",
    "TARGET_VARIABLE",
    "Target",
    "expected_architecture",
    "target_named",
]

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"

STAND_IN = "stand-in"
"""What a compiler or a runtime that only stands in for the real one has in its version text, and
what precedes the architecture in the NEFFs of such a compiler, so that no device takes them."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """One value of neuronx-cc's `--target`.

    Attributes:
        name: the value.
        architecture: `target` in the kelf of its NEFFs (docs/neff-format.md, evidence E).
        lnc_sizes: the logical core sizes that it has; the first is neuronx-cc's default.
        core_memory: bytes of device memory per physical core (AWS's instance pages: 32 GiB and 2
            cores a chip on trn1 and inf2, 96 GiB and 8 cores on trn2, 144 GiB and 8 cores on trn3).
        native_int64: whether `--native-int64 enabled` exists for it (trn2 and later).
    """

    name: str
    architecture: str
    lnc_sizes: tuple[int, ...]
    core_memory: int
    native_int64: bool

    def memory(self, lnc: int) -> int:
        """Return the bytes of device memory of one logical core."""
        return self.core_memory * lnc


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("inf2", "sunda", (1,), 16 * _GIB, native_int64=False),
        Target("trn1", "sunda", (1,), 16 * _GIB, native_int64=False),
        Target("trn1n", "sunda", (1,), 16 * _GIB, native_int64=False),
        Target("trn2", "cayman", (2, 1), 12 * _GIB, native_int64=True),
        Target("trn3", "mariana", (2, 1), 18 * _GIB, native_int64=True),
    )
}
"""The documented targets, and trn3, which neuronx-cc 2.24 accepts."""


def target_named(name: str, *, variable: str = TARGET_VARIABLE) -> Target:
    """Return a target by its name.

    Raises:
        ConfigurationError: there is none. Attributes `name` (the variable) and `value`.
    """
    target = TARGETS.get(name)
    if target is None:
        raise ConfigurationError(
            f"{variable}={name!r} is not a target of neuronx-cc; known are {', '.join(TARGETS)}",
            name=variable,
            value=name,
        )
    return target


def expected_architecture(target: Target, tool_version: str) -> str:
    """Return the architecture that a NEFF must name.

    Args:
        target: what the compiler was asked for, or what the device is.
        tool_version: version text of the compiler that makes the NEFF, or of the runtime that
            loads it; a stand-in says so there.
    """
    if STAND_IN in tool_version:
        return f"{STAND_IN}-{target.architecture}"
    return target.architecture
