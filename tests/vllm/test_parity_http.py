"""Answers of real servers over HTTP, many at once and one by one, against transformers."""

from __future__ import annotations

import random

import pytest
import requests

from tests import models
from tests.serving import SMALL, Server

pytestmark = pytest.mark.serve

TOKENS = 32
AT_ONCE = 32


def bodies(vocabulary, *, longest, count=AT_ONCE, seed=0):
    """Greedy requests of mixed lengths, every third with a common beginning."""
    draw = random.Random(seed)
    shared = [draw.randrange(*vocabulary) for _ in range(longest // 2)]
    prompts = []
    for index in range(count):
        own = [draw.randrange(*vocabulary) for _ in range(draw.randint(1, longest // 2))]
        prompts.append(shared + own if index % 3 == 0 else own)
    return [
        {"prompt": p, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        for p in prompts
    ]


def tokens_of(answers):
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def llama_server(checkpoint, cache_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with Server(checkpoint("llama"), cache_root=cache_root, folder=folder, fork=True) as server:
        yield server


def assert_parity(server, requests_, expected):
    at_once = tokens_of(server.complete_all(requests_))
    assert at_once == expected, "at once"
    one_by_one = tokens_of(server.complete(**body) for body in requests_)
    assert one_by_one == expected, "one by one"


def test_llama(llama_server, checkpoint):
    asked = bodies((6, 262), longest=200)
    folder = checkpoint("llama")
    expected = models.greedy(folder, [body["prompt"] for body in asked], tokens=TOKENS)
    assert_parity(llama_server, asked, expected)


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_other_models(architecture, checkpoint, cache_root, tmp_path):
    asked = bodies((6, 262), longest=200)
    folder = checkpoint(architecture)
    expected = models.greedy(folder, [body["prompt"] for body in asked], tokens=TOKENS)
    with Server(folder, cache_root=cache_root, folder=tmp_path, fork=True) as server:
        assert_parity(server, asked, expected)


def test_smollm2(cache_root, tmp_path):
    from demo.checkpoint import smollm2

    folder = smollm2()
    asked = bodies((100, 49000), longest=100)
    # One decode bucket and one prefill bucket: each takes seconds to trace.
    buckets = '{"neuron_config": {"num_batched_tokens_buckets": [128], "num_seqs_buckets": [8]}}'
    arguments = (
        *("--max-model-len", "128", "--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
        *("--dtype", "float32", "--additional-config", buckets),
    )
    with Server(
        folder,
        cache_root=cache_root,
        folder=tmp_path,
        arguments=arguments,
        fork=True,
        start_timeout_s=900,
    ) as server:
        at_once = tokens_of(server.complete_all(asked))
        one_by_one = tokens_of(server.complete(**body) for body in asked[:8])
        assert one_by_one == at_once[:8]
        capital = server.chat("What is the capital of France? Answer in one sentence.")
        assert capital["choices"][0]["message"]["content"] == "The capital of France is Paris."
    # Greedy decoding is right exactly if each token is the best one after those before it.
    for body, answer in zip(asked, at_once, strict=True):
        prompt = body["prompt"]
        logits = models.logits(folder, prompt + answer)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


def test_streams_stops_and_seeds(llama_server):
    text = "hello over there"
    whole = llama_server.chat(text, max_tokens=24)["choices"][0]["message"]["content"]
    assert "".join(llama_server.chat_stream(text, max_tokens=24)) == whole

    free = llama_server.complete(text, max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    ending = next(c for c in free[3:] if c.isprintable() and c.isascii())
    stopped = llama_server.complete(text, max_tokens=24, ignore_eos=True, stop=[ending])
    assert stopped["choices"][0]["text"] == free[: free.index(ending)]
    assert stopped["choices"][0]["finish_reason"] == "stop"

    def seeded(seed):
        answer = llama_server.complete(
            text, max_tokens=8, temperature=1.0, top_p=0.95, top_k=50, seed=seed, n=2
        )
        return [choice["text"] for choice in answer["choices"]]

    assert seeded(1) == seeded(1)
    assert seeded(1)[0] != seeded(1)[1]
    assert seeded(1) != seeded(2)


def test_logprobs_of_prompt_and_answer(llama_server, checkpoint):
    prompt = [70, 80, 90, 100, 110]
    answer = llama_server.complete(
        prompt, max_tokens=4, ignore_eos=True, logprobs=2, echo=True, return_token_ids=True
    )["choices"][0]
    sequence = prompt + answer["token_ids"]
    scores = models.logits(checkpoint("llama"), sequence).log_softmax(-1)
    found = answer["logprobs"]["token_logprobs"]
    assert found[0] is None
    expected = [scores[i, token].item() for i, token in enumerate(sequence[1:])]
    assert found[1:] == pytest.approx(expected, abs=2e-4)


def test_a_request_that_no_bucket_covers_is_refused_and_the_server_goes_on(llama_server):
    limit = int(SMALL[SMALL.index("--max-model-len") + 1])
    for length in (limit + 1, limit + 44, 10 * limit):
        response = llama_server.post(
            "/v1/completions", {"model": "model", "prompt": [70] * length, "max_tokens": 1}
        )
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert str(limit) in message
    with pytest.raises(requests.HTTPError, match="HTTP 400"):
        llama_server.complete([70] * limit, max_tokens=1)
    assert llama_server.complete([70] * (limit - 1), max_tokens=1)["usage"]["completion_tokens"]
