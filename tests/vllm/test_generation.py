"""Tokens of whole engines, eager and compiled, against transformers."""

from __future__ import annotations

import random

import pytest

from tests import models
from tests.vllm.engine import CPU_MODE, Engine

pytestmark = pytest.mark.serve

MODES = {"cpu": CPU_MODE}
TOKENS = 40


def mixed_prompts(count, *, longest, seed=0):
    """Prompts of mixed lengths, a third of them with a common beginning."""
    draw = random.Random(seed)
    shared = [draw.randrange(6, 262) for _ in range(longest // 2)]
    prompts = []
    for index in range(count):
        own = [draw.randrange(6, 262) for _ in range(draw.randint(1, longest // 2))]
        prompts.append(shared + own if index % 3 == 0 else own)
    return prompts


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def start(mode, tmp_path_factory):
    """Returns a function that starts an engine of this mode; engines share a cache root."""
    root = tmp_path_factory.mktemp(f"cache-{mode}")
    return lambda folder, **options: Engine(folder, MODES[mode], cache_root=root, **options)


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_greedy_equals_transformers(start, checkpoint, architecture):
    folder = checkpoint(architecture)
    prompts = mixed_prompts(32, longest=200)
    expected = models.greedy(folder, prompts, tokens=TOKENS)
    with start(folder) as engine:
        assert engine.tokens(prompts, TOKENS) == expected, "32 at once"
        one_by_one = [engine.tokens([prompt], TOKENS)[0] for prompt in prompts[:8]]
        assert one_by_one == expected[:8], "one by one, on the prefix cache of the first run"


@pytest.fixture(scope="module")
def llama(start, checkpoint):
    with start(checkpoint("llama")) as engine:
        yield engine


def test_equal_prompts_in_one_step_share_blocks_that_the_step_fills(llama, checkpoint):
    # Block size 32: the second prompt starts from blocks that the first one fills in that step,
    # and the third is left with a single token.
    base = mixed_prompts(1, longest=100, seed=7)[0][:64]
    prompts = [base + [9], base + [9, 10, 11], base + [9]]
    expected = models.greedy(checkpoint("llama"), prompts, tokens=TOKENS)
    llama.call(reset_prefix_cache)
    assert llama.tokens(prompts, TOKENS) == expected


def reset_prefix_cache(llm):
    assert llm.reset_prefix_cache()


def test_chunked_prefill(start, checkpoint):
    folder = checkpoint("llama")
    prompts = mixed_prompts(3, longest=60) + mixed_prompts(3, longest=900, seed=1) + [[5] * 980]
    prompts.append(prompts[-1][:700] + [7])
    expected = models.greedy(folder, prompts, tokens=TOKENS)
    with start(folder, max_model_len=1024, max_num_batched_tokens=512) as engine:
        assert engine.tokens(prompts, TOKENS) == expected


def test_preemption(start, checkpoint):
    folder = checkpoint("llama")
    prompts = mixed_prompts(8, longest=120)
    expected = models.greedy(folder, prompts, tokens=TOKENS)
    # 17 blocks of 16 tokens for four sequences of up to 160 tokens.
    few = {"block_size": 16, "num_gpu_blocks_override": 18, "disable_log_stats": False}
    with start(folder, **few) as engine:
        assert engine.tokens(prompts, TOKENS) == expected
        assert engine.call(preemptions) > 0


def preemptions(llm):
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
