"""Every environment variable: one table, and the settings that a start parses from it once.

Imports neither torch nor vllm. After the start nothing reads these variables again: the settings
travel with the engine configuration (`vllm_neuron.route.StartRecord`).
"""

# The table reads best with one variable on a line.
# ruff: noqa: E501

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal

from vllm_neuron import route
from vllm_neuron.errors import ConfigurationError

__all__ = [
    "Effect",
    "KeyClass",
    "Settings",
    "VARIABLES",
    "Variable",
    "get_compile_backend_name",
    "get_neuron_compile_cache_dir",
    "is_native_backend",
    "is_service_variable",
    "read_settings",
    "size_in_bytes",
    "temporary_file_system",
    "unknown_variables",
]

Kind = Literal["bool", "int", "float", "size", "str", "path", "choice", "log level"]
Value = bool | int | float | str | Path | None

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})
# Names of the levels of the `logging` module.
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class KeyClass(StrEnum):
    """Whether a variable takes part in cache keys."""

    IN_KEY = "in key"
    # Through something made from it: the route, the merged compiler arguments, the target.
    DERIVED = "in key, through what is derived from it"
    NOT_IN_KEY = "not in key"


class Effect(Enum):
    """What this version does with a variable that is set."""

    ACTS = "acts on it"
    # One WARNING: the variable is documented, and what it asks for is not in this version.
    LATER = "not in this version"
    # One WARNING: accepted for the sake of old set-ups, and without effect for good.
    NONE = "no effect"
    # Read by vLLM, PyTorch, the compiler or the Neuron runtime, which check it and act on it
    # themselves; here it is a text.
    FOREIGN = "read by others"


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table.

    Attributes:
        name: of the environment variable.
        kind: how the value is parsed.
        default: the parsed value when the variable is unset or empty.
        effect: what this version does with it.
        key: whether it takes part in cache keys.
        meaning: one line for people.
        choices: the legal values of a "choice".
        above: exclusive lower bound of a number.
        at_most: inclusive upper bound of a number.
        aliases: older names, accepted with a WARNING.
        instead: for `Effect.NONE`, what does the job.
    """

    name: str
    kind: Kind
    default: Value
    effect: Effect
    key: KeyClass
    meaning: str
    choices: tuple[str, ...] = ()
    above: float | None = None
    at_most: float | None = None
    aliases: tuple[str, ...] = ()
    instead: str = ""


_ACTS, _LATER, _NONE, _FOREIGN = Effect.ACTS, Effect.LATER, Effect.NONE, Effect.FOREIGN
_IN_KEY, _DERIVED, _NOT = KeyClass.IN_KEY, KeyClass.DERIVED, KeyClass.NOT_IN_KEY


def _old(name: str) -> tuple[str, ...]:
    # Quick-starts and vLLM Omni still set the VLLM_NEURON_* form of the NEURON_LIBTORCH_* names.
    return (f"VLLM_NEURON_{name}",)


# fmt: off
_ROWS = (
    # Route, device, modes.
    Variable("VLLM_NEURON_BACKEND", "str", None, _ACTS, _DERIVED, "the compilation route: neuron_native, neuron or vllm_neuron"),
    Variable("VLLM_NEURON_DEVICE", "choice", "auto", _ACTS, _DERIVED, "where NEFFs run", choices=("auto", "neuron", "host")),
    Variable("VLLM_NEURON_DEVICE_DIRECTORY", "path", None, _ACTS, _NOT, "where the device nodes neuron0, ... are; unset: /dev"),
    Variable("VLLM_NEURON_CPU_MODE", "bool", False, _ACTS, _NOT, "run eagerly on the CPU, without NEFFs"),
    Variable("VLLM_NEURON_CPU_COMPILE", "bool", False, _ACTS, _DERIVED, "compile on a CPU host, run nothing"),
    Variable("VLLM_NEURON_XLA_PYTHON", "path", None, _ACTS, _DERIVED, "interpreter of the XLA lowering, with torch 2.9 and torch-xla 2.9"),
    Variable("NEURON_PLATFORM_TARGET_OVERRIDE", "str", None, _ACTS, _DERIVED, "the target that CPU compile compiles for; of a device run it must be the device's"),
    Variable("VLLM_USE_V2_MODEL_RUNNER", "bool", None, _ACTS, _NOT, "must be unset or 0: the Neuron model runner is the only one"),
    Variable("VLLM_MLA_DISABLE", "bool", None, _ACTS, _NOT, "must be unset or 1 for a model with latent attention, which runs with full keys and values"),
    # Compiler.
    Variable("NEURON_CC_FLAGS", "str", None, _ACTS, _DERIVED, "compiler options, appended to the plugin's own"),
    Variable("VLLM_NEURON_CC", "path", None, _ACTS, _DERIVED, "the executable neuronx-cc; unset: PATH, then this Python environment"),
    Variable("VLLM_NEURON_CC_INPUT", "choice", "auto", _ACTS, _DERIVED, "what neuronx-cc is given of StableHLO; auto: as its version takes it", choices=("auto", "hlo", "stablehlo")),
    Variable("VLLM_NEURON_CC_STALL_TIMEOUT", "int", 1800, _ACTS, _NOT, "seconds without output and processor time after which a compiler is killed", above=0),
    Variable("VLLM_NEURON_DEBUG_MODE", "bool", False, _LATER, _IN_KEY, "allow graph breaks"),
    Variable("VLLM_NEURON_DISABLE_NKI_KERNELS", "bool", False, _LATER, _IN_KEY, "torch operations in place of NKI kernels"),
    Variable("VLLM_NEURON_MLP_FORCE_TKG", "bool", False, _LATER, _IN_KEY, "graph-shaping switch"),
    Variable("VLLM_NEURON_FORCE_STATIC_FP8", "bool", False, _LATER, _IN_KEY, "graph-shaping switch"),
    Variable("VLLM_NEURON_SWITCH_CC", "bool", False, _LATER, _IN_KEY, "graph-shaping switch"),
    Variable("TORCH_NEURONX_COMPLEX_DECOMPOSE", "bool", True, _LATER, _IN_KEY, "complex numbers as pairs of real ones"),
    Variable("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "bool", True, _NONE, _NOT, "forbid eager fallback", instead="serving never falls back to eager execution"),
    Variable("TORCH_NEURONX_DEBUG_DIR", "path", Path("/tmp/neuron_backend"), _LATER, _NOT, "where debug artefacts go"),
    Variable("TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS", "bool", False, _LATER, _NOT, "keep debug artefacts"),
    Variable("VLLM_NEURON_LIBTORCH_NEURONX_LITE", "bool", True, _NONE, _NOT, "of earlier versions"),
    # Caches.
    Variable("VLLM_CACHE_ROOT", "path", None, _ACTS, _NOT, "root of the caches (~/.cache/vllm)"),
    Variable("TORCH_CACHING_PRECOMPILE", "bool", None, _ACTS, _NOT, "0 turns the Precompile Cache off"),
    Variable("VLLM_NEURON_PRECOMPILE_VERIFY", "bool", False, _ACTS, _NOT, "trace all the same what the Precompile Cache has, and compare"),
    Variable("NEURON_COMPILED_ARTIFACTS", "path", None, _ACTS, _NOT, "additional cache directory, read and written"),
    Variable("NEURON_LIBTORCH_REMOTE_CACHE", "path", None, _ACTS, _NOT, "shared cache directory, read before anything is compiled", aliases=_old("REMOTE_CACHE")),
    Variable("VLLM_NEURON_CACHE_MAX_SIZE", "size", None, _ACTS, _NOT, "most bytes that the local caches take; the entries used longest ago go"),
    Variable("VLLM_NEURON_CACHE_PROMOTE", "bool", False, _ACTS, _NOT, "copy new entries to the shared cache directory"),
    Variable("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "bool", False, _ACTS, _NOT, "no compilation cache", aliases=_old("DISABLE_COMPILE_CACHE")),
    Variable("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "int", 600, _ACTS, _NOT, "seconds to wait on a holder without a sign of life", above=0, aliases=_old("COMPILATION_TIMEOUT")),
    Variable("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "int", None, _ACTS, _NOT, "compilers at a time on the node; unset: min(8, cores, available RAM / 8 GiB)", above=0, aliases=_old("PARALLEL_COMPILE_WORKERS")),
    Variable("NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND", "bool", False, _ACTS, _NOT, "trace, lower and compile one graph after the other", aliases=_old("DISABLE_GRAPH_CAPTURE_BACKEND")),
    Variable("NEURON_LIBTORCH_ASSERT_CACHE_HIT", "bool", False, _ACTS, _NOT, "a cache miss is fatal", aliases=_old("ASSERT_CACHE_HIT")),
    Variable("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "bool", False, _ACTS, _NOT, "a cache miss is fatal"),
    Variable("NEURON_LIBTORCH_CACHE_ROOT", "path", None, _NONE, _NOT, "store root outside vLLM", instead="VLLM_CACHE_ROOT is the root of the caches"),
    Variable("NEURON_COMPILE_CACHE_URL", "str", None, _NONE, _NOT, "cache of libneuronxla", instead="VLLM_CACHE_ROOT is the root of the caches"),
    Variable("NKI_COMPILE_CACHE_URL", "str", None, _FOREIGN, _NOT, "NKI's own kernel cache"),
    Variable("TORCH_NEURONX_NEFF_CACHE_DIR", "path", None, _NONE, _NOT, "cache of torch-neuronx", instead="VLLM_CACHE_ROOT is the root of the caches"),
    Variable("TORCHINDUCTOR_CACHE_DIR", "str", None, _FOREIGN, _NOT, "PyTorch's own"),
    Variable("TORCH_STRICT_PRECOMPILE", "str", None, _FOREIGN, _NOT, "PyTorch's own"),
    # Tracing and warm-up.
    Variable("VLLM_NEURON_PARALLEL_TRACE_WORKERS", "int", None, _ACTS, _NOT, "graphs traced at a time on the native route; unset: min(8, cores, available RAM / 2 GiB), on a Neuron device 1", above=0),
    Variable("VLLM_NEURON_DISABLE_PARALLEL_TRACE", "bool", False, _ACTS, _NOT, "trace in one process"),
    Variable("VLLM_NEURON_SKIP_PREFILL_WARMUP", "bool", False, _ACTS, _NOT, "skip the prefill graphs"),
    Variable("VLLM_NEURON_SKIP_DECODE_WARMUP", "bool", False, _ACTS, _NOT, "skip the decode graphs"),
    Variable("VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP", "bool", False, _ACTS, _NOT, "skip both"),
    Variable("VLLM_NEURON_SKIP_ENCODER_WARMUP", "bool", False, _ACTS, _NOT, "skip the encoder graphs"),
    # Memory, runtime, logging, metrics.
    Variable("VLLM_NEURON_LOG_LEVEL", "log level", None, _ACTS, _NOT, "log level of the plugin; unset: vLLM's"),
    Variable("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "float", 0.30, _ACTS, _DERIVED, "largest share of device memory for the KV cache", above=0, at_most=1),
    Variable("VLLM_NEURON_MIN_KV_BUDGET_GIB", "float", 1.0, _ACTS, _NOT, "smallest KV cache in GiB", above=0),
    Variable("VLLM_NEURON_BARRIER_TIMEOUT", "int", 3600, _ACTS, _NOT, "seconds that ranks wait for each other while compiling", above=0),
    Variable("VLLM_NEURON_WORKER_TERMINATION_TIMEOUT", "int", 5, _ACTS, _NOT, "seconds for a worker to end", above=0),
    Variable("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "str", None, _FOREIGN, _NOT, "vLLM's time limit for one step"),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING", "str", None, _FOREIGN, _NOT, "vLLM: 0 keeps the engine in one process"),
    Variable("PROMETHEUS_MULTIPROC_DIR", "str", None, _FOREIGN, _NOT, "directory of the metrics files"),
    Variable("VLLM_NEURON_LIBNRT", "path", None, _ACTS, _NOT, "the library libnrt.so.1; unset: the loader's path, then /opt/aws/neuron/lib"),
    Variable("NEURON_VISIBLE_DEVICES", "str", None, _ACTS, _NOT, "logical cores that the ranks take, e.g. 0-3"),
    Variable("NEURON_LOGICAL_NC_CONFIG", "choice", "2", _ACTS, _IN_KEY, "logical NeuronCore configuration", choices=("1", "2")),
    Variable("NEURON_RT_VISIBLE_CORES", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("NEURON_RT_MAP_HBM", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("NEURON_RT_IO_RING_CACHE_SIZE", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("NEURON_RT_DISABLE_EXECUTION_BARRIER", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("NEURON_RT_ROOT_COMM_ID", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("XLA_FLAGS", "str", None, _FOREIGN, _DERIVED, "XLA, of the host compiler"),
    Variable("TF_CPP_MIN_LOG_LEVEL", "str", None, _FOREIGN, _NOT, "XLA's own log level"),
    Variable("OMP_NUM_THREADS", "str", None, _FOREIGN, _NOT, "threads of PyTorch on the CPU"),
    Variable("NEURON_SCRATCHPAD_PAGE_SIZE", "str", None, _FOREIGN, _NOT, "Neuron runtime"),
    Variable("NKI_SIMULATOR", "bool", None, _LATER, _NOT, "NKI kernels by the simulator"),
    Variable("NKI_PRECISE_FP", "bool", None, _LATER, _NOT, "exact floating point in the NKI simulator"),
    # Of earlier versions and of neighbours.
    Variable("NEURON_EXECUTION_BACKEND", "str", None, _FOREIGN, _NOT, "of a neighbour"),
    Variable("TORCH_NEURONX_DYNAMO_BACKEND_ONLY", "str", None, _FOREIGN, _NOT, "of torch-neuronx"),
    Variable("VLLM_NEURON_EFA_INSTANCE_FAMILY", "str", None, _NONE, _NOT, "of earlier versions"),
    Variable("NEURON_SKIP_EFA_AFFINITY", "str", None, _FOREIGN, _NOT, "of a neighbour"),
    Variable("VLLM_NEURON_EPD_RENDERER_WORKERS", "str", None, _NONE, _NOT, "of earlier versions"),
    Variable("VLLM_NEURON_CHECKPOINT_CACHE", "str", None, _NONE, _NOT, "of earlier versions"),
    Variable("VLLM_NEURON_GOLDEN_CACHE_DIR", "str", None, _NONE, _NOT, "of earlier versions"),
    Variable("VLLM_NEURON_KERNEL_DEVICE_DUMP", "str", None, _NONE, _NOT, "of earlier versions"),
)
# fmt: on

VARIABLES: Mapping[str, Variable] = {row.name: row for row in _ROWS}
_ALIASES: Mapping[str, str] = {alias: row.name for row in _ROWS for alias in row.aliases}
_MOUNTS = Path("/proc/self/mounts")
# Names under these prefixes are the plugin's own; an unknown one is a misspelling.
_OWN_PREFIXES = ("VLLM_NEURON_", "NEURON_LIBTORCH_")

# What Kubernetes sets in every pod for a service that is named, say, vllm-neuron-svc:
# NAME_SERVICE_HOST, NAME_SERVICE_PORT[_PORTNAME], NAME_PORT, NAME_PORT_8000_TCP[_PROTO|_PORT|_ADDR]
# (kubernetes.io: Services, "Environment variables").
_SERVICE_NAME = re.compile(
    r"[A-Z0-9_]+_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)"
    r"(_(PROTO|PORT|ADDR))?)?)"
)


@dataclass(frozen=True, slots=True)
class Settings(Mapping[str, Value]):
    """The parsed variables of one start, by name; every row of the table has a value.

    Attributes:
        by_name: parsed value by variable name.
        notices: WARNING lines about old names, variables without effect and a moved cache.
        compile_cache_directory: directory of the compilation cache.
    """

    by_name: dict[str, Value]
    notices: tuple[str, ...]
    compile_cache_directory: Path

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def cache_root(self) -> Path:
        """Root of the caches: `VLLM_CACHE_ROOT`, or vLLM's default."""
        return self.by_name["VLLM_CACHE_ROOT"]  # type: ignore[return-value]

    @property
    def precompile_directory(self) -> Path:
        """Directory of the Precompile Cache."""
        return self.cache_root / "neuron" / "precompile"

    @property
    def strict_variable(self) -> str | None:
        """The variable that makes a cache miss fatal, if one is set."""
        return _strict_variable(self.by_name)

    def key_factors(self) -> dict[str, str]:
        """Variables that enter cache keys under their own name, as canonical text."""
        rows = (VARIABLES[name] for name in sorted(self.by_name))
        return {row.name: str(self.by_name[row.name]) for row in rows if row.key is _IN_KEY}


