"""Starts in the real vLLM up to the engine configuration, many in one child process.

    with Starts(checkpoint, first_import="vllm.entrypoints.llm") as starts:
        start = starts.cli("-O2", environ={"VLLM_NEURON_BACKEND": "neuron"})
        assert start.lines == [("INFO", "..."), ...]

The child imports vLLM once (some ten seconds) and then builds configurations as `vllm serve` and
`EngineArgs(...)` do. The environment of each start is given with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from tests.serving import server_environment

ENUM = "OptimizationLevel."


@dataclass(frozen=True, slots=True)
class Start:
    """What one start did.

    Attributes:
        lines: level name and text of what the plugin logged.
        error: class name, text and attribute `name` of the exception, or None.
        record: the fields of the route record, or None after an error.
        config: values of the engine configuration, or None after an error.
    """

    lines: list[tuple[str, str]]
    error: dict[str, str] | None
    record: dict[str, Any] | None
    config: dict[str, Any] | None

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.lines]


class Starts:
    """The child process; `first_import` is the module of vLLM that it imports first."""

    def __init__(self, model: Path, *, first_import: str, folder: Path) -> None:
        self._log = (folder / "starts.log").open("wb")
        environ = server_environment({}, cache_root=folder / "cache")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.starts", str(model), first_import],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environ,
            cwd=Path(__file__).parent.parent,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def cli(self, *arguments: str, **options: Any) -> Start:
        """A start by the command line `vllm serve MODEL ARGUMENTS...`."""
        return self._ask(cli=arguments, **options)

    def api(self, *, environ: dict[str, str] | None = None, **engine_args: Any) -> Start:
        """A start by `EngineArgs(...)`; a text `OptimizationLevel.X` means that enum member."""
        return self._ask(api=engine_args, environ=environ)

    def carry(self) -> dict[str, Any]:
        """Which ways of copying the configuration keep the record, see `_carry`."""
        return self._exchange({"carry": True})

    def _ask(self, *, environ: dict[str, str] | None = None, **request: Any) -> Start:
        answer = self._exchange({"environ": environ or {}, **request})
        lines = [(level, text) for level, text in answer.pop("lines")]
        return Start(lines=lines, **answer)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the child ended: {Path(self._log.name).read_text()[-3000:]}"
        return json.loads(answer)


# --- the child -----------------------------------------------------------------------------------


@cache
def _parser_of_engine_args() -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return EngineArgs.add_cli_args(FlexibleArgumentParser())


@cache
def _parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve = make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))
    serve.set_defaults(dispatch_function=None)
    return parser


def _serve_arguments(model: str, arguments: list[str]) -> Any:
    parsed = _parser().parse_args(["serve", model, "--skip-tokenizer-init", *arguments])
    parsed.model = parsed.model_tag
    return parsed


def _engine_args(model: str, request: dict[str, Any]) -> Any:
    from vllm.config.vllm import OptimizationLevel
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    if "cli" in request:
        if request.get("plain"):
            # As `vllm bench` and users' own scripts do.
            arguments = ["--model", model, "--skip-tokenizer-init", *request["cli"]]
            return EngineArgs.from_cli_args(_parser_of_engine_args().parse_args(arguments))
        parsed = _serve_arguments(model, request["cli"])
        if request.get("pickled"):
            import pickle

            parsed = pickle.loads(pickle.dumps(parsed))
        engine_args = AsyncEngineArgs.from_cli_args(parsed)
    else:
        options = {
            key: OptimizationLevel[value.removeprefix(ENUM)]
            if str(value).startswith(ENUM)
            else value
            for key, value in request["api"].items()
        }
        cls = AsyncEngineArgs if options.pop("asynchronous", False) else EngineArgs
        engine_args = cls(model=model, skip_tokenizer_init=True, **options)
    for name, value in request.get("attributes", {}).items():
        setattr(engine_args, name, value)
    return engine_args


def _describe(vllm_config: Any) -> dict[str, Any]:
    return {
        "level": int(vllm_config.optimization_level),
        "mode": vllm_config.compilation_config.mode.name,
        "cudagraph": vllm_config.compilation_config.cudagraph_mode.name,
        "worker": vllm_config.parallel_config.worker_cls,
        "async": vllm_config.scheduler_config.async_scheduling,
        "block_size": vllm_config.cache_config.block_size,
        "device": vllm_config.device_config.device_type,
        "eager": vllm_config.model_config.enforce_eager,
        "dtype": str(vllm_config.model_config.dtype),
        "hash": vllm_config.compute_hash(),
    }


def _run(model: str, request: dict[str, Any], lines: list[Any]) -> dict[str, Any]:
    import dataclasses

    from vllm_neuron import route

    kept = {name: os.environ[name] for name in ("VLLM_CACHE_ROOT", "VLLM_NEURON_DEVICE")}
    wanted = {"VLLM_NEURON_DEVICE": "host", **request["environ"]}
    # The variable that the plugin sets for vLLM stays, unless a start gives its own.
    changed = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    record = config = error = None
    try:
        engine_args = _engine_args(model, request)
        for _ in range(request.get("times", 1)):
            vllm_config = engine_args.create_engine_config()
        record = dataclasses.asdict(route.record_of(vllm_config))
        config = _describe(vllm_config)
    except (Exception, SystemExit) as caught:  # noqa: BLE001 - the answer is what was raised
        error = {"type": type(caught).__name__, "text": str(caught)}
        error["name"] = str(getattr(caught, "name", ""))
    finally:
        for name, value in changed.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        os.environ.update(kept)
    return {"lines": list(lines), "error": error, "record": record, "config": config}


def _carry(model: str) -> dict[str, Any]:
    """Copy a configuration in each way that vLLM does and look for the record."""
    import copy
    import dataclasses
    import pickle

    from vllm.config import VllmConfig
    from vllm.config.utils import replace
    from vllm.engine.arg_utils import EngineArgs

    from vllm_neuron import route

    engine_args = EngineArgs(model=model, skip_tokenizer_init=True)
    config = engine_args.create_engine_config()
    record, digest = route.record_of(config), config.compute_hash()

    def keeps(other: Any) -> bool:
        return route.record_of(other) == record

    again = pickle.loads(pickle.dumps(config))
    unpickled = keeps(again)
    again.__post_init__()
    kept = {
        "pickle": unpickled,
        "second __post_init__": keeps(again) and again.compute_hash() == digest,
        "deepcopy": keeps(copy.deepcopy(config)),
        "copy": keeps(copy.copy(config)),
        "replace": keeps(replace(config, load_config=config.load_config)),
        "with_hf_config": keeps(config.with_hf_config(config.model_config.hf_config)),
    }
    for name, other in {
        "EngineArgs by pickle": pickle.loads(pickle.dumps(engine_args)),
        "EngineArgs by deepcopy": copy.deepcopy(engine_args),
        "EngineArgs by replace": dataclasses.replace(engine_args, seed=1),
    }.items():
        kept[name] = route.record_of(other.create_engine_config()).level_origin == "default"
    delattr(config.device_config, route._CARRIER)
    kept["hash without the record"] = config.compute_hash() == digest
    try:
        route.record_of(VllmConfig())
    except ValueError as error:
        kept["VllmConfig()"] = str(error)
    from vllm_neuron.vllm.worker import NeuronWorker

    # The configuration has lost its record above: what a custom launcher would hand over.
    worker = NeuronWorker(config, local_rank=0, rank=0, distributed_init_method="tcp://127.0.0.1:1")
    try:
        worker.init_device()
    except ValueError as error:
        kept["worker"] = str(error)
    return kept


def main(model: str, first_import: str) -> None:
    import importlib
    import logging

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    importlib.import_module(first_import)
    lines: list[Any] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append((r.levelname, r.getMessage()))
    logging.getLogger("vllm_neuron").addHandler(handler)
    for text in sys.stdin:
        request = json.loads(text)
        lines.clear()
        answer = _carry(model) if request.get("carry") else _run(model, request, lines)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
