"""Workers of vLLM with a model each, one after the other in one child process without an engine.

An engine of its own for every model would import vLLM as often, which takes longer than a tiny
model does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from tests import models, pooling_models
from tests.architectures import ARCHITECTURES
from tests.serving import server_environment

POOLING: Final = ("qwen3_embedding", "minilm")
NAMES: Final = (*ARCHITECTURES, *POOLING)


def run_child(
    module: str, names: Sequence[str], *, folder: Path, settings: Mapping[str, str | None]
) -> Iterator[str]:
    """Run `python -m MODULE FOLDER NAME...` and yield the lines that it writes.

    Args:
        module: a module whose main writes to `answer_stream`.
        names: of models.
        folder: for checkpoints and caches.
        settings: environment variables, see `tests.serving.server_environment`.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, str(folder), *names],
        env=server_environment(settings, cache_root=folder / "cache"),
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        yield from child.stdout
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, child.args)


def checkpoint(name: str, folder: Path) -> Path:
    """Return the folder of a model of `NAMES`; a tiny one is written there if it is not yet."""
    if name == "minilm":
        return pooling_models.minilm()
    if (folder / name).exists():
        return folder / name
    if name == "qwen3_embedding":
        return pooling_models.qwen3_embedding(folder / name)
    return models.build(name, folder / name)


# --- the child -----------------------------------------------------------------------------------


def answer_stream() -> IO[str]:
    """Return the standard output, to which nobody else in this process writes from now on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def start_worker(model: Path, *, folder: Path, prefill: int, **options: Any) -> Any:
    """Return a NeuronWorker that has loaded a model and has its graphs ready.

    Args:
        model: checkpoint folder.
        folder: for the rendezvous of the process group of one.
        prefill: the only prefill bucket, which is the longest sequence too; the only decode bucket
            is of 4 sequences.
        options: arguments of EngineArgs.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_neuron.vllm.worker import NeuronWorker

    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=prefill,
        max_num_batched_tokens=prefill,
        max_num_seqs=4,
        additional_config={
            "neuron_config": {"num_batched_tokens_buckets": [prefill], "num_seqs_buckets": [4]}
        },
        **options,
    ).create_engine_config()
    worker = NeuronWorker(
        config, local_rank=0, rank=0, distributed_init_method=f"file://{folder}/group"
    )
    # The groups of the model before: a model with experts has one more.
    destroy_model_parallel()
    with set_current_vllm_config(config):
        worker.init_device()
    worker.load_model()
    blocks = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[])
    with set_current_vllm_config(config):
        worker.initialize_from_config(blocks)
    worker.compile_or_warm_up_model()
    return worker