def read_settings(environ: Mapping[str, str] = os.environ, *, mounts: Path = _MOUNTS) -> Settings:
    """Parse every variable of the table once.

    Args:
        environ: the environment.
        mounts: the table of mounted file systems (proc(5)), to tell a home directory on NFS.

    Raises:
        ConfigurationError: a value cannot be parsed or is out of range.
    """
    values: dict[str, Value] = {}
    notices: list[str] = []
    for row in _ROWS:
        text, source = _text_of(row, environ, notices)
        if text is None:
            values[row.name] = row.default
            continue
        value = _parse(row, text, source)
        values[row.name] = value
        if value != row.default and (notice := _notice(row, source, text)):
            notices.append(notice)
    off, strict = "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", _strict_variable(values)
    if values[off] and strict is not None:
        raise ConfigurationError(
            f"{off}=1 and {strict}=1 contradict each other: without the compilation cache every "
            "graph would have to be compiled, and that is forbidden. Unset one of them.",
            name=off,
            value="1",
        )
    _check_directories(values, notices)
    moved = None
    if (root := values["VLLM_CACHE_ROOT"]) is None:
        # As vLLM has it (vllm.envs.get_default_cache_root).
        base = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        if base.startswith("~"):
            # No HOME, and a user id that the system does not know: usual in containers.
            base = f"/tmp/vllm_neuron_cache_{os.getuid()}"
            notices.append(
                f"There is no home directory for user id {os.getuid()}: the caches are in {base}, "
                "which may not survive a reboot. Set HOME or VLLM_CACHE_ROOT to choose their place."
            )
        root = values["VLLM_CACHE_ROOT"] = Path(base) / "vllm"
        if (_file_system(root, mounts) or "").startswith("nfs"):
            user = environ.get("USER", "")
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", user):
                user = str(os.getuid())
            moved = Path(f"/tmp/vllm_neuron_wdir_{user}")
            notices.append(
                f"{root} is on NFS, where file locks may not work: the compilation cache moves to "
                f"{moved}, which may not survive a reboot. Set VLLM_CACHE_ROOT to choose its place."
            )
    assert isinstance(root, Path)
    compile_cache = (moved or root) / "neuron" / "compile_cache"
    return Settings(values, tuple(notices), compile_cache)


