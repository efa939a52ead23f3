"""The optimization level of a start: whether the user gave it, where, and what follows.

vLLM turns every way of giving `--optimization-level` into one enum member, so that the
configuration cannot tell an explicit 2 from the default 2. The difference is recorded where the
value enters:

* the default of `EngineArgs.optimization_level` becomes a value of its own that equals O2
  (`_default_level`), and the argument parser gives that too when it read no level; whatever else
  arrives was given by somebody;
* the argument parser marks the text that it took from the command line or from a `--config` file
  (`GivenLevel`); a value without mark came through the Python API.

`EngineArgs.create_engine_config` is then the one place where each start passes.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

from vllm_neuron import device, envs, route
from vllm_neuron.compiler.arguments import compiler_arguments
from vllm_neuron.device_run import check_arguments, resolve_device_run
from vllm_neuron.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec

    from vllm.config.vllm import OptimizationLevel, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_neuron.route import LevelOrigin, StartRecord

__all__ = [
    "GivenLevel",
    "StartInProgress",
    "install_level_origin",
    "mark_default",
    "starting",
]

_DEFINING_MODULE = "vllm.config.vllm"
_OPTION = "--optimization-level"
_FIELD = "optimization_level"


class GivenLevel(str):
    """The text of a level that the argument parser read; `origin` says where."""

    origin: LevelOrigin

    def __new__(cls, text: str, origin: LevelOrigin) -> GivenLevel:
        """Mark `text`."""
        level = super().__new__(cls, text)
        level.origin = origin
        return level

    def __str__(self) -> str:
        # argparse passes the text through `str`, the declared type of the option.
        return self

    def __getnewargs__(self) -> tuple[str, LevelOrigin]:  # type: ignore[override]
        return str.__str__(self), self.origin


# --- the default as a value of its own -----------------------------------------------------------

_default_level: OptimizationLevel | None = None


def _default_level_of_process() -> OptimizationLevel:
    """The marked default level; also what it unpickles to."""
    global _default_level
    if _default_level is None:
        from vllm.config.vllm import OptimizationLevel, VllmConfig

        ordinary = VllmConfig.optimization_level
        # A second object of the enum class with the value and name of the first: equal, of equal
        # hash, and not identical.
        marked = int.__new__(OptimizationLevel, ordinary.value)
        marked._name_, marked._value_ = ordinary.name, ordinary.value
        marked.__reduce_ex__ = lambda protocol: (_default_level_of_process, ())  # type: ignore[method-assign,assignment]
        _default_level = marked
        VllmConfig.optimization_level = marked
    return _default_level


class _MarkAfterImport(MetaPathFinder):
    """Marks the default as soon as the module that defines it has run.

    `EngineArgs` copies `VllmConfig.optimization_level` when its class body runs, and no call of
    vLLM into a plugin lies between the two.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find the defining module by the other finders, and run the marking after it."""
        if name != _DEFINING_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _default_level_of_process()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def mark_default() -> None:
    """Make vLLM's default level recognisable; called while vLLM loads the platform class.

    At that time `vllm.config.vllm` has not run yet, whatever the program imported first.
    """
    if _DEFINING_MODULE in sys.modules:
        return
    if not any(isinstance(finder, _MarkAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MarkAfterImport())


def _explicit_level(engine_args: EngineArgs) -> tuple[int | None, LevelOrigin]:
    """The level that the user gave and where; (None, "default") when nobody did.

    Raises:
        ConfigurationError: the level is none of vLLM's.
    """
    from vllm.config.vllm import OptimizationLevel

    raw: Any = engine_args.optimization_level
    if raw is _default_level:
        return None, "default"
    if _default_level is None and raw is OptimizationLevel.O2:
        # The default could not be marked: vLLM's configuration was there before the plugin.
        return None, "default"
    origin = raw.origin if isinstance(raw, GivenLevel) else "api"
    try:
        return int(OptimizationLevel(int(raw))), origin
    except (TypeError, ValueError):
        levels = ", ".join(str(int(level)) for level in OptimizationLevel)
        raise ConfigurationError(
            f"{_OPTION} {raw} is not a level; expected one of {levels}.", name=_OPTION, value=raw
        ) from None


# --- one start ---------------------------------------------------------------------------------

_starting: ContextVar[StartInProgress | None] = ContextVar("vllm_neuron_start", default=None)
# Attribute of EngineArgs: the start that the object has begun, with the object's id, so that a
# copy of the object begins its own.
_BEGUN = "_neuron_start"


@dataclass(frozen=True, slots=True)
class StartInProgress:
    """The start whose engine configuration is being built.

    Attributes:
        record: what was decided.
        writes: whether this call writes the log lines of the start.
    """

    record: StartRecord
    writes: bool


def starting() -> StartInProgress | None:
    """The start whose engine configuration this thread is building, or None."""
    return _starting.get()


def _begin(engine_args: EngineArgs) -> StartInProgress:
    """Decide a start; the one place where the environment is read.

    One EngineArgs object is one start, however often its configuration is built. Of the processes
    of a server with several API servers only the launcher (process rank -1) writes.

    Raises:
        ConfigurationError: a variable has an impossible value, or asks for what is not there.
        RuntimeError: CPU mode together with CPU compile.
    """
    begun = getattr(engine_args, _BEGUN, None)
    if begun is not None and begun[0] == id(engine_args):
        return StartInProgress(begun[1], writes=False)
    settings = envs.read_settings()
    mode = device.resolve_mode(settings, device.neuron_devices())
    level, origin = _explicit_level(engine_args)
    decision = route.resolve(
        settings[route.BACKEND_VARIABLE],
        explicit_level=level,
        level_origin=origin,
        cpu_mode=mode is device.Mode.CPU,
        torch_caching=settings["TORCH_CACHING_PRECOMPILE"],
        precompile_directory=str(settings.precompile_directory),
    )
    arguments = None
    if mode in (device.Mode.HOST, device.Mode.COMPILE):
        arguments = compiler_arguments(
            decision.level,
            extra=settings["NEURON_CC_FLAGS"],
            target=device.compile_target(settings),
        )
    from vllm_neuron.vllm.metrics import directory_of_start

    run = None
    if mode is device.Mode.DEVICE:
        run = resolve_device_run(settings)
        arguments = compiler_arguments(
            decision.level, extra=settings["NEURON_CC_FLAGS"], target=run.target, lnc=run.lnc
        )
        check_arguments(run, arguments)
    metrics = directory_of_start() if mode in (device.Mode.HOST, device.Mode.DEVICE) else None
    record = route.StartRecord(decision, settings, mode, arguments, metrics, run)
    setattr(engine_args, _BEGUN, (id(engine_args), record))
    is_api_process = engine_args._api_process_count > 1 and engine_args._api_process_rank >= 0
    return StartInProgress(record, writes=not is_api_process)


def _wrap_create_engine_config(original: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if not _platform_is_ours():
            _warn_of_other_platform()
            return original(self, *args, **kwargs)
        start = _begin(self)
        token = _starting.set(start)
        try:
            vllm_config = original(self, *args, **kwargs)
        except ValidationError as error:
            cause = _cause(error)
            if cause is None:
                raise
            raise cause from None
        finally:
            _starting.reset(token)
        if start.record.mode is device.Mode.COMPILE and start.writes:
            from vllm_neuron.vllm.cpu_compile import run

            # There is nothing to serve: the start ends here, with what there is to say.
            raise SystemExit(run(vllm_config))
        if start.record.metrics_directory is not None:
            from vllm_neuron.vllm.metrics import install

            install(start.record.metrics_directory)
        return vllm_config

    from pydantic import ValidationError

    return create_engine_config


def _cause(error: Any) -> ConfigurationError | None:
    """Our own error inside a pydantic ValidationError, which hides its class and details."""
    for item in error.errors():
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ConfigurationError):
            return inner
    return None


def _platform_is_ours() -> bool:
    from vllm.platforms import current_platform

    module, _, name = device.PLATFORM_CLASS.rpartition(".")
    cls = type(current_platform)
    return (cls.__module__, cls.__qualname__) == (module, name)


@functools.cache
def _warn_of_other_platform() -> None:
    """Say, once, that settings ask for the plugin and vLLM runs something else."""
    from vllm.platforms import current_platform

    if device.is_asked_for():
        # vLLM shows only its own loggers, and the platform class, which would join the plugin's
        # to them, is not loaded.
        logging.getLogger("vllm.neuron").warning(
            "Settings ask for the Neuron platform (%s), but vLLM runs on %s. "
            "VLLM_TARGET_DEVICE=cpu and a VLLM_PLUGINS without neuron have that effect.",
            ", ".join(name for name in device.SELECTING_VARIABLES if os.environ.get(name)),
            type(current_platform).__qualname__,
        )


def _mark_given_levels(parser_class: type[argparse.ArgumentParser]) -> None:
    """Make the argument parser mark the levels that it reads."""
    parse_known_args = parser_class.parse_known_args
    load_config_file = parser_class.load_config_file  # type: ignore[attr-defined]

    @functools.wraps(parse_known_args)
    def mark_command_line(self: Any, args: Any = None, namespace: Any = None) -> Any:
        namespace, rest = parse_known_args(self, args, namespace)
        level = getattr(namespace, _FIELD, None)
        if type(level) is str:
            setattr(namespace, _FIELD, GivenLevel(level, "cli"))
        elif level is not None and level == _default_level:
            # What is read is a text, so this is the default of the option.
            setattr(namespace, _FIELD, _default_level)
        return namespace, rest

    @functools.wraps(load_config_file)
    def mark_config_file(self: Any, file_path: str) -> list[str]:
        # vLLM splices these into its argument list before those of the command line, which win.
        arguments = list(load_config_file(self, file_path))
        for place, option in enumerate(arguments[:-1]):
            name = option.replace("_", "-")
            # argparse accepts an unambiguous beginning of an option as well.
            if name.startswith("--opt") and _OPTION.startswith(name):
                arguments[place + 1] = GivenLevel(arguments[place + 1], "config file")
        return arguments

    parser_class.parse_known_args = mark_command_line  # type: ignore[method-assign]
    parser_class.load_config_file = mark_config_file  # type: ignore[attr-defined]


_installed = False


def install_level_origin() -> None:
    """Record where levels enter and when a start begins; idempotent.

    vLLM loads general plugins before it parses arguments and before any engine configuration is
    built, in each of its processes.
    """
    global _installed
    if _installed:
        return
    _installed = True
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    EngineArgs.create_engine_config = _wrap_create_engine_config(  # type: ignore[method-assign]
        EngineArgs.create_engine_config
    )
    _mark_given_levels(FlexibleArgumentParser)
