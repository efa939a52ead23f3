"""vLLM's model of a checkpoint, loaded the way a server loads it, in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_neuron.errors import ConfigurationError

__all__ = ["loaded_runner", "prepare_process", "tokenize"]


def prepare_process() -> None:
    """Settle what vLLM and the plugin read of the environment. Before vllm is imported.

    The host emulator runs the graphs, whatever device there is; the route variable has no part in
    it. Log lines go to standard error, errors only unless VLLM_LOGGING_LEVEL says otherwise.
    """
    os.environ.update(VLLM_NEURON_DEVICE="host", VLLM_NEURON_BACKEND="neuron_native")
    for name in ("VLLM_NEURON_CPU_MODE", "VLLM_NEURON_CPU_COMPILE"):
        os.environ.pop(name, None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def tokenize(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts by the model's own tokenizer.

    Raises:
        OSError: there is none.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(prompt)["input_ids"] for prompt in prompts]


@contextlib.contextmanager
def loaded_runner(model: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Load a model as the one worker of an engine does, and give its `NeuronModelRunner`.

    Args:
        model: checkpoint folder.
        options: arguments of vLLM's EngineArgs.

    Raises:
        ConfigurationError: the plugin does not serve the model, or it generates no tokens.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments = EngineArgs(model=model, use_tqdm_on_load=False, **options)
    config = arguments.create_engine_config()
    if config.model_config.runner_type != "generate":
        raise ConfigurationError(
            f"{model} is a pooling model ({', '.join(config.model_config.architectures)}): what is "
            "compared are the logits of the next token, and it has none.",
            name="model",
            value=model,
        )
    executor = UniProcExecutor(config)
    try:
        with set_current_vllm_config(config):
            yield executor.driver_worker.worker.model_runner
    finally:
        executor.shutdown()
