"""A vLLM engine in a process of its own, with settings that this test run does not have.

vLLM picks its platform and reads most settings once per process, so that engines with different
settings cannot share the process of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.serving import server_environment

CPU_MODE = {
    "VLLM_NEURON_CPU_MODE": "1",
    "VLLM_NEURON_DEVICE": None,
    "VLLM_NEURON_BACKEND": None,
}
"""The steps run eagerly in PyTorch."""

HOST: Mapping[str, str | None] = {}
"""The steps run as NEFFs on the host emulator."""

SMALL = {
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "dtype": "float32",
    "num_gpu_blocks_override": 256,
}


class Engine:
    """`vllm.LLM` in a child process.

    Args:
        model: checkpoint folder.
        settings: environment variables, see `tests.serving.server_environment`.
        cache_root: `VLLM_CACHE_ROOT`.
        options: arguments of LLM besides those of `SMALL`.
    """

    def __init__(
        self,
        model: Path,
        settings: Mapping[str, str | None],
        *,
        cache_root: Path,
        **options: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        environment = server_environment(
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **settings}, cache_root=cache_root
        )
        arguments = (pipe, environment, str(model), {**SMALL, **options})
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._answer()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns function(llm, *args, **kwargs), run in the child; all of it must pickle."""
        self._pipe.send((function, args, kwargs))
        return self._answer()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]]
    ) -> list[Any]:
        """Returns vLLM's RequestOutput for each prompt of token ids, submitted at once.

        Args:
            prompts: token ids.
            params: arguments of SamplingParams, one per prompt or one for all.
        """
        return self.call(_generate, prompts, list(params))

    def tokens(
        self, prompts: Sequence[Sequence[int]], count: int, **params: Any
    ) -> list[list[int]]:
        """Returns `count` greedy tokens after each prompt, all submitted at once."""
        fixed = {"temperature": 0, "max_tokens": count, "ignore_eos": True, **params}
        outputs = self.generate(prompts, [fixed] * len(prompts))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _answer(self) -> Any:
        ok, value = self._pipe.recv()
        if not ok:
            raise EngineError(value)
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def model_runner(llm: Any) -> Any:
    """Returns the NeuronModelRunner of an LLM, inside the child."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


class EngineError(AssertionError):
    """The child raised; the message is its traceback."""


def _generate(llm: Any, prompts: Sequence[Sequence[int]], params: list[Mapping[str, Any]]) -> Any:
    from vllm import SamplingParams

    return llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        [SamplingParams(**fields) for fields in params],
        use_tqdm=False,
    )


def _serve(pipe: Any, environment: Mapping[str, str], model: str, options: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    llm: Any = None
    task: Any = (_start, (model,), options)
    while True:
        function, args, kwargs = task
        try:
            value = function(llm, *args, **kwargs)
            if function is _start:
                llm, value = value, None
            pipe.send((True, value))
        except Exception:  # noqa: BLE001 - it is raised again in the test
            pipe.send((False, traceback.format_exc()))
        try:
            task = pipe.recv()
        except EOFError:
            return


def _start(_: None, model: str, **options: Any) -> Any:
    from vllm import LLM

    return LLM(model, **options)
