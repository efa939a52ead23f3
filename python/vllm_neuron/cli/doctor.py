"""`vllm-neuron doctor`: what this machine has for a device run, and whether a small graph runs."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_neuron import _core
from vllm_neuron.device import device_directory, neuron_devices
from vllm_neuron.errors import ConfigurationError, NeuronError

if TYPE_CHECKING:
    from vllm_neuron.compiler.module_files import InputFormat
    from vllm_neuron.device_run import DeviceRun

__all__ = ["doctor"]

# state += x in place, and x + x: what a KV cache needs of compiler and runtime, and nothing more.
_MODULE = """
module @doctor { func.func @main(
    %state: tensor<128x64xf32> {tf.aliasing_output = 0 : i32}, %x: tensor<128x64xf32>)
    -> (tensor<128x64xf32>, tensor<128x64xf32>) {
  %0 = stablehlo.add %state, %x : tensor<128x64xf32>
  %1 = stablehlo.add %x, %x : tensor<128x64xf32>
  return %0, %1 : tensor<128x64xf32>, tensor<128x64xf32>
} }
"""
_STABLEHLO_VERSION = "1.0.0"
_SHAPE = (128, 64)
_STEPS = 3
_MARKS = {"ok": "ok  ", "failed": "FAIL", "absent": "none"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: `state` is ok, failed or absent."""

    name: str
    state: str
    text: str


@click.command()
@click.option("--device", is_flag=True, help="Also compile, load and run a small graph.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(*, device: bool, as_json: bool) -> None:
    """Report what this machine has for a run on Neuron devices.

    With --device a small graph goes all the way through neuronx-cc and libnrt, which takes a
    logical core for a moment. Exit code 1 if a check failed.
    """
    checks: list[Check] = []
    for check in _checks(device=device):
        checks.append(check)
        if not as_json:
            click.echo(f"{_MARKS[check.state]}  {check.name}: {check.text}")
    failed = any(check.state == "failed" for check in checks)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=1))
    elif device:
        click.echo(
            "\nPlease send this report back (docs/hardware.md), also if everything is ok: no part "
            "of it was ever seen on a real device."
        )
    sys.exit(1 if failed else 0)


def _checks(*, device: bool) -> Iterator[Check]:
    yield Check(
        "vllm-neuron-rs",
        "ok",
        f"{_core.__version__}, Python {platform.python_version()}, {platform.platform()}",
    )
    nodes = neuron_devices()
    where = device_directory()
    yield Check(
        "device nodes",
        "ok" if nodes else "absent",
        f"{len(nodes)} ({nodes[0]} ...)" if nodes else f"no {where}/neuron0, ...",
    )
    yield _attempt("libnrt", _library)
    yield _attempt("neuronx-cc", _compiler)
    if not device:
        return
    from vllm_neuron.device_run import resolve_device_run
    from vllm_neuron.envs import read_settings

    try:
        run = resolve_device_run(read_settings())
    except (NeuronError, RuntimeError) as error:
        yield Check("device run", "failed", str(error))
        return
    yield Check("device run", "ok", run.describe())
    if run.is_stand_in:
        yield Check("stand-ins", "ok", "compiler or runtime only stand in for the real ones")
    yield from _run_graph(run)


