"""Run module cases on a compilation route against eager and print a table.

    python tests/run_cases.py --route native [--chain compile|capture] [--json FILE] PATH...

A case is a Python file with `make()` and the optional names that the README of the case collection
explains. Each runs in a process of its own, so that one that dies is a row. The rows say:

    pass     equal to eager in returned values, updated inputs and buffers, at every call
    refused  an error that says why; `allowed` is whether the case's header permits that
    wrong    another value, dtype, shape or effect than eager
    died     the process ended or ran out of time

Exit code 0 if nothing is wrong or died, except what `--expected` names.

The chain `compile` is `torch.compile(backend=...)` with the route's backend, as for a user;
`capture` is the one of the server: capture, lower, compile for the host emulator, load, run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_BACKENDS = {"native": "neuron_native", "xla": "vllm_neuron"}
_RESULT = "RESULT "


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--route", choices=sorted(_BACKENDS), default="native")
    parser.add_argument("--chain", choices=("compile", "capture"), default="compile")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one case")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))))
    parser.add_argument("--expected", default="", help="names that may fail, separated by commas")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    options = parser.parse_args(argv)
    if options.one:
        row = run_case(options.paths[0], route=options.route, chain=options.chain)
        print(_RESULT + json.dumps(row), flush=True)
        return 0
    rows = run_all(
        collect(options.paths),
        route=options.route,
        chain=options.chain,
        timeout_s=options.timeout,
        jobs=options.jobs,
        report=print_row,
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    counts = dict.fromkeys(("pass", "refused", "wrong", "died"), 0)
    for row in rows:
        counts[row["status"]] += 1
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    expected = set(filter(None, options.expected.split(",")))
    bad = [row for row in rows if row["status"] in ("wrong", "died")]
    return 1 if any(not expected & {row["case"], row["case"][:2]} for row in bad) else 0


def collect(paths: Sequence[Path]) -> list[Path]:
    """The case files among paths; folders are searched for `*.py` of any depth."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = [file for file in sorted(path.rglob("*.py")) if not file.name.startswith("_")]
            files += [file for file in found if "def make(" in file.read_text()]
        else:
            files.append(path)
    return files


