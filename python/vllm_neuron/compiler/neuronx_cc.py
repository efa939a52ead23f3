"""The driver of neuronx-cc: finds it, runs it in a folder of its own, and checks what it wrote."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_neuron.compiler.arguments import option_values
from vllm_neuron.compiler.child_process import ChildRun, run_child
from vllm_neuron.compiler.module_files import (
    InputFormat,
    ModuleRefusal,
    check_module,
    module_file,
)
from vllm_neuron.compiler.neuronx_failures import Diagnosis, Outcome, diagnose, last_lines
from vllm_neuron.errors import CompileError, ConfigurationError, NeffError
from vllm_neuron.target import Target, expected_architecture, target_named

if TYPE_CHECKING:
    from vllm_neuron._core import Neff
    from vllm_neuron.lowering.module import LoweredModule

__all__ = ["Installation", "NeuronxCompiler", "find_neuronx_cc"]

logger = logging.getLogger(__name__)

EXECUTABLE = "neuronx-cc"
PATH_VARIABLE = "VLLM_NEURON_CC"
# Version of what `module_files` does to a module, part of the keys.
_MODULE_RULES = "1"
# What `neuronx-cc --version` prints first, as quoted in public issues.
_VERSION = re.compile(r"NeuronX Compiler version (?P<version>\d+(?:\.\d+){2,3}[\w.+-]*)")
_VERSION_TIMEOUT_S = 120
# The first release with which a StableHLO module was seen to be compiled as it is (spec LP-22);
# the documented input of every release is an HLO protobuf.
_STABLEHLO_SINCE = (2, 27)
# The compiler's own name of its log (its default, and where users look).
_LOG = "log-neuron-cc.txt"
_OUTPUT = "output.txt"
_NEFF = "file.neff"
# How much of the end of the logs is read for a message.
_LOG_BYTES = 1 << 20
# What a NEFF may say of a tensor instead of the module's dtype: by default the compiler computes
# 64-bit integers in 32 bits, and the dtypes of the known NEFFs do not include bool.
_NARROWED = {"int64": {"int32"}, "uint64": {"uint32"}, "bool": {"uint8", "int8"}}


@dataclass(frozen=True, slots=True)
class Installation:
    """A neuronx-cc on this machine.

    Attributes:
        executable: its path.
        version: its full version, e.g. `2.28.7631.0+1897edc9`.
        found_by: how it was found, for people.
    """

    executable: Path
    version: str
    found_by: str

    @property
    def input_format(self) -> InputFormat:
        """What it is given of a StableHLO module."""
        release = tuple(int(part) for part in self.version.split(".")[:2])
        return "stablehlo" if release >= _STABLEHLO_SINCE else "hlo"


def find_neuronx_cc(environ: Mapping[str, str] = os.environ) -> Installation:
    """Find the compiler: VLLM_NEURON_CC, then PATH, then the scripts of this interpreter.

    The version is asked for once per executable and process.

    Raises:
        ConfigurationError: there is none, or it does not tell its version.
    """
    named = environ.get(PATH_VARIABLE, "").strip()
    on_path = shutil.which(EXECUTABLE, path=environ.get("PATH", os.defpath))
    beside = Path(sysconfig.get_path("scripts")) / EXECUTABLE
    if named:
        path, found_by = Path(named), PATH_VARIABLE
    elif on_path:
        path, found_by = Path(on_path), "PATH"
    elif beside.is_file():
        path, found_by = beside, "the scripts of this Python environment"
    else:
        raise ConfigurationError(
            f"{EXECUTABLE} is not found: not on PATH, not in {beside.parent}, and {PATH_VARIABLE} "
            "is not set. Install the package neuronx-cc or name the executable.",
            name=PATH_VARIABLE,
            value=None,
        )
    if not os.access(path, os.X_OK) or not path.is_file():
        raise ConfigurationError(
            f"{EXECUTABLE} by {found_by}: {path} is not an executable file",
            name=PATH_VARIABLE,
            value=str(path),
        )
    path = path.absolute()
    return Installation(path, _version_of(path, path.stat().st_mtime_ns), found_by)


@functools.cache
def _version_of(path: Path, _modified_ns: int) -> str:
    command = [str(path), "--version"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"{shlex.join(command)} does not run: {error}", name=PATH_VARIABLE, value=str(path)
        ) from error
    text = f"{done.stdout}\n{done.stderr}"
    match = _VERSION.search(text)
    if match is None:
        raise ConfigurationError(
            f"{shlex.join(command)} (exit code {done.returncode}) does not tell a version: "
            f"expected 'NeuronX Compiler version ...', found {text.strip()[:200]!r}",
            name=PATH_VARIABLE,
            value=str(path),
        )
    return match["version"]


class NeuronxCompiler:
    """Compiles modules with neuronx-cc, each in a child process and a private work folder.

    Args:
        target: the value of `--target`.
        installation: the compiler; found by `find_neuronx_cc` unless given.
        input_format: what it is given of a StableHLO module, unless its version decides.
        stall_s: seconds without output and without processor time after which a run is killed.
        work_root: where work folders are made; the system's temporary folder unless given.

    Attributes:
        name: `neuronx-cc`.
        version: its full version.
        target: the target.
        runs: what each run that gave a NEFF took, by bucket.
        is_stopped: set by `stop`.
        stall_s: as given.

    Raises:
        ConfigurationError: no compiler, or an unknown target.
    """

    name = EXECUTABLE

    def __init__(
        self,
        *,
        target: str,
        installation: Installation | None = None,
        input_format: InputFormat | None = None,
        stall_s: float = 1800.0,
        work_root: Path | None = None,
    ) -> None:
        self._target = target_named(target)
        self.target = target
        self.installation = installation or find_neuronx_cc()
        self.version = self.installation.version
        self.input_format: InputFormat = input_format or self.installation.input_format
        self.runs: dict[str, ChildRun] = {}
        self.stall_s = stall_s
        self._work_root = work_root
        self._counting = threading.Lock()
        self.is_stopped = threading.Event()

    def stop(self) -> None:
        """Kill the compilers that run; no other is started."""
        self.is_stopped.set()

    def key_factors(self) -> dict[str, str]:
        """Return what enters compile keys besides module and arguments."""
        return {
            "compiler": self.name,
            "version": self.version,
            "target": self.target,
            "input-format": self.input_format,
            "module-rules": _MODULE_RULES,
        }

    def compile(
        self,
        module: LoweredModule,
        *,
        bucket: str,
        arguments: tuple[str, ...],
        input_names: Sequence[str],
        output_names: Sequence[str],
    ) -> bytes:
        """Compile one module to a NEFF; the compiler names the tensors itself, by position.

        Raises:
            CompileError: the module is refused before the compiler runs, the compiler fails, or
                what it wrote does not fit. Attributes: `bucket`, `command`, `exit_code` (minus the
                signal, None if it was not run), `log_path`, `reason`, `outcome`, `code`, `advice`,
                `source`, `work_folder` (kept; None if the compiler was not run).
        """
        del input_names, output_names
        options = option_values(arguments)
        try:
            native_int64 = options.get("--native-int64") == "enabled"
            check_module(module, target=self._target, native_int64=native_int64)
            file_name, data = module_file(module, self.input_format, native_int64=native_int64)
        except ModuleRefusal as refusal:
            raise CompileError(
                f"bucket {bucket}: {Outcome.MODULE_REFUSED} {self.target}: {refusal.reason}; "
                f"{refusal.advice}",
                bucket=bucket,
                command=None,
                exit_code=None,
                log_path=None,
                reason=refusal.reason,
                outcome=Outcome.MODULE_REFUSED,
                code=None,
                advice=refusal.advice,
                source=None,
                work_folder=None,
            ) from refusal
        if self._work_root is not None:
            self._work_root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"neuronx-cc-{_plain(bucket)}-", dir=self._work_root))
        (folder / file_name).write_bytes(data)
        run = _Run(self, bucket, folder, file_name, arguments, lnc=_lnc(options, self._target))
        neff = run.neff(module)
        shutil.rmtree(folder, ignore_errors=True)
        return neff

    def note(self, bucket: str, child: ChildRun) -> None:
        """Keep and log what a run took."""
        with self._counting:
            self.runs[bucket] = child
        logger.info(
            "neuronx-cc compiled %s in %.1f s (processor %.1f s, peak memory %.0f MiB)",
            bucket,
            child.wall_s,
            child.cpu_s,
            child.peak_bytes / (1 << 20),
        )


class _Run:
    """One run of the compiler; on failure its folder stays and is named."""

    def __init__(
        self,
        compiler: NeuronxCompiler,
        bucket: str,
        folder: Path,
        file_name: str,
        arguments: tuple[str, ...],
        *,
        lnc: int,
    ) -> None:
        self._compiler = compiler
        self._bucket = bucket
        self._folder = folder
        self._lnc = lnc
        self._child: ChildRun | None = None
        self._command = (
            *(str(compiler.installation.executable), "compile", file_name),
            *arguments,
            *("--output", _NEFF, "--logfile", _LOG),
        )
        (folder / "command.txt").write_text(shlex.join(self._command) + "\n")

    def neff(self, module: LoweredModule) -> bytes:
        # The flags are on the command line; a compiler that read the variable would apply it twice.
        environment = {k: v for k, v in os.environ.items() if k != "NEURON_CC_FLAGS"}
        try:
            child = run_child(
                self._command,
                folder=self._folder,
                output=self._folder / _OUTPUT,
                environment=environment,
                stall_s=self._compiler.stall_s,
                watched=[self._folder / _LOG],
                is_stopped=self._compiler.is_stopped,
            )
        except OSError as error:
            raise self._error(Outcome.NOT_STARTED, str(error), "check the installation") from error
        self._child = child
        if child.stalled:
            raise self._error(
                Outcome.STALLED,
                f"{self._compiler.stall_s:g} s without output and without processor time, after "
                f"{child.wall_s:.0f} s",
                "look at the log for what it waited for; VLLM_NEURON_CC_STALL_TIMEOUT sets the "
                "limit",
            )
        if child.status != 0:
            found = diagnose(child.status, self._log())
            raise self._error(found.outcome, found.how, found.advice, found)
        path = self._folder / _NEFF
        if not path.is_file() or path.stat().st_size == 0:
            raise self._error(
                Outcome.NO_NEFF,
                f"exit code 0, no {_NEFF}",
                "look at the log; a full disk is a common cause",
            )
        data = path.read_bytes()
        self._check(data, module)
        self._compiler.note(self._bucket, child)
        return data

    def _check(self, data: bytes, module: LoweredModule) -> None:
        from vllm_neuron._core import Neff

        try:
            neff = Neff.parse(data, path=str(self._folder / _NEFF), verify_hash=True)
        except NeffError as error:
            raise self._error(
                Outcome.BAD_NEFF, str(error), "compile again; keep the file for a report"
            ) from error
        compiler = self._compiler
        architecture = expected_architecture(target_named(compiler.target), compiler.version)
        if neff.target != architecture:
            raise self._error(
                Outcome.OTHER_TARGET,
                f"expected {architecture} (--target {compiler.target}), found {neff.target!r}",
                "take --target out of NEURON_CC_FLAGS, and check the installation",
            )
        if neff.lnc_size != self._lnc:
            raise self._error(
                Outcome.OTHER_LNC,
                f"expected {self._lnc}, found {neff.lnc_size}",
                "check NEURON_LOGICAL_NC_CONFIG and --lnc in NEURON_CC_FLAGS",
            )
        if difference := _signature_difference(neff, module):
            raise self._error(
                Outcome.OTHER_SIGNATURE, difference, "keep the work folder for a report"
            )

    def _error(
        self, outcome: Outcome, how: str, advice: str, found: Diagnosis | None = None
    ) -> CompileError:
        child = self._child
        log = self._log()
        source = found.source if found is not None else None
        compiler = self._compiler
        text = f"bucket {self._bucket}: {outcome} ({how})"
        if source is not None:
            text += f", at {source} of the model"
        text += f"; {advice}. neuronx-cc {compiler.version}, target {compiler.target}"
        if child is not None:
            text += f", {child.wall_s:.1f} s, peak memory {child.peak_bytes / (1 << 20):.0f} MiB"
        text += f"; kept: {self._folder}"
        if lines := last_lines(log):
            text += "; last lines of its log:\n" + "\n".join(f"  {line}" for line in lines)
        return CompileError(
            text,
            bucket=self._bucket,
            command=self._command,
            exit_code=child.status if child is not None else None,
            log_path=str(self._log_path()),
            reason=how,
            outcome=outcome,
            code=found.code if found is not None else None,
            advice=advice,
            source=source,
            work_folder=str(self._folder),
        )

    def _log_path(self) -> Path:
        own = self._folder / _LOG
        return own if own.is_file() and own.stat().st_size else self._folder / _OUTPUT

    def _log(self) -> str:
        return "\n".join(_end_of(self._folder / name) for name in (_LOG, _OUTPUT))


def _end_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return stream.read().decode(errors="replace")


def _lnc(options: Mapping[str, str | None], target: Target) -> int:
    text = options.get("--logical-nc-config")
    return int(text) if text is not None and text.isdecimal() else target.lnc_sizes[0]


def _signature_difference(neff: Neff, module: LoweredModule) -> str | None:
    """Return how the tensors of a NEFF differ from those of its module, or None.

    Tensors correspond by position: parameter k of the HLO is input k of the signature
    (docs/neff-format.md, evidence E).
    """
    for kind, found, expected in (
        ("input", neff.inputs, module.inputs),
        ("output", neff.outputs, module.outputs),
    ):
        if len(found) != len(expected):
            return f"expected {len(expected)} {kind}s, found {len(found)}"
        for index, (tensor, spec) in enumerate(zip(found, expected, strict=True)):
            legal = {spec.dtype, *_NARROWED.get(spec.dtype, ())}
            if tuple(tensor.shape) != spec.shape or tensor.dtype not in legal:
                return (
                    f"{kind} {index} ({tensor.name}): expected {spec.dtype}{list(spec.shape)}, "
                    f"found {tensor.dtype}{list(tensor.shape)}"
                )
    return None


def _plain(bucket: str) -> str:
    return re.sub(r"[^\w.-]+", "_", bucket)[:80]
