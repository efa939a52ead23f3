"""The compilation route of one server start: what it is, why, and the lines that say so.

Everything here is a pure function of values that the caller read once; nothing reads the
environment, and nothing imports torch or vllm. The rules are those of the user guide
(docs/how-to-choose-a-route.md).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from vllm_neuron.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_neuron.compiler.arguments import CompilerArguments
    from vllm_neuron.device import Mode
    from vllm_neuron.device_run import DeviceRun
    from vllm_neuron.envs import Settings

__all__ = [
    "BACKEND_VARIABLE",
    "DEFAULT_LEVELS",
    "LevelOrigin",
    "LogLine",
    "Route",
    "RouteRecord",
    "StartRecord",
    "adopt",
    "attach",
    "compiler_lines",
    "current",
    "record_of",
    "resolve",
    "start_lines",
    "start_of",
    "write_lines",
]

logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "VLLM_NEURON_BACKEND"
_CACHING_VARIABLE = "TORCH_CACHING_PRECOMPILE"

LevelOrigin = Literal["default", "cli", "config file", "api"]


class Route(StrEnum):
    """A compilation route; the value is the word that log lines use."""

    NATIVE = "native"
    XLA = "XLA"


# The user guide: vLLM's default O2 is kept on the native route and lowered on the XLA route.
DEFAULT_LEVELS = {Route.NATIVE: 2, Route.XLA: 1}

# The user guide, "Instructions": the recognised values, compared stripped and case-folded.
_ROUTE_OF_VALUE = {
    "neuron_native": Route.NATIVE,
    "neuron": Route.NATIVE,
    "vllm_neuron": Route.XLA,
}
# Exactly the white space that shells, .env files and YAML leave around a value.
_WHITE_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """What one server start decided. Every process of the start works from this record.

    Attributes:
        route: the compilation route.
        reason: why, in the words of the log line.
        raw_value: `VLLM_NEURON_BACKEND` as the user wrote it; None when it is not set.
        is_valid: False when `raw_value` names no route.
        level: the optimization level, 0 to 3.
        level_origin: where the level entered.
        explicit: True when the user gave the level.
        precompile_on: True when the Precompile Cache is used.
        precompile_reason: the directory when it is on, else why it is off.
        precompile_refused: True when `TORCH_CACHING_PRECOMPILE=1` asked for the Precompile Cache
            and the route variable keeps it off.
    """

    route: Route
    reason: str
    raw_value: str | None
    is_valid: bool
    level: int
    level_origin: LevelOrigin
    explicit: bool
    precompile_on: bool
    precompile_reason: str
    precompile_refused: bool


@dataclass(frozen=True, slots=True)
class StartRecord:
    """All that was decided while the engine configuration of one start was built.

    Attributes:
        route: the route, the level and the state of the Precompile Cache.
        settings: the parsed environment variables.
        mode: how steps are executed.
        compiler_arguments: the merged compiler arguments; None in a mode without compiler.
        metrics_directory: where workers leave their metrics; None if nobody asks for them.
        device_run: what was found of the Neuron device; None in the other modes.
    """

    route: RouteRecord
    settings: Settings
    mode: Mode
    compiler_arguments: CompilerArguments | None
    metrics_directory: str | None = None
    device_run: DeviceRun | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line for the server log; `level` is a level of the `logging` module."""

    level: int
    text: str


def resolve(
    raw_value: str | None,
    *,
    explicit_level: int | None,
    level_origin: LevelOrigin,
    cpu_mode: bool,
    torch_caching: bool | None,
    precompile_directory: str,
) -> RouteRecord:
    """Decide the route, the level and the state of the Precompile Cache.

    Args:
        raw_value: `VLLM_NEURON_BACKEND`, or None when it is not set.
        explicit_level: the level that the user gave, or None.
        level_origin: where the level entered; "default" exactly when `explicit_level` is None.
        cpu_mode: `VLLM_NEURON_CPU_MODE`.
        torch_caching: `TORCH_CACHING_PRECOMPILE`, None when it is not set.
        precompile_directory: where the Precompile Cache is, should it be on.

    Raises:
        ValueError: `level_origin` and `explicit_level` contradict each other.
    """
    if (explicit_level is None) != (level_origin == "default"):
        raise ValueError(f"level {explicit_level!r} cannot come from {level_origin!r}")
    value = None if raw_value is None else raw_value.strip(_WHITE_SPACE).casefold()
    named = None if value is None else _ROUTE_OF_VALUE.get(value)
    is_valid = not value or named is not None
    # Why the Precompile Cache stays off, should the variable be the reason.
    reason: str
    unset: str | None
    if value is None:
        unset = reason = f"{BACKEND_VARIABLE} is not set"
    elif not value:
        unset = reason = f"{BACKEND_VARIABLE} is empty"
    elif named is not None:
        reason, unset = f"{BACKEND_VARIABLE}={value}", None
    else:
        reason = f"{BACKEND_VARIABLE}='{raw_value}' is not a valid route"
        unset = f"{BACKEND_VARIABLE} is not a valid route"
    route = named or Route.NATIVE

    off: str | None
    # The first row that matches decides (spec 4.1, PC-1 to PC-6).
    if cpu_mode:
        off = "VLLM_NEURON_CPU_MODE=1"
    elif route is Route.XLA:
        off = "XLA route"
    else:
        off = unset
    refused = off is not None and torch_caching is True
    if off is None and torch_caching is False:
        off = f"{_CACHING_VARIABLE}=0"
    return RouteRecord(
        route=route,
        reason=reason,
        raw_value=raw_value,
        is_valid=is_valid,
        level=DEFAULT_LEVELS[route] if explicit_level is None else explicit_level,
        level_origin=level_origin,
        explicit=explicit_level is not None,
        precompile_on=off is None,
        precompile_reason=precompile_directory if off is None else off,
        precompile_refused=refused,
    )


