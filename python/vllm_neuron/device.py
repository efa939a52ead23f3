"""Which machine runs the NEFFs: the Neuron device, the host emulator, or plain CPU.

Imports neither torch nor vllm: vLLM asks while it is itself half imported.
"""

from __future__ import annotations

import os
import re
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_neuron.compiler.arguments import HOST_TARGET
from vllm_neuron.envs import FALSE_WORDS
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.target import TARGET_VARIABLE, TARGETS, target_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_neuron.envs import Settings

__all__ = [
    "Mode",
    "compile_target",
    "device_directory",
    "is_asked_for",
    "is_selected",
    "neuron_devices",
    "platform_class_name",
    "resolve_mode",
]

PLATFORM_CLASS = "vllm_neuron.vllm.platform.NeuronPlatform"
DEVICE_VARIABLE = "VLLM_NEURON_DEVICE"
CPU_MODE_VARIABLE = "VLLM_NEURON_CPU_MODE"
CPU_COMPILE_VARIABLE = "VLLM_NEURON_CPU_COMPILE"
SELECTING_VARIABLES = (DEVICE_VARIABLE, CPU_MODE_VARIABLE, CPU_COMPILE_VARIABLE)

DIRECTORY_VARIABLE = "VLLM_NEURON_DEVICE_DIRECTORY"

_DEVICE_DIRECTORY = Path("/dev")
# The Neuron driver makes one node per device: /dev/neuron0, /dev/neuron1, ...
_DEVICE_NODE = re.compile(r"neuron\d+")


class Mode(StrEnum):
    """How the steps of the model are executed."""

    DEVICE = "Neuron device"
    HOST = "host emulator"
    CPU = "CPU mode"
    COMPILE = "CPU compile"


def device_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the device nodes are: `VLLM_NEURON_DEVICE_DIRECTORY`, or /dev."""
    text = environ.get(DIRECTORY_VARIABLE, "").strip()
    return Path(text) if text else _DEVICE_DIRECTORY


def neuron_devices(directory: Path | None = None) -> list[str]:
    """Paths of the Neuron device nodes in `directory` (`device_directory()`), sorted."""
    directory = directory or device_directory()
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        # No readable /dev: as good as no device.
        return []
    return sorted(str(directory / name) for name in names if _DEVICE_NODE.fullmatch(name))


def is_selected(environ: Mapping[str, str] = os.environ, *, directory: Path | None = None) -> bool:
    """Whether the plugin takes part in this process.

    A device asks for it, and so does any setting that names a device or a CPU mode. A setting
    with an impossible value does too: vLLM swallows what is raised while plugins register, so the
    error must come later, from the configuration check of the platform.
    """
    return is_asked_for(environ) or bool(neuron_devices(directory or device_directory(environ)))


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a setting asks for the plugin, on a machine with or without a device."""
    if environ.get(DEVICE_VARIABLE, "").strip() not in ("", "auto"):
        return True
    modes = (environ.get(name, "") for name in (CPU_MODE_VARIABLE, CPU_COMPILE_VARIABLE))
    return any(value.strip().lower() not in {"", *FALSE_WORDS} for value in modes)


def platform_class_name(
    environ: Mapping[str, str] = os.environ, *, directory: Path | None = None
) -> str | None:
    """The qualified name of the platform class, or None (with a UserWarning) to decline."""
    if is_selected(environ, directory=directory):
        return PLATFORM_CLASS
    warnings.warn(
        "No Neuron devices found. Skipping vLLM Neuron plugin registration.",
        UserWarning,
        stacklevel=2,
    )
    return None


def compile_target(settings: Settings) -> str:
    """What a start compiles for without a device: the host emulator, or the target that is set.

    Raises:
        ConfigurationError: no target is set, or one that does not exist.
    """
    if settings[DEVICE_VARIABLE] == "host":
        return HOST_TARGET
    name = settings[TARGET_VARIABLE]
    if name is None:
        raise ConfigurationError(
            f"{CPU_COMPILE_VARIABLE}=1 needs a target to compile for: set {TARGET_VARIABLE} to one "
            f"of {', '.join(TARGETS)}, or {DEVICE_VARIABLE}=host for the host emulator.",
            name=CPU_COMPILE_VARIABLE,
            value="1",
        )
    return target_named(name).name


def resolve_mode(settings: Settings, devices: Sequence[str]) -> Mode:
    """Decide how the steps are executed.

    Args:
        settings: the settings of this start.
        devices: paths of the Neuron device nodes of this machine.

    Raises:
        RuntimeError: CPU mode and CPU compile are both asked for.
        ConfigurationError: the settings contradict each other or the machine, or ask for what
            this version does not have.
    """
    device, cpu_mode = settings[DEVICE_VARIABLE], settings[CPU_MODE_VARIABLE]
    if cpu_mode and settings[CPU_COMPILE_VARIABLE]:
        raise RuntimeError(
            f"{CPU_MODE_VARIABLE} and {CPU_COMPILE_VARIABLE} are not compatible with each other"
        )
    if cpu_mode and device != "auto":
        raise ConfigurationError(
            f"{DEVICE_VARIABLE}={device} and {CPU_MODE_VARIABLE}=1 contradict each other: CPU mode "
            f"runs without NEFFs, on no device. Unset one of them.",
            name=DEVICE_VARIABLE,
            value=device,
        )
    if settings[CPU_COMPILE_VARIABLE]:
        compile_target(settings)
        return Mode.COMPILE
    if cpu_mode:
        return Mode.CPU
    if device == "host":
        return Mode.HOST
    if not devices:
        raise ConfigurationError(
            f"{DEVICE_VARIABLE}={device} needs a Neuron device, and there is none on this machine "
            f"(looked for {device_directory()}/neuron0, ...). Set {DEVICE_VARIABLE}=host to run on "
            f"the host emulator, or {CPU_MODE_VARIABLE}=1 to run eagerly on the CPU.",
            name=DEVICE_VARIABLE,
            value=device,
        )
    return Mode.DEVICE
