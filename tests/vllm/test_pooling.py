"""Pooling models over HTTP: embeddings equal transformers', whole, in chunks and from the cache."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests import models, pooling_models
from tests.vllm.engine import CPU_MODE, Engine, model_runner
from tests.vllm.test_restarts import summary
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.limits import check_request
from vllm_neuron.vllm.pooling_runner import served_tasks

TOLERANCE = 5e-6
"""Largest difference from transformers' float32 answer, vectors of length 1; seen: 6e-7."""


def prompts(vocabulary, lengths):
    draw = random.Random(5)
    return [[draw.randrange(6, vocabulary) for _ in range(length)] for length in lengths]


def embed(server, given, **options):
    """Embeddings of all prompts in one request."""
    body = {"model": "model", "input": given, "encoding_format": "float", **options}
    response = server.post("/v1/embeddings", body)
    assert response.ok, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(given)))
    return torch.tensor([item["embedding"] for item in data])


def embed_apart(server, given):
    """Embeddings of prompts that are asked for one by one, at the same time."""
    with ThreadPoolExecutor(len(given)) as pool:
        return torch.cat(list(pool.map(lambda prompt: embed(server, [prompt]), given)))


def assert_equal(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE
    assert torch.cosine_similarity(found, expected).min() >= 1 - 1e-6


def assert_warm(server):
    counts = summary(server)
    done = [counts[name] for name in ("state", "traces", "lowerings", "compilations")]
    assert done == ["warm", 0, 0, 0]
    hits = f'vllm_neuron:precompile_cache_requests_total{{result="hit"}} {counts["graphs"]}.0'
    assert hits in server.metrics()


def prefix_hits(server):
    return float(re.search(r"^vllm:prefix_cache_hits_total\{.*\} (.*)$", server.metrics(), re.M)[1])


@pytest.mark.serve
def test_qwen3_embedding_equals_transformers(serve, tmp_path):
    folder = pooling_models.qwen3_embedding(tmp_path / "model")
    arguments = (
        *("--max-model-len", "768", "--max-num-batched-tokens", "512", "--max-num-seqs", "4"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", str(16 << 20)),
        *("--hf-overrides", '{"is_matryoshka": true}'),
        "--additional-config",
        json.dumps({"neuron_config": {"num_batched_tokens_buckets": [64, 512]}}),
    )
    # Shorter and longer than buckets, and two that are prefilled in chunks.
    given = prompts(models.VOCABULARY_SIZE, (1, 5, 64, 65, 200, 700, 33, 512))
    given.append([*given[5][:600], 9])
    expected = pooling_models.embeddings(folder, given, pooling="last")

    server = serve(folder, arguments=arguments, fork=True)
    assert summary(server)["compilations"] == 2
    assert_equal(embed(server, given), expected)
    before = prefix_hits(server)
    assert_equal(embed_apart(server, given), expected)
    assert prefix_hits(server) >= before + 600
    short = embed(server, given, dimensions=16)
    assert_equal(short, torch.nn.functional.normalize(expected[:, :16], dim=-1))
    # vLLM's other door to the same, and what is not served, by name.
    pooled = server.post("/pooling", {"model": "model", "input": given[4], "task": "embed"})
    assert_equal(torch.tensor([pooled.json()["data"][0]["data"]]), expected[4:5])
    refused = server.post("/pooling", {"model": "model", "input": given[4], "task": "token_embed"})
    assert refused.status_code == 400
    assert "token_embed" in refused.text
    assert server.post("/v1/completions", {"model": "model", "prompt": "a"}).status_code == 404
    server.stop()

    server = serve(folder, arguments=arguments, fork=True)
    assert_warm(server)
    assert_equal(embed(server, given), expected)


@pytest.mark.serve
def test_minilm_equals_transformers(serve):
    from transformers import AutoTokenizer

    folder = pooling_models.minilm()
    arguments = ("--dtype", "float32", "--max-num-seqs", "4")
    texts = [
        "Hello",
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "The girl is carrying a baby. " * 30,
    ]
    given = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    given += prompts(30_000, (1, 128, 129, 256))
    expected = pooling_models.embeddings(folder, given, pooling="mean")

    server = serve(folder, arguments=arguments, fork=True)
    assert summary(server)["graphs"] == 2
    assert_equal(embed(server, texts), expected[: len(texts)])
    assert_equal(embed(server, given), expected)
    assert_equal(embed_apart(server, given), expected)
    same, other = torch.cosine_similarity(expected[[1, 1]], expected[[2, 0]]).tolist()
    assert same > 0.7 > 0.3 > other


@pytest.mark.serve
def test_classification_equals_transformers(tmp_path):
    folder = pooling_models.qwen3_classifier(tmp_path / "model")
    given = prompts(models.VOCABULARY_SIZE, (1, 7, 130, 256))
    with Engine(folder, CPU_MODE, cache_root=tmp_path / "cache") as engine:
        found = torch.tensor(engine.call(classify, given))
        assert engine.call(blocks_written_by_padding) == 0
    expected = pooling_models.probabilities(folder, given)
    assert (found - expected).abs().max() <= TOLERANCE


def classify(llm, given):
    outputs = llm.classify([{"prompt_token_ids": prompt} for prompt in given], use_tqdm=False)
    return [output.outputs.probs for output in outputs]


def blocks_written_by_padding(llm):
    """How many values outside of the null block a step without a request changes."""
    caches = [cache for pair in model_runner(llm).kv_caches for cache in pair]
    for cache in caches:
        cache.fill_(7)
    model_runner(llm).execute_padding()
    return sum(int((cache[1:] != 7).sum()) for cache in caches)


def test_token_types_are_refused_by_name():
    from vllm.pooling_params import PoolingParams

    check_request(PoolingParams(task="classify"))
    params = PoolingParams(task="classify", extra_kwargs={"compressed_token_type_ids": 3})
    with pytest.raises(ValueError, match=r"^token_type_ids=True is not supported on Neuron"):
        check_request(params)


def test_a_model_for_other_tasks_is_refused():
    assert served_tasks({"token_embed", "embed"}) == ("embed",)
    with pytest.raises(ConfigurationError) as caught:
        served_tasks({"token_embed", "token_classify"})
    assert str(caught.value) == (
        "This model cannot be served on Neuron: it pools for token_classify, token_embed; the "
        "plugin pools for embed and classify. Choose another model."
    )
