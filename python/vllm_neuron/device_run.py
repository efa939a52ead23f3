"""A run on Neuron devices: which device it is, and what its runtime and compiler are told."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_neuron.errors import ConfigurationError, ExecutionError
from vllm_neuron.target import STAND_IN, TARGET_VARIABLE, TARGETS, Target, target_named

if TYPE_CHECKING:
    from vllm_neuron.compiler.arguments import CompilerArguments
    from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler
    from vllm_neuron.runtime.nrt import NrtRuntime

__all__ = ["DeviceRun", "check_arguments", "compiler_for", "resolve_device_run"]

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
DEVICES_VARIABLE = "NEURON_VISIBLE_DEVICES"
CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
LIBRARY_VARIABLE = "VLLM_NEURON_LIBNRT"

# On EC2 the product name of the machine is the instance type, e.g. trn2.48xlarge.
_PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
# Instance families of nrt_get_instance_info, by number (the runtime's public headers).
_FAMILIES = {
    **{2: "trn1", 3: "trn1n", 4: "inf2", 7: "inf2"},
    **dict.fromkeys((5, 6, 8, 9, 10, 11, 12, 13), "trn2"),
    **dict.fromkeys((14, 15), "trn3"),
}
# What the runtime is told where the user has not said otherwise (spec 8.2).
_RUNTIME_DEFAULTS = {
    "NEURON_RT_MAP_HBM": "1",
    "NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS": "32",
    "NEURON_RT_IO_RING_CACHE_SIZE": "32",
    "NEURON_RT_DISABLE_EXECUTION_BARRIER": "1",
    "NEURON_RT_ROOT_COMM_ID": "localhost:62182",
}


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """What was found and decided when the server started.

    Attributes:
        target: name of the compiler's target.
        lnc: physical cores of a logical one.
        cores: the logical cores that ranks are pinned to, by local rank; empty: rank r to core r.
        library: path of libnrt, or None for the usual places.
        runtime_version: version text of the runtime.
        compiler_version: version of neuronx-cc.
        input_format: what neuronx-cc is given of StableHLO.
        stall_s: seconds of standstill after which a compiler is killed.
    """

    target: str
    lnc: int
    cores: tuple[int, ...]
    library: str | None
    runtime_version: str
    compiler_version: str
    input_format: Any
    stall_s: float

    @property
    def memory(self) -> int:
        """Bytes of device memory per rank, a constant of the target."""
        return self._target().memory(self.lnc)

    @property
    def is_stand_in(self) -> bool:
        """Whether compiler or runtime say that they only stand in for the real ones."""
        return STAND_IN in self.runtime_version or STAND_IN in self.compiler_version

    def describe(self) -> str:
        """Return the INFO line of a start."""
        return (
            f"Neuron device: {self.target} ({self._target().architecture}), logical cores of "
            f"{self.lnc} with {self.memory >> 30} GiB, runtime {self.runtime_version}, neuronx-cc "
            f"{self.compiler_version}"
        )

    def compiler(self) -> NeuronxCompiler:
        """Return the compiler for this run."""
        from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler

        return NeuronxCompiler(
            target=self.target, input_format=self.input_format, stall_s=self.stall_s
        )

    def runtime(self, local_rank: int) -> NrtRuntime:
        """Initialise the runtime of this process on the logical core of a rank.

        Raises:
            RuntimeError: the cores were pinned by hand.
            ConfigurationError: there is no core for the rank.
            ExecutionError: the runtime does not start.
        """
        from vllm_neuron.runtime.nrt import NrtRuntime

        with _runtime_environment(self, self._core_of(local_rank)):
            return NrtRuntime(
                target=self._target(),
                lnc=self.lnc,
                library=None if self.library is None else Path(self.library),
            )

    def _core_of(self, local_rank: int) -> int:
        if not self.cores:
            return local_rank
        if local_rank >= len(self.cores):
            raise ConfigurationError(
                f"{DEVICES_VARIABLE} has {len(self.cores)} devices, and local rank {local_rank} "
                "needs one more: lower --tensor-parallel-size or list more",
                name=DEVICES_VARIABLE,
                value=list(self.cores),
            )
        return self.cores[local_rank]

    def _target(self) -> Target:
        return TARGETS[self.target]


def resolve_device_run(
    settings: Mapping[str, Any],
    *,
    environ: Mapping[str, str] = os.environ,
    product: Path = _PRODUCT,
) -> DeviceRun:
    """Find device, runtime and compiler, and decide how they are used. Takes no core.

    Raises:
        RuntimeError: the user pins cores by hand.
        ConfigurationError: no runtime, no compiler, an unknown target or one that is not the
            device's, or a logical core size that the target does not have.
    """
    from vllm_neuron._core import NrtLibrary
    from vllm_neuron.compiler.neuronx_cc import find_neuronx_cc

    _check_cores_variable(environ)
    library = settings[LIBRARY_VARIABLE]
    try:
        runtime = NrtLibrary.open(None if library is None else str(library))
        _, version = runtime.version()
        instance = runtime.instance()
    except ExecutionError as error:
        raise ConfigurationError(
            f"{error}. Install the Neuron runtime, or name its library with {LIBRARY_VARIABLE}.",
            name=LIBRARY_VARIABLE,
            value=None if library is None else str(library),
        ) from error
    detected = _target_of_product(product) or (instance and _FAMILIES.get(instance[0]))
    target = _target(settings[TARGET_VARIABLE], detected)
    compiler = find_neuronx_cc()
    return DeviceRun(
        target=target.name,
        lnc=_lnc(target, environ.get(LNC_VARIABLE, "").strip()),
        cores=_listed(settings[DEVICES_VARIABLE]),
        library=None if library is None else str(library),
        runtime_version=version,
        compiler_version=compiler.version,
        input_format=_chosen_input(settings) or compiler.input_format,
        stall_s=float(settings["VLLM_NEURON_CC_STALL_TIMEOUT"]),
    )


def compiler_for(target: str, settings: Mapping[str, Any]) -> NeuronxCompiler:
    """Return the compiler that a run on `target` with these settings would have, without a device.

    Raises:
        ConfigurationError: there is no neuronx-cc.
    """
    from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler

    return NeuronxCompiler(
        target=target,
        input_format=_chosen_input(settings),
        stall_s=float(settings["VLLM_NEURON_CC_STALL_TIMEOUT"]),
    )


def _chosen_input(settings: Mapping[str, Any]) -> Any:
    """What neuronx-cc is given of StableHLO, or None to go by its version."""
    chosen = settings["VLLM_NEURON_CC_INPUT"]
    return None if chosen == "auto" else chosen


def check_arguments(run: DeviceRun, arguments: CompilerArguments) -> None:
    """Refuse a NEURON_CC_FLAGS that compiles for another device than this one.

    Raises:
        ConfigurationError: another target or logical core size.
    """
    from vllm_neuron.compiler.arguments import option_values

    options = option_values(arguments.arguments)
    for option, expected in (("--target", run.target), ("--logical-nc-config", str(run.lnc))):
        if options[option] != expected:
            raise ConfigurationError(
                f"NEURON_CC_FLAGS asks for {option} {options[option]}, and the device has "
                f"{expected}: a NEFF for another one does not load. Take it out.",
                name="NEURON_CC_FLAGS",
                value=options[option],
            )


def _target_of_product(product: Path) -> str | None:
    try:
        family = product.read_text().strip().partition(".")[0]
    except OSError:
        # No DMI: not an EC2 instance, or a container that hides it.
        return None
    # Sizes and variants of a family share its target: trn2u, trn2n, ...
    return next((name for name in sorted(TARGETS, reverse=True) if family.startswith(name)), None)


def _target(override: str | None, detected: str | None) -> Target:
    if override is None and detected is None:
        raise ConfigurationError(
            "neither the machine nor its Neuron runtime tells what device it has. Set "
            f"{TARGET_VARIABLE} to one of {', '.join(TARGETS)}.",
            name=TARGET_VARIABLE,
            value=None,
        )
    target = target_named(override or detected or "")
    if detected is not None and target.architecture != TARGETS[detected].architecture:
        raise ConfigurationError(
            f"{TARGET_VARIABLE}={override}, and the device is {detected}: a NEFF for another "
            "device does not load. Unset it.",
            name=TARGET_VARIABLE,
            value=override,
        )
    return target


def _lnc(target: Target, text: str) -> int:
    lnc = int(text) if text else target.lnc_sizes[0]
    if lnc not in target.lnc_sizes:
        raise ConfigurationError(
            f"{LNC_VARIABLE}={text}: target {target.name} has logical cores of "
            f"{' or '.join(map(str, sorted(target.lnc_sizes)))} physical cores",
            name=LNC_VARIABLE,
            value=text,
        )
    return lnc


def _listed(text: str | None) -> tuple[int, ...]:
    """Parse a list of logical cores such as `0-3` or `0,2,5`."""
    if text is None:
        return ()
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        last = int(match[2] or match[1]) if match else -1
        if match is None or last < int(match[1]):
            raise ConfigurationError(
                f"{DEVICES_VARIABLE}={text!r} is not a list of numbers such as 0-3 or 0,2",
                name=DEVICES_VARIABLE,
                value=text,
            )
        cores.extend(range(int(match[1]), last + 1))
    return tuple(cores)


def _check_cores_variable(environ: Mapping[str, str]) -> None:
    if value := environ.get(CORES_VARIABLE, "").strip():
        raise RuntimeError(
            f"{CORES_VARIABLE}={value} is set by hand, and every worker sets it for its own core. "
            f"Unset it; {DEVICES_VARIABLE} says which logical cores the ranks take."
        )


@contextlib.contextmanager
def _runtime_environment(run: DeviceRun, core: int) -> Iterator[None]:
    """Say to the runtime what it reads when it is initialised, and pin this process to a core."""
    _check_cores_variable(os.environ)
    for name, value in {**_RUNTIME_DEFAULTS, LNC_VARIABLE: str(run.lnc)}.items():
        if not os.environ.get(name, "").strip():
            os.environ[name] = value
    os.environ[CORES_VARIABLE] = str(core)
    try:
        yield
    finally:
        # It is this worker's own, not for the processes that it starts.
        del os.environ[CORES_VARIABLE]
