"""`vllm-neuron compare`: where the native and the XLA route differ from eager on a model."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vllm_neuron.errors import ConfigurationError, NeuronError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_neuron.comparison.report import Report

__all__ = ["compare"]

DEFAULT_PROMPTS = (
    "The",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a compiler that lowered every operator in turn. It took a graph "
    "of tensors, and for each node it asked",
)
ROUTES = ("native", "xla")


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="A prompt; may be given again.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts, one a line.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Tokens to generate after each prompt.",
)
@click.option(
    "--route",
    "routes",
    multiple=True,
    type=click.Choice(ROUTES),
    help="Compare this route only; may be given again (default: both).",
)
@click.option("--dtype", default="auto", show_default=True, help="As of vllm serve.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    help="As of vllm serve (default: what the prompts need).",
)
@click.option("--additional-config", help="As of vllm serve: JSON with the bucket lists.")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Relative difference at which a route parts from eager (default: by dtype).",
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON."
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw difference against depth: a .png or .svg file.",
)
def compare(
    model: Path,
    *,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    tokens: int,
    routes: tuple[str, ...],
    dtype: str,
    max_model_len: int | None,
    additional_config: str | None,
    tolerance: float | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Run MODEL, a checkpoint folder, on the same prompts by each route and eagerly.

    Shows by bucket and by layer how far the routes are from eager, where they first part, and the
    operator at fault. The host emulator runs the graphs. Without a worker environment for the XLA
    route, the native route is compared alone.

    Exit code 0 if they agree, 1 if one parts from eager, 2 if nothing could be compared.
    """
    try:
        if plot_path is not None:
            from vllm_neuron.comparison.plot import check_plot

            check_plot(plot_path)
        given = _prompts(prompts, prompts_file)
        report = _compare(
            model.resolve(),
            given,
            tokens=tokens,
            routes=routes or ROUTES,
            options={
                "dtype": dtype,
                "max_model_len": max_model_len,
                "additional_config": _json_object(additional_config),
            },
            tolerance=tolerance,
        )
        _write(report, json_path, plot_path)
    except (NeuronError, OSError, ValueError) as error:
        _fail(str(error))
    sys.exit(0 if report.agrees else 1)


def _compare(
    model: Path,
    prompts: Sequence[str],
    *,
    tokens: int,
    routes: Sequence[str],
    options: dict[str, Any],
    tolerance: float | None,
) -> Report:
    from vllm_neuron.comparison.model import loaded_runner, prepare_process, tokenize

    _check_packages()
    prepare_process()
    _say("loading vLLM and the model")
    from vllm_neuron.comparison.calls import Schedule
    from vllm_neuron.comparison.measures import DEFAULT_TOLERANCES
    from vllm_neuron.comparison.report import Report
    from vllm_neuron.comparison.routes import GraphInputs, RouteCompiler
    from vllm_neuron.comparison.session import ComparisonSession
    from vllm_neuron.envs import read_settings
    from vllm_neuron.route import Route
    from vllm_neuron.runtime.host import HostRuntime

    ids = tokenize(str(model), prompts)
    for text, sequence in zip(prompts, ids, strict=True):
        if not sequence:
            raise ValueError(f"the prompt {text!r} has no tokens")
    options = _fitting(options, ids, tokens)
    settings = read_settings()
    runtime = HostRuntime()
    inputs = GraphInputs(runtime)
    compilers: dict[str, RouteCompiler] = {}
    left_out: dict[str, str] = {}
    for name in routes:
        route = Route.XLA if name == "xla" else Route.NATIVE
        try:
            compilers[route.value] = RouteCompiler(
                route,
                xla_python=settings["VLLM_NEURON_XLA_PYTHON"],
                runtime=runtime,
                inputs=inputs,
            )
        except ConfigurationError as error:
            if route is Route.NATIVE or len(routes) == 1:
                raise
            left_out[route.value] = str(error)
            _say(f"{route.value} is left out: {error}")
    try:
        with loaded_runner(str(model), options) as runner:
            name = str(runner.model_config.dtype).removeprefix("torch.")
            limit = DEFAULT_TOLERANCES[name] if tolerance is None else tolerance
            session = ComparisonSession(runner, compilers, inputs, tolerance=limit, report=_say)
            block_size = runner.vllm_config.cache_config.block_size
            session.run(Schedule(ids, runner.buckets, block_size=block_size), tokens)
    finally:
        for compiler in compilers.values():
            compiler.close()
    return Report.of(
        session,
        model=str(model),
        dtype=name,
        tolerance=limit,
        prompts=ids,
        tokens=tokens,
        left_out=left_out,
        routes=list(compilers),
    )


def _check_packages() -> None:
    """See that the environment can serve.

    Raises:
        ConfigurationError: a package is missing or too old.
    """
    if find_spec("vllm") is None:
        raise ConfigurationError(
            "compare runs vLLM's own model, and vllm is not installed in this environment "
            f"({sys.prefix}). README.md lists what serving needs.",
            name="vllm",
            value=None,
        )
    from vllm_neuron.requirements import check_packages

    for extra in ("serve", "native"):
        for warning in check_packages(extra):
            _say(warning)


def _fitting(
    options: dict[str, Any], prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """Engine options for these prompts: no longer and no wider than they need."""
    needed = max(map(len, prompts)) + tokens
    length = options["max_model_len"] or -(-needed // 128) * 128
    if needed > length:
        raise ValueError(
            f"--max-model-len {length}: the longest prompt and {tokens} generated tokens need "
            f"{needed}"
        )
    fitting = {
        **options,
        "max_model_len": length,
        "max_num_batched_tokens": length,
        "max_num_seqs": len(prompts),
        # The least that vLLM takes; the comparison has KV caches of its own.
        "num_gpu_blocks_override": 2 + length // 16,
    }
    return {key: value for key, value in fitting.items() if value is not None}


def _prompts(given: Sequence[str], file: Path | None) -> list[str]:
    found = list(given)
    if file is not None:
        found += [line for line in file.read_text().splitlines() if line.strip()]
        if not found:
            raise ValueError(f"{file}: no prompts; expected one a line")
    return found or list(DEFAULT_PROMPTS)


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--additional-config is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--additional-config is {text}, expected a JSON object")
    return found


def _write(report: Report, json_path: Path | None, plot_path: Path | None) -> None:
    from rich.console import Console

    report.print(Console())
    if json_path is not None:
        json_path.write_text(json.dumps(report.tree, indent=1, allow_nan=False) + "\n")
    if plot_path is not None:
        from vllm_neuron.comparison.plot import write_plot

        write_plot(report.tree, plot_path)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _fail(text: str) -> NoReturn:
    click.echo(f"Error: {text}", err=True)
    sys.exit(2)
