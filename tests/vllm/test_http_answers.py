"""Greedy answers over HTTP equal transformers', alone and among others, for a real model too."""

from __future__ import annotations

import json
import random

import pytest

from tests import models, rounding
from tests.serving import Server

pytestmark = pytest.mark.serve

REQUESTS = 32
LONGEST = 120
TOKENS = 8

BUCKETS = {"num_batched_tokens_buckets": [64, 128], "num_seqs_buckets": [1, 8]}
ARGUMENTS = (
    *("--max-model-len", "128", "--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
    *("--additional-config", json.dumps({"neuron_config": BUCKETS})),
)


def prompts(vocabulary: int) -> list[list[int]]:
    """Return token ids of mixed lengths from 1 to `LONGEST`, in a mixed order."""
    source = random.Random(0)
    lengths = [1 + (LONGEST - 1) * i // (REQUESTS - 1) for i in range(REQUESTS)]
    source.shuffle(lengths)
    return [[source.randrange(6, vocabulary) for _ in range(length)] for length in lengths]


NATIVE, XLA = "neuron_native", "vllm_neuron"


@pytest.fixture(
    params=[
        *((name, NATIVE) for name in ("llama", "qwen3", "mixtral")),
        *((name, NATIVE) for name in ("gemma3", "gpt_oss", "deepseek_v3")),
        ("smollm2", NATIVE),
        *((name, XLA) for name in ("llama", "mixtral")),
    ],
    ids="-".join,
)
def served(request, checkpoint):
    """Return a checkpoint's folder, the size of its vocabulary and the route.

    One of each kind; `tests/run_models.py` has them all.
    """
    name, route = request.param
    if name == "smollm2":
        from demo.checkpoint import smollm2

        return smollm2(), 49152, route
    return checkpoint(name), models.VOCABULARY_SIZE, route


def test_concurrent_alone_and_transformers_agree(served, tmp_path):
    folder, vocabulary, route = served
    asked = prompts(vocabulary)
    options = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    bodies = [{"prompt": prompt, **options} for prompt in asked]
    arguments = ("--dtype", "float32", *ARGUMENTS)
    with Server(
        folder,
        cache_root=tmp_path / "cache",
        folder=tmp_path,
        arguments=arguments,
        environment={"VLLM_NEURON_BACKEND": route},
        fork=True,
    ) as server:
        together = [a["choices"][0]["token_ids"] for a in server.complete_all(bodies)]
        alone = [server.complete(**body)["choices"][0]["token_ids"] for body in bodies]
    expected = models.greedy(folder, asked, tokens=TOKENS)
    assert alone == expected
    assert together == expected


def test_bfloat16_log_probabilities(checkpoint, tmp_path):
    folder = checkpoint("mixtral")
    asked = prompts(models.VOCABULARY_SIZE)
    arguments = ("--dtype", "bfloat16", *ARGUMENTS)
    options = {"max_tokens": 1, "logprobs": 5, "return_tokens_as_token_ids": True}
    with Server(
        folder, cache_root=tmp_path / "cache", folder=tmp_path, arguments=arguments, fork=True
    ) as server:
        answers = server.complete_all([{"prompt": prompt, **options} for prompt in asked])
    found = []
    for answer in answers:
        (scores,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        assert len(scores) >= 5
        found.append({int(name.removeprefix("token_id:")): s for name, s in scores.items()})
    figures = rounding.measure(folder, asked, found)
    assert figures.is_within_bounds, figures
