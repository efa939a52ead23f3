"""The compiler arguments: the level, the plugin's own, and what NEURON_CC_FLAGS appends."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm_neuron.errors import ConfigurationError
from vllm_neuron.target import TARGETS

__all__ = [
    "HOST_TARGET",
    "LEVEL_ZERO_NOTICE",
    "CompilerArguments",
    "OwnOptions",
    "compiler_arguments",
    "option_values",
]

HOST_TARGET = "host"
"""The target of the host emulator; no Neuron device has it, so hardware refuses its NEFFs."""

LEVEL_ZERO_NOTICE = "neuronx-cc has no level O0: compiling with -O1"
"""The INFO line of OL-14, to be logged as it stands."""

_VARIABLE = "NEURON_CC_FLAGS"

_LEVELS = (0, 1, 2, 3)

# Several spellings of one option (neff.md 3, the table of the neuronx-cc command line).
_SAME_OPTION = {
    "-O": "--optlevel",
    "-lnc": "--logical-nc-config",
    "--lnc": "--logical-nc-config",
}

# An `--enable-X` and a `--disable-X` decide the same thing, so the right-most of the pair wins.
_SWITCH = re.compile(r"^--(?:enable|disable)-(?P<subject>.+)$")

# Options that never take the next token as their value.
_WITHOUT_VALUE = frozenset(
    {
        "--enable-mixed-precision-accumulation",
        "--disable-mixed-precision-accumulation",
        "--enable-saturate-infinity",
        "--enable-fast-context-switch",
        "--enable-fast-loading-neuron-binaries",
        "--enable-internal-neff-wrapper",
        "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3",
        "--query-compute-placement",
        "--no-cache",
        "--retry-failed-compilation",
    }
)

# Options of libneuronxla's compiler wrapper, which neuronx-cc does not know (OL-22), and what does
# the job here.
_WRAPPER_ONLY = {
    "--cache-dir": "set VLLM_CACHE_ROOT (or NEURON_COMPILED_ARTIFACTS for an additional store)",
    "--no-cache": "set NEURON_LIBTORCH_DISABLE_COMPILE_CACHE=1",
    "--retry-failed-compilation": "nothing is needed: failed compilations are never cached",
    "--log-level": "set VLLM_NEURON_LOG_LEVEL",
}

# Options that say where results and messages go, not what is compiled (CC-12).
_NOT_IN_KEY = frozenset({"--output", "--logfile", "--verbose", "--logfile-verbose"})


@dataclass(frozen=True, slots=True)
class CompilerArguments:
    """The merged arguments of one server start.

    Attributes:
        arguments: what the compiler gets, each option once, the right-most spelling of it.
        key_arguments: the canonical form for compile keys: sorted, one token per option, one
            spelling per option, without what only says where output goes.
        level: the level that reaches the compiler, 1 to 3.
        level_source: who set it: vLLM's optimization level or NEURON_CC_FLAGS.
        target: the device architecture that the compiler is asked for.
        warnings: the texts to log at WARNING, one per option that is not forwarded.
        notices: the texts to log at INFO.
    """

    arguments: tuple[str, ...]
    key_arguments: tuple[str, ...]
    level: int
    level_source: Literal["vLLM", "NEURON_CC_FLAGS"]
    target: str
    warnings: tuple[str, ...]
    notices: tuple[str, ...]

    def describe(self) -> str:
        """Return the INFO line of OL-15: the final arguments and who set the level."""
        return (
            f"Compiler arguments: {shlex.join(self.arguments)} (level O{self.level} set by "
            f"{self.level_source})"
        )


@dataclass(frozen=True, slots=True)
class _Option:
    """One option as written: `name` is the canonical one, `tokens` the spelling."""

    name: str
    value: str | None
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """The plugin's own options of a command line (OL-23), before NEURON_CC_FLAGS.

    Attributes:
        target: the device architecture, `host` for the host emulator.
        level: vLLM's optimization level, 0 to 3.
        lnc: physical cores of a logical one.
        framework: what made the module.
        model_type: what the compiler tunes for.
        auto_cast: what the compiler may compute in a narrower type.
    """

    target: str
    level: int
    lnc: int
    framework: str = "XLA"
    model_type: str = "transformer"
    auto_cast: str = "none"

    def options(self) -> tuple[_Option, ...]:
        """Return them in the order of the command line."""
        lnc = str(self.lnc)
        return (
            _Option("--framework", self.framework, ("--framework", self.framework)),
            _Option("--target", self.target, ("--target", self.target)),
            _Option("--model-type", self.model_type, ("--model-type", self.model_type)),
            _Option("--logical-nc-config", lnc, ("--lnc", lnc)),
            _level_option(self.level),
            _Option("--auto-cast", self.auto_cast, (f"--auto-cast={self.auto_cast}",)),
        )


def compiler_arguments(
    level: int, *, extra: str | None, target: str, lnc: int | None = None
) -> CompilerArguments:
    """Merge the plugin's arguments with NEURON_CC_FLAGS.

    The shape of the plugin's own arguments is OL-23's. NEURON_CC_FLAGS is appended to them and the
    right-most option wins, as in neuronx-cc itself (OL-20).

    Args:
        level: vLLM's optimization level, 0 to 3.
        extra: the text of NEURON_CC_FLAGS, or None when it is not set.
        target: the device architecture, `host` for the host emulator.
        lnc: physical cores of a logical one; the target's default unless given.

    Returns:
        The merged arguments and the texts that the caller logs.

    Raises:
        ConfigurationError: `extra` cannot be parsed or asks for a level that does not exist;
            `level` is not 0 to 3. Attributes `name` and `value`.
    """
    if level not in _LEVELS:
        raise ConfigurationError(
            f"optimization level {level!r} is not one of 0, 1, 2, 3",
            name="optimization_level",
            value=level,
        )
    own = OwnOptions(target=target, level=level, lnc=lnc or _default_lnc(target)).options()
    merged = {option.name: option for option in own}
    warnings: list[str] = []
    level_source: Literal["vLLM", "NEURON_CC_FLAGS"] = "vLLM"
    for option in _parse(extra or ""):
        refusal = _why_not_forwarded(option, target=target)
        if refusal is not None:
            if refusal not in warnings:
                warnings.append(refusal)
            continue
        if option.name == "--optlevel":
            level = _requested_level(option, text=extra)
            level_source = "NEURON_CC_FLAGS"
            option = _level_option(level)
        merged[option.name] = option
    return CompilerArguments(
        arguments=tuple(token for option in merged.values() for token in option.tokens),
        key_arguments=tuple(
            sorted(
                name if option.value is None else f"{name}={option.value}"
                for name, option in merged.items()
                if name not in _NOT_IN_KEY
            )
        ),
        level=max(level, 1),
        level_source=level_source,
        target=merged["--target"].value or target,
        warnings=tuple(warnings),
        notices=(LEVEL_ZERO_NOTICE,) if level == 0 else (),
    )


def option_values(arguments: Sequence[str]) -> dict[str, str | None]:
    """Return the value of each option of a merged command line, by canonical name."""
    return {option.name: option.value for option in _parse(shlex.join(arguments))}


def _default_lnc(target: str) -> int:
    if target == HOST_TARGET:
        return 1
    known = TARGETS.get(target)
    return known.lnc_sizes[0] if known is not None else 2


def _level_option(level: int) -> _Option:
    """Return the option for vLLM's level 0 to 3; neuronx-cc has no 0 (OL-14)."""
    number = str(max(level, 1))
    return _Option("--optlevel", number, (f"-O{number}",))


