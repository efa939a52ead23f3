"""`vllm-neuron xla-env`: make, check and remove the interpreter of the XLA route's worker."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_neuron import envs, xla_environment
from vllm_neuron.errors import NeuronError
from vllm_neuron.lowering import xla_interpreter
from vllm_neuron.lowering.xla import XlaLowering

__all__ = ["xla_env"]

_PATH = click.argument("path", type=click.Path(file_okay=False, path_type=Path), required=False)


@click.group("xla-env")
def xla_env() -> None:
    """The environment of the XLA route's worker: torch 2.9.1 and torch-xla 2.9.0.

    PATH is $XDG_DATA_HOME/vllm-neuron/xla-env (~/.local/share/...) unless it is given. A server
    finds that one by itself; for another set VLLM_NEURON_XLA_PYTHON=PATH/bin/python.
    """


@xla_env.command()
@_PATH
@click.option("--full", is_flag=True, help="With the CUDA libraries: 7.1 GB instead of 2.2 GB.")
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CPython 3.11 to base it on (default: this one, or python3.11 of the PATH).",
)
def create(path: Path | None, *, full: bool, python: Path | None) -> None:
    """Make the environment, or do nothing where it is there and sound.

    Without --full, stubs stand in for the CUDA libraries that torch links, and no GPU is visible
    in the environment.
    """
    path = (path or xla_interpreter.default_environment()).absolute()
    kind = xla_environment.FULL if full else xla_environment.SMALL
    if xla_environment.is_environment(path):
        _check(path / "bin" / "python")
        return
    click.echo(
        f"{path}: torch 2.9.1 and torch-xla 2.9.0 {kind.name}, "
        f"{kind.disk_bytes / 1e9:.1f} GB on disk, {kind.download_bytes / 1e9:.1f} GB to download."
    )
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=None)

            def report(step: str) -> None:
                progress.update(task, description=step)
                if not console.is_terminal:
                    click.echo(step)

            xla_environment.create(path, kind, python=python, report=report)
    except subprocess.CalledProcessError as error:
        raise click.ClickException(
            f"{path}: {' '.join(map(str, error.cmd[:4]))} ... ended with exit code "
            f"{error.returncode}:\n{error.output}"
        ) from error
    except NeuronError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"made in {time.monotonic() - started:.0f} s")
    _check(path / "bin" / "python")


@xla_env.command()
@_PATH
def check(path: Path | None) -> None:
    """Start the worker and have it lower a graph. The exit code is 0 if that works.

    Without PATH, the interpreter that a server would take is checked.
    """
    _check(path.absolute() / "bin" / "python" if path is not None else None)


@xla_env.command()
@_PATH
def remove(path: Path | None) -> None:
    """Delete an environment that `create` made; nothing else is ever deleted."""
    path = (path or xla_interpreter.default_environment()).absolute()
    try:
        xla_environment.remove(path)
    except NeuronError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"removed {path}")


def _check(python: Path | None) -> None:
    try:
        if python is None:
            found = xla_interpreter.find(envs.read_settings()[xla_interpreter.PYTHON_VARIABLE])
        else:
            found = xla_interpreter.probe(python, origin="named")
        with XlaLowering(found, logger=logging.getLogger(__name__)) as lowering:
            answer = lowering.check()
    except NeuronError as error:
        raise click.ClickException(str(error)) from error
    if "module" not in answer:
        click.echo(f"{found.path}: the worker does not lower a graph: {answer['reason']}", err=True)
        sys.exit(1)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    click.echo(
        f"{found.path} works: {versions}; "
        f"{answer['peak_memory_bytes'] / (1 << 20):.0f} MiB of memory"
    )
