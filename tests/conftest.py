"""Fixtures for all tests: a clean environment, tiny checkpoints, real servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch, transformers or vllm: they read these once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control starts its background jobs with SIGINT ignored, which every process
# they start inherits. Tests that interrupt a process need the signal to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny checkpoint by its architecture, see `tests.models`."""
    from tests import models

    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda architecture: models.build(architecture, folder / architecture))


@pytest.fixture(scope="session")
def starts(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Yield a `tests.starts.Starts`: engine configurations of the real vLLM, quickly."""
    from tests.starts import Starts

    folder = tmp_path_factory.mktemp("starts")
    model = checkpoint("llama")
    with Starts(model, first_import="vllm.engine.arg_utils", folder=folder) as child:
        yield child


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a `tests.serving.Server` and returns it once it is ready.

    All servers of one test share one cache root unless they name another.
    """
    from tests.serving import Server

    with ExitStack() as servers:

        def start(model: Path, **options: Any) -> Server:
            options = {"cache_root": tmp_path / "cache", "folder": tmp_path, **options}
            return servers.enter_context(Server(model, **options))

        yield start
