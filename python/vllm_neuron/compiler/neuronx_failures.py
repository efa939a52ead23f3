"""What a failed run of neuronx-cc means: its outcome, its NCC code, the model line, the advice.

Sources of the codes: AWS's list of compiler errors and public reports (spec section 10.2).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Diagnosis", "Outcome", "diagnose", "last_lines"]


class Outcome(StrEnum):
    """How a compilation ended, other than with a NEFF; the values are texts for people."""

    MODULE_REFUSED = "the module cannot be compiled for this target"
    NOT_STARTED = "the compiler cannot be started"
    BAD_ARGUMENT = "the compiler refuses its command line"
    UNSUPPORTED_OPERATOR = "the module has an operator that the compiler does not support"
    DEVICE_MEMORY = "the graph does not fit the device memory"
    COMPILE_ERROR = "the compiler refuses the module"
    INTERNAL_ERROR = "internal error of the compiler"
    HOST_MEMORY = "the compiler was killed, most likely because this machine ran out of memory"
    ABORTED = "the compiler aborted"
    SEGMENTATION_FAULT = "the compiler crashed with a segmentation fault"
    KILLED = "the compiler was ended by a signal"
    STALLED = "the compiler made no progress and was killed"
    NO_NEFF = "the compiler reported success but wrote no NEFF"
    BAD_NEFF = "the compiler wrote something that is not a sound NEFF"
    OTHER_TARGET = "the compiler wrote a NEFF for another target"
    OTHER_LNC = "the compiler wrote a NEFF for another logical core size"
    OTHER_SIGNATURE = "the compiler wrote a NEFF with other inputs or outputs"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is known of a failed run.

    Attributes:
        outcome: the kind of failure.
        how: the exit code or signal, and the NCC code if there is one.
        advice: what to do.
        code: the NCC code such as `NCC_EVRF009`, or None.
        signal: the number of the signal that ended the compiler or a part of it, or None.
        source: `file:line` of the model that the log names, or None.
    """

    outcome: Outcome
    how: str
    advice: str
    code: str | None
    signal: int | None
    source: str | None


_DEVICE_MEMORY = (
    "lower VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION, --gpu-memory-utilization, --max-model-len or "
    "--max-num-seqs"
)
_TOO_LARGE = (
    "the graph has too many instructions: use smaller buckets, decode_context_length_buckets or "
    "a larger --tensor-parallel-size"
)
_OPERATOR = "`neuronx-cc list-operators --framework XLA` shows what is supported"
_DTYPE = "a dtype is not supported on this target; the fp8 rules of trn2 and trn3 differ"
_DOWNCAST = (
    "an integer downcast is not allowed here: see --implicit-integer-downcast in NEURON_CC_FLAGS"
)
_CUSTOM_CALL = "unknown custom call: the versions of NKI, neuronx-cc and vllm-neuron do not fit"
_REPORT = (
    "an error inside the compiler: keep the work folder for a report and try another level "
    "(-O1 or -O3)"
)

_ADVICE: dict[str, tuple[Outcome, str]] = {
    "EARG001": (
        Outcome.BAD_ARGUMENT,
        "the target does not have this logical core size: check NEURON_LOGICAL_NC_CONFIG and the "
        "target",
    ),
    "EMOD025": (
        Outcome.COMPILE_ERROR,
        "a shape is dynamic: buckets must be lists of fixed sizes",
    ),
    **dict.fromkeys(
        ("EOOM001", "EOOM002", "EVRF009", "EXSP001"), (Outcome.DEVICE_MEMORY, _DEVICE_MEMORY)
    ),
    **dict.fromkeys(("EBVF030", "EVRF007", "EXTP004"), (Outcome.COMPILE_ERROR, _TOO_LARGE)),
    **dict.fromkeys(("EUOC002", "EVRF001"), (Outcome.UNSUPPORTED_OPERATOR, _OPERATOR)),
    **dict.fromkeys(
        ("ESPP004", "ESPP047", "EVRF004", "EVRF005", "EVRF051", "EVRF052"),
        (Outcome.COMPILE_ERROR, _DTYPE),
    ),
    **dict.fromkeys(
        ("EVRF035", "EVRF060", "EVRF061", "EVRF062", "EVRF063"),
        (Outcome.COMPILE_ERROR, _DOWNCAST),
    ),
    **dict.fromkeys(("EHCA005", "EVRF015"), (Outcome.COMPILE_ERROR, _CUSTOM_CALL)),
    "EVRF056": (
        Outcome.COMPILE_ERROR,
        "a gather is out of bounds: a bucket is larger than max_position_embeddings",
    ),
    "EVRF059": (
        Outcome.COMPILE_ERROR,
        "the file of an NKI kernel is missing: clear NKI's cache and trace again",
    ),
    "EVRF064": (
        Outcome.COMPILE_ERROR,
        "the module does not pass HLO verification, a defect of the lowering: keep the work folder "
        "for a report",
    ),
    "EVRF065": (
        Outcome.COMPILE_ERROR,
        "the NKI version of the traced kernel is not supported: upgrade NKI and trace again",
    ),
    "EBIR023": (
        Outcome.COMPILE_ERROR,
        "an intermediate of the MLP kernel is larger than 4096: use a larger "
        "--tensor-parallel-size",
    ),
    "ITEN406": (
        Outcome.COMPILE_ERROR,
        "a print or a strided access is in the graph: remove prints from the model",
    ),
    **dict.fromkeys(
        ("IBTN006", "ITIN902", "INLA001", "EOCP001", "EVRF029"),
        (Outcome.INTERNAL_ERROR, _REPORT),
    ),
}

