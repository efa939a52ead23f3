"""Quantised checkpoints served by a compiled engine, against their dequantised weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests import models, quantized
from tests.vllm.engine import CPU_MODE, HOST, Engine, model_runner

pytestmark = pytest.mark.serve

PROMPTS = [[77, 74, 81, 81, 84], list(range(60, 100)), [9]]
TOKENS = 64
ONE_OF_EACH = {
    "additional_config": {
        "neuron_config": {"num_batched_tokens_buckets": [256], "num_seqs_buckets": [4]}
    }
}
"""Two graphs: 256 tokens of prefill, 4 sequences of decode."""


def counts(llm):
    counters = model_runner(llm).execution.pipeline.counters
    return {
        "traces": counters.traces,
        "lowerings": counters.lowerings,
        "compilations": counters.compilations,
    }


def start(folder, cache_root, **options):
    """Greedy answers of an engine, and what it had to make."""
    with Engine(folder, HOST, cache_root=cache_root, **ONE_OF_EACH, **options) as engine:
        return engine.tokens(PROMPTS, TOKENS), engine.call(counts)


ARGUMENTS = (
    *("--max-model-len", "256", "--max-num-batched-tokens", "256", "--max-num-seqs", "4"),
    *("--dtype", "float32", "--num-gpu-blocks-override", "256"),
    *("--additional-config", json.dumps(ONE_OF_EACH["additional_config"])),
)

COLD = {"traces": 2, "lowerings": 2, "compilations": 2}
WARM = {"traces": 0, "lowerings": 0, "compilations": 0}


def test_gptq_of_all_kinds_and_its_restarts(tmp_path):
    """Symmetric, asymmetric, ordered and in one group, of 4 and 8 bits, layer by layer."""
    made = quantized.build_gptq(tmp_path)
    expected = models.greedy(made.reference, PROMPTS, tokens=TOKENS)
    cache = tmp_path / "cache"
    assert start(made.folder, cache) == (expected, COLD)
    assert start(made.folder, cache) == (expected, WARM)
    # Tensors of the same names, shapes and dtypes that mean something else: nothing of the first
    # may be taken, and the answers change.
    other = tmp_path / "v2"
    shutil.copytree(made.folder, other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (other / "config.json").write_text(json.dumps(config))
    found, done = start(other, cache)
    assert done == COLD
    assert found != expected


def test_awq_over_http(serve, tmp_path):
    made = quantized.build_awq(tmp_path)
    server = serve(made.folder, arguments=ARGUMENTS, fork=True)
    bodies = [
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        for prompt in PROMPTS
    ]
    found = [body["choices"][0]["token_ids"] for body in server.complete_all(bodies)]
    assert found == models.greedy(made.reference, PROMPTS, tokens=TOKENS)


PROMPT = [5 + (i * 37) % 250 for i in range(48)]
GENERATED = 16


def log_probabilities(made, cache_root, *, mode=HOST, **options):
    """Of all tokens after each position: of the engine, of the reference, and of it unrounded."""
    with Engine(
        made.folder, mode, cache_root=cache_root, max_logprobs=-1, **ONE_OF_EACH, **options
    ) as engine:
        params = {
            "temperature": 0,
            "max_tokens": GENERATED,
            "ignore_eos": True,
            "prompt_logprobs": -1,
            "logprobs": -1,
        }
        output = engine.generate([PROMPT], [params])[0]
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    found = torch.tensor(
        [[row[token].logprob for token in range(models.VOCABULARY_SIZE)] for row in rows]
    )
    ids = [*PROMPT, *output.outputs[0].token_ids][:-1]
    expected = [made.logits(ids, rounded=rounded).log_softmax(-1) for rounded in (True, False)]
    return found, *expected


MEAN, LARGEST = 0.02, 0.5
"""Bounds on the difference of log-probabilities from the reference. The same sums in another order
round an activation that lies midway to the other number: one in thousands, by up to 1/16 in fp8."""


@pytest.mark.parametrize("kind", ["compressed-tensors", "fp8-and-fp8-cache", "fp8-block"])
def test_rounded_activations_are_those_of_the_format(kind, tmp_path):
    options = {}
    if kind == "compressed-tensors":
        made = quantized.build_compressed(tmp_path)
    elif kind == "fp8-block":
        made = quantized.build_fp8(tmp_path, scheme="block")
        # tests/vllm/test_quantized_kernels.py compiles its product.
        options["mode"] = CPU_MODE
    else:
        made = quantized.build_fp8(tmp_path, scheme="static")
        options["kv_cache_dtype"] = "fp8"
    found, expected, unrounded = log_probabilities(made, tmp_path / "cache", **options)
    difference = (found - expected).abs()
    assert difference.mean() < MEAN
    assert difference.max() < LARGEST
    # The bounds tell this model from one whose activations (and cache) are not rounded.
    assert (found - unrounded).abs().mean() > 5 * MEAN


def test_a_spawned_engine_has_the_kernels(serve, tmp_path):
    """It gets its configuration from the API server, which read the checkpoint's."""
    made = quantized.build_compressed(tmp_path)
    server = serve(made.folder, arguments=ARGUMENTS, environment=CPU_MODE)
    answer = server.complete(PROMPT, max_tokens=1, prompt_logprobs=0)
    scores = made.logits(PROMPT).log_softmax(-1)
    for token, row, found in zip(
        PROMPT[1:], scores[:-1], answer["choices"][0]["prompt_logprobs"][1:], strict=True
    ):
        assert abs(found[str(token)]["logprob"] - row[token].item()) < LARGEST


def test_experts(tmp_path):
    rules = {0: {}, 1: {"sym": False}, 2: {"bits": 8, "sym": False, "group_size": -1}}
    made = quantized.build_gptq(tmp_path, rules, "mixtral", experts=True)
    expected = models.greedy(made.reference, PROMPTS, tokens=TOKENS)
    # Eagerly: tests/vllm/test_quantized_kernels.py lowers the experts.
    with Engine(made.folder, CPU_MODE, cache_root=tmp_path / "cache") as engine:
        assert engine.tokens(PROMPTS, TOKENS) == expected