def run_all(
    files: Sequence[Path],
    *,
    route: str,
    chain: str,
    timeout_s: float,
    jobs: int,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Run each file in its own process, `jobs` at a time; rows in the order of the files."""

    def run(file: Path) -> dict[str, Any]:
        command = [sys.executable, str(Path(__file__).resolve()), "--one"]
        command += ["--route", route, "--chain", chain, str(file)]
        environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "1", **os.environ}
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, env=environment
            )
        except subprocess.TimeoutExpired:
            row = _row(file, "died", reason=f"no result after {timeout_s:.0f} s")
        else:
            lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
            if lines:
                row = json.loads(lines[-1].removeprefix(_RESULT))
            else:
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                row = _row(file, "died", reason=f"exit code {done.returncode}: {last}")
        row["seconds"] = round(time.monotonic() - started, 1)
        return row

    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(run, files):
            report(row)
            rows.append(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    status = row["status"]
    if status == "refused" and not row["allowed"]:
        status = "refused!"
    difference = "" if row["difference"] is None else f"{row['difference']:.2e}"
    text = (
        f"{row['case'][:40]:40} {status:8} {difference:>9} {row['seconds']:6.1f}s  {row['reason']}"
    )
    print(text.rstrip(), flush=True)


def _row(file: Path, status: str, **fields: Any) -> dict[str, Any]:
    row = {"case": file.stem, "status": status, "allowed": None, "difference": None, "reason": ""}
    return row | fields


# --- in the process of one case -------------------------------------------------------------


class Difference(Exception):
    """The route and eager disagree."""


def run_case(file: Path, *, route: str, chain: str) -> dict[str, Any]:
    """Run both variants of one case in this process."""
    import torch

    from vllm_neuron.errors import NeuronError

    spec = importlib.util.spec_from_file_location("case", file)
    case = importlib.util.module_from_spec(spec)
    sys.modules["case"] = case
    spec.loader.exec_module(case)
    allowed = bool(getattr(case, "MAY_REFUSE", False))
    variants = [name for name in ("make", "make_b") if hasattr(case, name)]
    largest = 0.0
    for variant in variants:
        try:
            with torch.no_grad():
                largest = max(largest, _run_variant(case, variant, route, chain))
        except Difference as error:
            return _row(file, "wrong", reason=f"{variant}: {error}", difference=largest)
        except (NeuronError, torch._dynamo.exc.TorchDynamoException) as error:
            inner = getattr(error, "inner_exception", error)
            refusals = (NeuronError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
            if not isinstance(inner, refusals):
                raise
            reason = " ".join(str(inner).split())[:500]
            return _row(file, "refused", reason=f"{variant}: {reason}", allowed=allowed)
    return _row(file, "pass", difference=largest)


def _run_variant(case: Any, variant: str, route: str, chain: str) -> float:

    make = getattr(case, variant)
    random = getattr(case, "RANDOM", False)
    module, inputs = make()
    eager_module, eager_inputs = make()
    module, eager_module = module.eval(), eager_module.eval()
    start = _Snapshot(module, inputs)
    compiled = _compiled(case, module, inputs, route, chain)
    largest, previous, out = 0.0, None, None
    for call in range(getattr(case, "CALLS", 1)):
        expected = eager_module(*eager_inputs)
        out = compiled(*inputs)
        if random:
            _compare_kinds(expected, out)
            if previous is not None and _equal(previous, out):
                raise Difference(f"call {call} drew the numbers of the call before")
            previous = out
            continue
        left = (expected, eager_inputs, dict(eager_module.named_buffers()))
        right = (out, inputs, dict(module.named_buffers()))
        largest = max(largest, _compare(left, right, getattr(case, "TOL", (1e-5, 1e-5))))
    mutates = getattr(case, "MUTATES_B" if variant == "make_b" else "MUTATES", None)
    if mutates is None:
        mutates = getattr(case, "MUTATES", [])
    unchanged = [name for name in mutates if not start.changed(name)]
    if unchanged:
        raise Difference(f"{', '.join(unchanged)} should have changed")
    if variant == "make" and hasattr(case, "verify"):
        try:
            case.verify(out, module, inputs)
        except AssertionError as error:
            raise Difference(f"verify failed {error}".rstrip()) from error
    if variant == "make" and hasattr(case, "LENGTHS"):
        largest = max(largest, _run_lengths(case, route, chain))
    return largest


class _Snapshot:
    """Values of inputs and buffers before the first call."""

    def __init__(self, module: Any, inputs: Sequence[Any]) -> None:
        import torch

        self._tensors = {f"in:{i}": x for i, x in enumerate(inputs) if torch.is_tensor(x)}
        self._module = module
        self._before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._before |= {f"buf:{n}": t.clone() for n, t in module.named_buffers()}

    def changed(self, name: str) -> bool:
        kind, _, key = name.partition(":")
        now = self._tensors[name] if kind == "in" else self._module.get_buffer(key)
        return not _equal(now, self._before[name])


def _compiled(
    case: Any, module: Any, inputs: Sequence[Any], route: str, chain: str
) -> Callable[..., Any]:
    import torch

    if chain == "compile":
        fullgraph = getattr(case, "FULLGRAPH", True)
        backend = _BACKENDS[route]
        return torch.compile(module, backend=backend, fullgraph=fullgraph, dynamic=False)
    return _captured(module, tuple(inputs), route)


def _captured(module: Any, inputs: tuple[Any, ...], route: str) -> Callable[..., Any]:
    """The server's chain without its caches."""
    from vllm_neuron.binding import argument_leaves, find_tensor
    from vllm_neuron.capture import capture
    from vllm_neuron.compiler.host import HostCompiler
    from vllm_neuron.envs import read_settings
    from vllm_neuron.lowering import lowering_for
    from vllm_neuron.route import Route
    from vllm_neuron.runtime.host import HostRuntime

    captured = capture(module, inputs, bucket="case")
    record = captured.record

    def bound(args: Sequence[Any]) -> list[Any]:
        leaves = dict(argument_leaves(module, args))
        return [
            leaves[item.name] if item.kind == "argument" else find_tensor(module, item.name)
            for item in record.inputs
        ]

    lowering = lowering_for(
        Route[route.upper()],
        xla_python=read_settings()["VLLM_NEURON_XLA_PYTHON"],
        logger=logging.getLogger(__name__),
    )
    try:
        lowered = lowering.lower(captured, bucket="case")
    finally:
        lowering.close()
    if not lowered.outputs:
        return lambda *args: record.rebuild_result([], bound(args))
    neff = HostCompiler().compile(
        lowered,
        bucket="case",
        arguments=("-O2",),
        input_names=[f"input{index}" for index in range(len(record.inputs))],
        output_names=[f"output{index}" for index in range(len(record.outputs))],
    )
    model = HostRuntime().load(neff, aliases=lowered.aliases, bucket="case")

    def call(*args: Any) -> Any:
        tensors = bound(args)
        outputs = [output.read() for output in model.execute(tensors)]
        return record.rebuild_result(outputs, tensors)

    return call


def _run_lengths(case: Any, route: str, chain: str) -> float:
    """Every length through one bucket: padded with garbage rows, the true rows equal eager's."""
    import torch

    bucket = max(case.LENGTHS)
    module, _ = case.make()
    module = module.eval()
    compiled = _compiled(case, module, case.inputs_for(bucket), route, chain)
    largest = 0.0
    for length in case.LENGTHS:
        inputs = case.inputs_for(length)
        padded = tuple(_padded(x, length, bucket) if torch.is_tensor(x) else x for x in inputs)
        expected, out = module(*inputs), compiled(*padded)
        cut = out[:length] if torch.is_tensor(out) else [item[:length] for item in out]
        largest = max(largest, _compare(expected, cut, getattr(case, "TOL", (1e-5, 1e-5))))
    return largest


def _padded(tensor: Any, length: int, bucket: int) -> Any:
    import torch

    if not tensor.ndim or tensor.shape[0] != length:
        return tensor
    garbage = torch.full((bucket - length, *tensor.shape[1:]), 7, dtype=tensor.dtype)
    return torch.cat([tensor, garbage])


def _leaves(tree: Any) -> list[Any]:
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def _equal(left: Any, right: Any) -> bool:
    import torch

    pairs = zip(_leaves(left), _leaves(right), strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def _compare_kinds(expected: Any, out: Any) -> None:
    import torch

    for index, (a, b) in enumerate(zip(_leaves(expected), _leaves(out), strict=True)):
        if torch.is_tensor(a) and (a.shape, a.dtype) != (b.shape, b.dtype):
            raise Difference(
                f"value {index}: {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
            )


def _compare(expected: Any, out: Any, tolerance: tuple[float, float]) -> float:
    """The largest absolute difference of two trees.

    Raises:
        Difference: one exceeds the tolerance, or kinds differ.
    """
    import torch

    left, right = _leaves(expected), _leaves(out)
    if len(left) != len(right):
        raise Difference(f"{len(right)} values, expected {len(left)}")
    _compare_kinds(left, right)
    largest = 0.0
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if not torch.is_tensor(a):
            if a != b and not (a != a and b != b):
                raise Difference(f"value {index} is {b!r}, expected {a!r}")
            continue
        if a.is_complex():
            a, b = (torch.view_as_real(item.resolve_conj()) for item in (a, b))
        wide = torch.float64 if a.dtype.is_floating_point else torch.int64
        a, b = a.to(wide), b.to(wide)
        if wide is torch.int64:
            close = (a == b) if tolerance == (0, 0) else torch.isclose(a, b, *tolerance)
        else:
            close = torch.isclose(b, a, *tolerance, equal_nan=True)
        difference = (a - b).abs()
        finite = difference[difference.isfinite()] if wide is torch.float64 else difference
        worst = float(finite.max()) if finite.numel() else 0.0
        if not bool(close.all()):
            where = [int(i) for i in (~close).nonzero()[0]]
            at = a[tuple(where)].item(), b[tuple(where)].item()
            text = f"value {index} at {where}: {at[1]}, expected {at[0]}"
            raise Difference(f"{text}; largest difference {worst:.3g}")
        largest = max(largest, worst)
    return largest


if __name__ == "__main__":
    sys.exit(main())
