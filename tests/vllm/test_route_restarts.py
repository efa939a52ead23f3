"""One cache root, native and XLA route in turn: each is warm the second time, answers equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving import Server
from tests.vllm.test_restarts import COMPILATION, answer

pytestmark = pytest.mark.serve

# Three graphs: one prefill, two decode.
ARGUMENTS = (
    *("--max-model-len", "128", "--max-num-batched-tokens", "128"),
    *("--max-num-seqs", "2", "--dtype", "float32", "--num-gpu-blocks-override", "16"),
    # The level is part of the keys' compiler arguments; equal on both routes here.
    "-O1",
)
GRAPHS = 3


def test_from_native_to_xla_and_back(
    serve: Callable[..., Server], checkpoint: Callable[[str], Path]
) -> None:
    found = []
    for value in ("neuron_native", "vllm_neuron", "neuron_native", "vllm_neuron"):
        server = serve(
            checkpoint("llama"),
            arguments=ARGUMENTS,
            environment={"VLLM_NEURON_BACKEND": value},
            fork=True,
        )
        tokens = answer(server)
        messages = server.messages("INFO")
        (line,) = [match for text in messages if (match := COMPILATION.fullmatch(text))]
        cached, graphs, lowerings, compilations = map(int, line.groups())
        workers = sum(text.startswith("XLA worker started: ") for text in messages)
        lowered = sum(text.startswith("PyTorch/XLA lowered ") for text in messages)
        found.append((cached, graphs, lowerings, compilations, workers, lowered, tokens))
        server.stop()
    tokens = found[0][-1]
    assert len(tokens) == 12
    assert found == [
        (0, GRAPHS, GRAPHS, GRAPHS, 0, 0, tokens),
        (0, GRAPHS, GRAPHS, GRAPHS, 1, GRAPHS, tokens),
        # Both caches are warm, and the worker of the XLA route is not started.
        (GRAPHS, GRAPHS, 0, 0, 0, 0, tokens),
        (GRAPHS, GRAPHS, 0, 0, 0, 0, tokens),
    ]