def start_lines(record: RouteRecord) -> list[LogLine]:
    """The lines that a start writes about its route, level and Precompile Cache, in order."""
    info, warning = logging.INFO, logging.WARNING
    lines = []
    if not record.is_valid:
        # The value as the user wrote it: neither stripped nor escaped.
        lines.append(
            LogLine(
                warning,
                f"{BACKEND_VARIABLE}='{record.raw_value}' is not a valid route. "
                "The native route runs now.",
            )
        )
    lines.append(LogLine(info, f"Neuron compilation route: {record.route} ({record.reason})"))
    if record.explicit:
        lines.append(LogLine(info, f"Explicit --optimization-level: keeping O{record.level}"))
    elif record.route is Route.NATIVE:
        lines.append(
            LogLine(
                info,
                f"Using default optimization level O{record.level} on the Neuron native route",
            )
        )
    else:
        lines.append(
            LogLine(info, f"Defaulting optimization level to O{record.level} on the XLA route")
        )
    if record.route is Route.XLA:
        lines.append(
            LogLine(
                warning,
                f"The XLA route ({BACKEND_VARIABLE}=vllm_neuron) is deprecated and a future "
                f"release removes it. Unset {BACKEND_VARIABLE} or set it to neuron_native for "
                "the native route.",
            )
        )
    state = "on" if record.precompile_on else "off"
    lines.append(LogLine(info, f"Precompile Cache: {state} ({record.precompile_reason})"))
    if record.precompile_refused:
        lines.append(
            LogLine(
                warning,
                f"{_CACHING_VARIABLE}=1 does not turn the Precompile Cache on: the route variable "
                f"decides, and the cache is off ({record.precompile_reason}). Set "
                f"{BACKEND_VARIABLE}=neuron_native to use it.",
            )
        )
    return lines


def compiler_lines(arguments: CompilerArguments) -> list[LogLine]:
    """The lines that a start writes about its compiler arguments, in order."""
    lines = [LogLine(logging.WARNING, text) for text in arguments.warnings]
    lines += [LogLine(logging.INFO, text) for text in arguments.notices]
    return [*lines, LogLine(logging.INFO, arguments.describe())]


def write_lines(lines: Iterable[LogLine]) -> None:
    """Write `lines` to the server log, each as it stands."""
    for line in lines:
        # Without arguments, so that a % in a user's value is not taken for a format.
        logger.log(line.level, line.text)


# --- the record on its way to the other processes ----------------------------------------------

# The record travels on `VllmConfig.device_config`. Not on VllmConfig itself: vLLM copies that
# with `vllm.config.utils.replace`, which refuses attributes that are not fields. Not in
# `additional_config`: that enters `VllmConfig.compute_hash`.
_CARRIER = "neuron_start"

_current: StartRecord | None = None


def attach(vllm_config: Any, start: StartRecord) -> None:
    """Make `start` travel with `vllm_config` (a `vllm.config.VllmConfig`) to every process."""
    global _current
    setattr(vllm_config.device_config, _CARRIER, start)
    _current = start


def start_of(vllm_config: Any) -> StartRecord:
    """The start that `vllm_config` belongs to.

    Raises:
        ConfigurationError: the configuration was not built by `EngineArgs.create_engine_config`,
            so no start decided a route for it.
    """
    start = getattr(vllm_config.device_config, _CARRIER, None)
    if start is None:
        raise ConfigurationError(
            "This engine configuration carries no Neuron route record, so the process does not "
            "know on which route its server runs, and reading the environment again could give "
            "another one. Build the configuration with EngineArgs.create_engine_config (vllm "
            "serve and LLM do) instead of constructing VllmConfig.",
            name=BACKEND_VARIABLE,
            value=None,
        )
    return start


def record_of(vllm_config: Any) -> RouteRecord:
    """The route record that travels with `vllm_config`.

    Raises:
        ConfigurationError: there is none (see `start_of`).
    """
    return start_of(vllm_config).route


def adopt(vllm_config: Any) -> StartRecord:
    """Take over the start of `vllm_config` as this process's; what a worker does first.

    Raises:
        ConfigurationError: there is none (see `start_of`).
    """
    global _current
    _current = start_of(vllm_config)
    return _current


def current() -> StartRecord | None:
    """The start that this process works for (its latest one), or None before any."""
    return _current