def _strict_variable(values: Mapping[str, Value]) -> str | None:
    names = ("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "NEURON_LIBTORCH_ASSERT_CACHE_HIT")
    return next((name for name in names if values[name]), None)


def _check_directories(values: Mapping[str, Value], notices: list[str]) -> None:
    name = "NEURON_COMPILED_ARTIFACTS"
    place = values[name]
    if isinstance(place, Path) and place.exists() and not place.is_dir():
        raise ConfigurationError(
            f"{name}={place} is not a directory: expected a directory, or a path where one can be "
            "made.",
            name=name,
            value=str(place),
        )
    name = "NEURON_LIBTORCH_REMOTE_CACHE"
    place = values[name]
    if isinstance(place, Path) and not place.is_dir():
        notices.append(
            f"{name}={place} is not a directory: it counts as empty. Is its file system mounted?"
        )


def temporary_file_system(path: Path, *, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system of `path` if that lives in memory, else None."""
    kind = _file_system(path, mounts)
    return kind if kind in ("tmpfs", "ramfs") else None


def _file_system(path: Path, mounts: Path) -> str | None:
    """The type of the file system that holds `path`, or will; None if it cannot be told."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    path = path.resolve()
    types = {}
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        # Blanks and backslashes stand as octal escapes in this table (proc(5)).
        types[re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)] = kind
    return next((types[str(p)] for p in (path, *path.parents) if str(p) in types), None)


def _text_of(
    row: Variable, environ: Mapping[str, str], notices: list[str]
) -> tuple[str | None, str]:
    """The text of a variable (None when unset or empty) and the name that it came from."""
    if row.name == route.BACKEND_VARIABLE:
        # The route tells an empty value from an unset one and shows it unstripped.
        return environ.get(row.name), row.name
    text = environ.get(row.name, "").strip() or None
    source = row.name
    for alias in row.aliases:
        old = environ.get(alias, "").strip()
        if not old:
            continue
        if text is None:
            text, source = old, alias
            notices.append(f"{alias} is the old name of {row.name}; please set {row.name}.")
        elif old != text:
            notices.append(
                f"{alias}={old} is ignored: it is the old name of {row.name}, which is set to "
                f"{text}, and the new name wins."
            )
        else:
            notices.append(f"{alias} is the old name of {row.name}, which is set too; unset it.")
    return text, source


def _parse(row: Variable, text: str, source: str) -> Value:
    def fail(expected: str) -> ConfigurationError:
        return ConfigurationError(
            f"{source}={text!r} is not valid: expected {expected}.", name=source, value=text
        )

    match row.kind:
        case "bool":
            word = text.lower()
            if word not in TRUE_WORDS | FALSE_WORDS:
                raise fail("0, 1, true, false, yes, no, on or off")
            return word in TRUE_WORDS
        case "int" | "float":
            bounds = [] if row.above is None else [f"above {row.above:g}"]
            bounds += [] if row.at_most is None else [f"at most {row.at_most:g}"]
            noun = "an integer" if row.kind == "int" else "a number"
            expected = " ".join([noun, " and ".join(bounds)]).strip()
            try:
                number = int(text) if row.kind == "int" else float(text)
            except ValueError:
                raise fail(expected) from None
            above = row.above is None or number > row.above
            if not (above and (row.at_most is None or number <= row.at_most)):
                raise fail(expected)
            return number
        case "size":
            if (size := size_in_bytes(text)) is None:
                raise fail("a size above 0 such as 500M, 20G or a number of bytes")
            return size
        case "choice":
            if text not in row.choices:
                raise fail(f"{', '.join(row.choices[:-1])} or {row.choices[-1]}")
            return text
        case "log level":
            if text.upper() not in LOG_LEVELS:
                raise fail(f"{', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}")
            return text.upper()
        case "path":
            expanded = Path(os.path.expanduser(text))  # noqa: PTH111 - leaves an unknown ~user
            if text.startswith("~") and str(expanded) == text:
                raise fail("a path; there is no such home directory")
            return expanded
        case "str":
            return text


def _notice(row: Variable, source: str, text: str) -> str | None:
    match row.effect:
        case Effect.LATER:
            return f"{source}={text} has no effect in this version ({row.meaning})."
        case Effect.NONE:
            instead = f": {row.instead}" if row.instead else ""
            return f"{source}={text} has no effect{instead}."
        case _:
            return None


def size_in_bytes(text: str) -> int | None:
    """Parse a size such as `20G`, `1.5 GiB` or `4096`; units are binary. None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    if found is None:
        return None
    number, unit = found.groups()
    size = int(float(number) * 1024 ** (" KMGT".index(unit.upper()) if unit else 0))
    return size if size > 0 else None


def is_service_variable(name: str) -> bool:
    """Whether `name` has the shape of a variable that Kubernetes sets for a service."""
    return _SERVICE_NAME.fullmatch(name) is not None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Set variables under the plugin's prefixes that the table does not know.

    Returns:
        The closest known name (or None) by unknown name. Kubernetes service variables and
        `RUNTIME_INPUT_SNAPSHOT_*` are not among them.
    """
    known = [*VARIABLES, *_ALIASES]
    unknown: dict[str, str | None] = {}
    for name in sorted(environ):
        if not name.startswith(_OWN_PREFIXES) or name in VARIABLES or name in _ALIASES:
            continue
        if not is_service_variable(name):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            unknown[name] = _ALIASES.get(close[0], close[0]) if close else None
    return unknown


# --- what other code asks ------------------------------------------------------------------------


def is_native_backend() -> bool:
    """Whether this process runs on the native route.

    Answers from the record of the start that the process works for. Before any start, from the
    environment, as a start would decide now.
    """
    return _current_route() is route.Route.NATIVE


def get_compile_backend_name() -> str:
    """The backend name for `torch.compile(backend=...)` on the route of this process."""
    return "neuron_native" if is_native_backend() else "vllm_neuron"


def _current_route() -> route.Route:
    start = route.current()
    if start is not None:
        return start.route.route
    return route.resolve(
        os.environ.get(route.BACKEND_VARIABLE),
        explicit_level=None,
        level_origin="default",
        cpu_mode=False,
        torch_caching=None,
        precompile_directory="",
    ).route


def get_neuron_compile_cache_dir() -> str:
    """The directory of the compilation cache, of this process's start or of the next one."""
    start = route.current()
    settings = read_settings() if start is None else start.settings
    return str(settings.compile_cache_directory)