def _requested_level(option: _Option, *, text: str | None) -> int:
    if option.value not in {"0", "1", "2", "3"}:
        raise ConfigurationError(
            f"{_VARIABLE}={text!r}: optimization level {option.value!r} in "
            f"{shlex.join(option.tokens)!r} is not one of 0, 1, 2, 3",
            name=_VARIABLE,
            value=text,
        )
    return int(option.value)


def _why_not_forwarded(option: _Option, *, target: str) -> str | None:
    """Return the warning for an option that the compiler must not see, else None."""
    remedy = _WRAPPER_ONLY.get(option.name.replace("_", "-"))
    if remedy is not None:
        return (
            f"{_VARIABLE}: {option.name} belongs to another compiler wrapper and is not "
            f"forwarded; {remedy}"
        )
    if option.name == "--target" and target == HOST_TARGET and option.value != HOST_TARGET:
        return (
            f"{_VARIABLE}: --target {option.value} is not forwarded; the host emulator compiles "
            f"for target {HOST_TARGET} only"
        )
    return None


def _parse(text: str) -> Iterator[_Option]:
    """Split the text of NEURON_CC_FLAGS into options.

    Accepted are `--name`, `--name=value`, `--name value`, `-O<n>`, `-O <n>`, `-O=<n>` and
    `-lnc <n>`. The next token is the value of an option unless it looks like an option itself:
    a dash first and no space within (argparse's rule, which neuronx-cc follows).

    Raises:
        ConfigurationError: an open quote, or a token that belongs to no option.
    """
    try:
        tokens = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{_VARIABLE}={text!r} cannot be split into options: {error}",
            name=_VARIABLE,
            value=text,
        ) from None
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("-") or token in ("-", "--"):
            raise ConfigurationError(
                f"{_VARIABLE}={text!r}: {token!r} is neither an option nor the value of one",
                name=_VARIABLE,
                value=text,
            )
        attached = re.fullmatch(r"-O=?(\w+)", token)
        if attached:
            yield _Option("--optlevel", attached[1], (token,))
            continue
        name, equals, attached_value = token.partition("=")
        value = attached_value if equals else None
        spelling: tuple[str, ...] = (token,)
        if (
            not equals
            and name.replace("_", "-") not in _WITHOUT_VALUE
            and position < len(tokens)
            and (not tokens[position].startswith("-") or " " in tokens[position])
        ):
            value = tokens[position]
            spelling = (token, value)
            position += 1
        yield _Option(_canonical_name(name), _canonical_value(name, value), spelling)


def _canonical_name(name: str) -> str:
    switch = _SWITCH.match(name)
    return f"--enable-{switch['subject']}" if switch else _SAME_OPTION.get(name, name)


def _canonical_value(name: str, value: str | None) -> str | None:
    """Return the value for the key; a switch gets the state that it asks for."""
    if _SWITCH.match(name) and value is None:
        return "off" if name.startswith("--disable-") else "on"
    # The value of --internal-...-options is a list of options separated by spaces.
    return " ".join(value.split()) if value is not None and name.endswith("-options") else value