def _attempt(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", find())
    except (NeuronError, ConfigurationError) as error:
        return Check(name, "absent", str(error))


def _library() -> str:
    library = _core.NrtLibrary.open(os.environ.get("VLLM_NEURON_LIBNRT", "").strip() or None)
    numbers, text = library.version()
    parts = [f"{library.path}, version {'.'.join(map(str, numbers))} ({text})"]
    parts.append(f"{library.visible_cores()} of {library.total_cores()} logical cores visible")
    if instance := library.instance():
        family, size, architecture = instance
        parts.append(f"instance family {family}, size {size}, architecture {architecture!r}")
    return "; ".join(parts)


def _compiler() -> str:
    from vllm_neuron.compiler.neuronx_cc import find_neuronx_cc

    found = find_neuronx_cc()
    return (
        f"{found.executable} (by {found.found_by}), version {found.version}, takes StableHLO as "
        f"{found.input_format}"
    )


def _run_graph(run: DeviceRun) -> Iterator[Check]:
    """Compile the graph in both forms, load it, and run it in place."""
    neffs: dict[InputFormat, bytes] = {}
    forms: tuple[InputFormat, ...] = ("stablehlo", "hlo")
    for form in forms:
        started = time.monotonic()
        try:
            neffs[form] = _compile(run, form)
        except NeuronError as error:
            yield Check(f"compile {form}", "failed", str(error))
            continue
        neff = _core.Neff.parse(neffs[form])
        names = ", ".join(tensor.name for tensor in [*neff.inputs, *neff.outputs])
        yield Check(
            f"compile {form}",
            "ok",
            f"{time.monotonic() - started:.1f} s, {len(neffs[form])} bytes, target {neff.target}, "
            f"LNC {neff.lnc_size}, features {neff.feature_bits:#x}, tensors {names}, compiler "
            f"{neff.compiler_version}" + "".join(f"; warning: {text}" for text in neff.warnings),
        )
    if not neffs:
        return
    try:
        runtime = run.runtime(0)
    except (NeuronError, RuntimeError) as error:
        yield Check("initialise", "failed", str(error))
        return
    memory = runtime.library.memory(0)
    yield Check(
        "initialise",
        "ok",
        "memory not told" if memory is None else f"{memory[0]} of {memory[1]} bytes in use",
    )
    for form, compiled in neffs.items():
        try:
            yield Check(f"run {form}", *_execute(runtime, compiled))
        except NeuronError as error:
            yield Check(f"run {form}", "failed", str(error))


def _compile(run: DeviceRun, form: InputFormat) -> bytes:
    from jaxlib import _jax

    from vllm_neuron.compiler.arguments import compiler_arguments
    from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler
    from vllm_neuron.lowering.module import LoweredModule
    from vllm_neuron.trace_record import TensorSpec

    specs = (TensorSpec(_SHAPE, "float32"),) * 2
    data = _jax.mlir.serialize_portable_artifact(_MODULE, _STABLEHLO_VERSION)
    module = LoweredModule("native", data, specs, specs, {0: 0})
    compiler = NeuronxCompiler(
        target=run.target,
        input_format=form,
        stall_s=run.stall_s,
        work_root=Path(tempfile.gettempdir()) / "vllm-neuron-doctor",
    )
    arguments = compiler_arguments(
        2, extra=os.environ.get("NEURON_CC_FLAGS"), target=run.target, lnc=run.lnc
    )
    return compiler.compile(
        module,
        bucket=f"doctor_{form}",
        arguments=arguments.arguments,
        input_names=("state", "x"),
        output_names=("updated", "doubled"),
    )


def _execute(runtime: Any, neff: bytes) -> tuple[str, str]:
    """Run some steps; returns the state of the check and its text."""
    import torch

    model = runtime.load(neff, aliases={0: 0}, bucket="doctor")
    state = runtime.upload(torch.zeros(_SHAPE))
    step = model.bind({0: state})
    x = torch.arange(float(_SHAPE[0] * _SHAPE[1])).view(_SHAPE) / 64
    started = time.monotonic()
    for _ in range(_STEPS):
        _, doubled = step.execute([x])
    seconds = (time.monotonic() - started) / _STEPS
    for what, found, expected in (
        ("the tensor that is updated in place", state.read(), x * _STEPS),
        ("the other output", doubled.read(), x * 2),
    ):
        if not torch.equal(found, expected):
            difference = (found - expected).abs().max().item()
            return "failed", f"{what} is wrong by up to {difference:g}"
    return "ok", f"{_STEPS} steps, {seconds * 1e3:.2f} ms each, right, and in place"