_CODE = re.compile(r"NCC_(?P<code>[A-Z]{4}\d{3})")
# neuronx-cc reports a part of it that died of signal n as [F<128+n>].
_FATAL = re.compile(r"\[F(?P<status>1(?:2[89]|[3-5]\d))\]")
_USAGE = re.compile(
    r"unrecognized arguments?:|invalid choice:|the following arguments are required|"
    r"expected one argument|ambiguous option"
)
_NO_MEMORY = re.compile(r"std::bad_alloc|\bMemoryError\b|Cannot allocate memory")
_SOURCES = (
    re.compile(r'source_file="(?P<file>[^"]+)"[^\n]*?source_line=(?P<line>\d+)'),
    re.compile(r'loc\("(?P<file>[^"\n]+)":(?P<line>\d+)'),
    re.compile(r"(?P<file>[\w./+-]+\.py):(?P<line>\d+)"),
)
_SIGNAL_OUTCOMES = {
    signal.SIGKILL: (
        Outcome.HOST_MEMORY,
        "use fewer compilers at a time (NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS), a smaller "
        "bucket, a lower level, or a machine with more memory",
    ),
    signal.SIGABRT: (Outcome.ABORTED, _REPORT),
    signal.SIGSEGV: (Outcome.SEGMENTATION_FAULT, _REPORT),
}
_TAIL_LINES = 20
_TAIL_WIDTH = 300
_INTERNAL_EXIT_CODE = 70
_USAGE_EXIT_CODE = 2


def diagnose(status: int, log: str) -> Diagnosis:
    """Tell what a failed run means.

    Args:
        status: a non-zero exit code, or minus the number of the signal that ended the compiler.
        log: what it wrote.
    """
    codes = _CODE.findall(log)
    code = f"NCC_{codes[-1]}" if codes else None
    number = _signal_in(status, log)
    how = f"signal {_signal_name(-status)}" if status < 0 else f"exit code {status}"
    if number is not None and status > 0:
        how += f", a part of it ended by {_signal_name(number)}"
    if code is not None:
        how += f", {code}"
    outcome, advice = _classify(status, number, codes[-1] if codes else None, log)
    return Diagnosis(outcome, how, advice, code, number, _source_in(log))


def _classify(status: int, number: int | None, code: str | None, log: str) -> tuple[Outcome, str]:
    if number is not None:
        return _SIGNAL_OUTCOMES.get(
            signal.Signals(number),
            (Outcome.KILLED, "find out who sent the signal, and start again"),
        )
    if code in _ADVICE:
        return _ADVICE[code]
    if _USAGE.search(log) or status == _USAGE_EXIT_CODE:
        return Outcome.BAD_ARGUMENT, "check the options in NEURON_CC_FLAGS"
    if _NO_MEMORY.search(log):
        return _SIGNAL_OUTCOMES[signal.SIGKILL]
    if status == _INTERNAL_EXIT_CODE or (code is not None and code.startswith("I")):
        return Outcome.INTERNAL_ERROR, _REPORT
    return Outcome.COMPILE_ERROR, "the log says more; keep the work folder for a report"


def _signal_in(status: int, log: str) -> int | None:
    """Return the signal that ended the compiler or, by its report, a part of it."""
    if status < 0:
        return -status
    candidates = [*[int(text) for text in _FATAL.findall(log)][-1:], status]
    for candidate in candidates:
        if candidate > 128 and candidate - 128 in set(signal.Signals):
            return candidate - 128
    return None


def _signal_name(number: int) -> str:
    return (
        f"{number} ({signal.Signals(number).name})"
        if number in set(signal.Signals)
        else str(number)
    )


def _source_in(log: str) -> str | None:
    for pattern in _SOURCES:
        for match in reversed(list(pattern.finditer(log))):
            # Lines of the compiler's own sources are not lines of the model.
            if "neuronxcc" not in match["file"]:
                return f"{match['file']}:{match['line']}"
    return None


def last_lines(log: str) -> list[str]:
    """Return the last lines of a log that are not empty, each cut to a readable width."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()][-_TAIL_LINES:]
    return [
        line if len(line) <= _TAIL_WIDTH else line[: _TAIL_WIDTH - 4] + " ..." for line in lines
    ]
