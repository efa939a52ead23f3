"""What whole engines generate, eager and compiled, against transformers."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
import torch

from tests import models
from tests.vllm.engine import CPU_MODE, HOST, Engine, EngineError, model_runner

pytestmark = pytest.mark.serve

MODES = {"cpu": CPU_MODE, "host": HOST}
TOKENS = 40


def random_tokens(count, seed):
    draw = random.Random(seed)
    return [draw.randrange(6, 262) for _ in range(count)]


def mixed_prompts(count, *, longest, seed=0):
    """Prompts of mixed lengths, a third of them with a common beginning."""
    draw = random.Random(seed)
    shared = random_tokens(longest // 2, seed)
    prompts = []
    for index in range(count):
        own = random_tokens(draw.randint(1, longest // 2), draw.random())
        prompts.append(shared + own if index % 3 == 0 else own)
    return prompts


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=MODES)
def llama(request, checkpoint, cache_root):
    with Engine(checkpoint("llama"), MODES[request.param], cache_root=cache_root) as engine:
        yield engine


def assert_parity(engine, folder):
    prompts = mixed_prompts(32, longest=200)
    expected = models.greedy(folder, prompts, tokens=TOKENS)
    assert engine.tokens(prompts, TOKENS) == expected, "32 at once"
    engine.call(reset_prefix_cache)
    one_by_one = [engine.tokens([prompt], TOKENS)[0] for prompt in prompts]
    assert one_by_one == expected, "one by one"
    assert engine.tokens(prompts, TOKENS) == expected, "32 at once, from the prefix cache"


def reset_prefix_cache(llm):
    assert llm.reset_prefix_cache()


def test_llama_equals_transformers(llama, checkpoint):
    assert_parity(llama, checkpoint("llama"))


@pytest.mark.parametrize("architecture", ["qwen3", "mixtral"])
def test_other_models_equal_transformers(architecture, checkpoint, cache_root):
    folder = checkpoint(architecture)
    with Engine(folder, HOST, cache_root=cache_root) as engine:
        assert_parity(engine, folder)


def negate_head(llm):
    llm.apply_model(_negate_head)
    assert llm.reset_prefix_cache()


def _negate_head(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def test_changed_weights_hold_from_the_next_step_on_a22(llama):
    prompt = random_tokens(20, seed=3)
    before = llama.tokens([prompt], TOKENS)
    llama.call(negate_head)
    changed = llama.tokens([prompt], TOKENS)
    llama.call(negate_head)
    assert changed != before
    assert llama.tokens([prompt], TOKENS) == before


def test_equal_prompts_in_one_step_share_blocks_that_the_step_fills(llama, checkpoint):
    # Blocks of 32 tokens: later prompts start from blocks that the first one fills in the same
    # step, and the last is left with a single token.
    base = random_tokens(64, seed=7)
    prompts = [[*base, 9], [*base, 9, 10, 11], [*base, 9]]
    expected = models.greedy(checkpoint("llama"), prompts, tokens=TOKENS)
    llama.call(reset_prefix_cache)
    assert llama.tokens(prompts, TOKENS) == expected


def test_garbage_in_the_cache_changes_nothing(llama, checkpoint):
    # NaN in every row of every block: in the null block that padding writes to, in blocks that
    # other requests leave behind, and behind the end of each sequence.
    prompts = mixed_prompts(5, longest=100, seed=3)
    expected = models.greedy(checkpoint("llama"), prompts, tokens=TOKENS)
    llama.call(reset_prefix_cache)
    llama.call(poison)
    assert llama.tokens(prompts, TOKENS) == expected


def poison(llm):
    for pair in model_runner(llm).kv_caches:
        for cache in pair:
            garbage = torch.full(tuple(cache.shape), float("nan"))
            (cache.copy_ if isinstance(cache, torch.Tensor) else cache.write)(garbage)


@pytest.mark.parametrize("mode", MODES)
def test_chunked_prefill_preemption_and_context_buckets(mode, checkpoint, cache_root):
    folder = checkpoint("llama")
    # The first four fill 68 of 71 blocks and grow by three blocks each.
    prompts = [random_tokens(270, seed) for seed in range(4)]
    prompts += mixed_prompts(3, longest=300) + [random_tokens(n, n) for n in (513, 700, 980)]
    prompts.append([*prompts[-1][:600], 7])
    expected = models.greedy(folder, prompts, tokens=TOKENS)
    options = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "num_gpu_blocks_override": 72,
        "disable_log_stats": False,
        "additional_config": {
            "neuron_config": {
                "decode_context_length_buckets": [128, 512],
                "num_seqs_buckets": [2, 4],
            }
        },
    }
    with Engine(folder, MODES[mode], cache_root=cache_root, **options) as engine:
        engine.call(count_calls)
        assert engine.tokens(prompts, TOKENS) == expected
        assert engine.call(preemptions) > 0
        calls = engine.call(called)
        assert {"prefill_s512", "decode_b2", "decode_b2_ctx512"} <= set(calls)
        assert set(calls) <= {
            "prefill_s512",
            *(f"decode_b{b}{c}" for b in (2, 4) for c in ("", "_ctx128", "_ctx512")),
        }

        # Seeded sampling does not depend on how the prompt was cut or on its neighbours.
        seeded = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
        alone = engine.generate([prompts[9]], [seeded])[0].outputs[0].token_ids
        engine.call(reset_prefix_cache)
        crowd = engine.generate([prompts[9], *prompts[4:7]], [seeded] * 4)[0].outputs[0].token_ids
        assert alone == crowd

        # Prompt logprobs of a prompt in two chunks.
        output = engine.generate([prompts[8]], [{"max_tokens": 1, "prompt_logprobs": 2}])[0]
        assert_prompt_logprobs(output, prompts[8], folder)


def count_calls(llm):
    runner = model_runner(llm)
    runner.called = {}
    for label, graph in list(runner.graphs.items()):

        def counted(*args, label=label, graph=graph):
            runner.called[label] = runner.called.get(label, 0) + 1
            return graph(*args)

        runner.graphs[label] = counted


def called(llm):
    return model_runner(llm).called


def preemptions(llm):
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def assert_prompt_logprobs(output, prompt, folder):
    scores = models.logits(folder, prompt).log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, found in enumerate(output.prompt_logprobs[1:]):
        row = scores[position]
        token = prompt[position + 1]
        assert found[token].logprob == pytest.approx(row[token].item(), abs=2e-4)
        assert found[token].rank == (row >= row[token]).sum()
        best = row.topk(2).indices.tolist()
        assert set(found) == {token, *best}


def test_logprobs_equal_transformers(llama, checkpoint):
    folder = checkpoint("llama")
    prompt = random_tokens(50, seed=11)
    params = {"temperature": 0, "max_tokens": 8, "logprobs": 3, "prompt_logprobs": 2}
    output = llama.generate([prompt], [{**params, "ignore_eos": True}])[0]
    assert_prompt_logprobs(output, prompt, folder)
    tokens = list(output.outputs[0].token_ids)
    scores = models.logits(folder, prompt + tokens).log_softmax(-1)[len(prompt) - 1 : -1]
    for row, token, found in zip(scores, tokens, output.outputs[0].logprobs, strict=True):
        best = row.topk(3)
        assert set(found) == set(best.indices.tolist())
        assert found[token].rank == 1
        for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert found[index].logprob == pytest.approx(value, abs=2e-4)


def test_sampling_parameters(llama):
    prompt = random_tokens(20, seed=13)
    greedy = llama.tokens([prompt], 12)[0]

    def sample(**params):
        params = {"max_tokens": 12, "ignore_eos": True, **params}
        return [list(o.token_ids) for o in llama.generate([prompt], [params])[0].outputs]

    assert sample(temperature=1.0, top_k=1) == [greedy]
    assert sample(temperature=1.0, top_p=1e-6) == [greedy]
    assert sample(temperature=1.0, min_p=1.0) == [greedy]
    assert sample(temperature=0, logit_bias={70: 100.0}) == [[70] * 12]
    assert set(sample(temperature=1.0, allowed_token_ids=[80, 81])[0]) <= {80, 81}
    banned = sample(temperature=0, repetition_penalty=2.0, presence_penalty=2.0)[0]
    assert len(set(banned)) == 12, "every token once"
    first, second = sample(temperature=1.0, seed=3, n=2)
    assert first != second
    assert sample(temperature=1.0, seed=3, n=2) == [first, second]
    assert sample(temperature=1.0, seed=4) != [first]


def test_stop_and_length(llama):
    prompt = random_tokens(20, seed=13)
    [output] = llama.generate([prompt], [{"temperature": 0, "max_tokens": 12, "ignore_eos": True}])
    tokens, text = list(output.outputs[0].token_ids), output.outputs[0].text
    [stopped] = llama.generate(
        [prompt], [{"temperature": 0, "max_tokens": 12, "stop_token_ids": [tokens[4]]}]
    )
    assert list(stopped.outputs[0].token_ids) == tokens[: tokens.index(tokens[4]) + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    ending = re.search(r"[ -~]{2}", text[2:])
    assert ending, "two printable characters to stop at"
    [stopped] = llama.generate(
        [prompt], [{"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stop": [ending[0]]}]
    )
    assert stopped.outputs[0].text == text[: text.index(ending[0])]
    long = random_tokens(250, seed=1)
    [full] = llama.generate([long], [{"temperature": 0, "max_tokens": 100, "ignore_eos": True}])
    assert len(full.outputs[0].token_ids) == 6
    assert full.outputs[0].finish_reason == "length"


def test_structured_outputs(llama):
    def ask(**constraint):
        return llama.call(structured, constraint)

    assert ask(choice=["positive", "negative"]) in ("positive", "negative")
    assert re.fullmatch(r"[0-9]{3}-[a-c]+", ask(regex=r"[0-9]{3}-[a-c]{1,4}"))
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    assert isinstance(json.loads(ask(json=schema))["ok"], bool)


def structured(llm, constraint):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**constraint)
    )
    # A neighbour without constraint, so that only one of two rows is masked.
    free = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate(["hello", "hello"], [params, free], use_tqdm=False)
    return outputs[0].outputs[0].text


def test_nothing_compiles_while_serving(checkpoint, cache_root):
    with Engine(checkpoint("llama"), HOST, cache_root=cache_root) as engine:
        before = engine.call(compilations)
        params = {"temperature": 0.7, "top_p": 0.9, "logprobs": 2, "prompt_logprobs": 1}
        for count in (1, 2, 3, 4):
            prompts = mixed_prompts(count, longest=200, seed=count)
            engine.generate(prompts, [{**params, "max_tokens": 4}] * count)
        assert engine.call(compilations) == before
        with pytest.raises(EngineError, match=r"maximum context length is 256 tokens"):
            engine.generate([random_tokens(300, seed=0)], [{"max_tokens": 1}])
        assert engine.tokens([[5]], 3) == models.greedy(checkpoint("llama"), [[5]], tokens=3)


def compilations(llm):
    """What the product counted, and the frames that Dynamo compiled."""
    from torch._dynamo.utils import counters

    done = model_runner(llm).execution.pipeline.counters
    return done.traces, done.lowerings, done.compilations, dict(counters["frames"])


def test_a_bucket_of_a_skipped_phase_raises(checkpoint, cache_root):
    settings = {**HOST, "VLLM_NEURON_SKIP_PREFILL_WARMUP": "1"}
    with Engine(checkpoint("llama"), settings, cache_root=cache_root) as engine:
        # A prompt of one token needs no prefill.
        assert engine.tokens([[5]], 3) == models.greedy(checkpoint("llama"), [[5]], tokens=3)
        with pytest.raises(
            EngineError,
            match=r"ExecutionError: No graph was compiled for bucket prefill_s128; compiled: "
            r"\['decode_b1', 'decode_b2', 'decode_b4'\]\. Nothing is compiled while serving",
        ):
            engine.tokens([[5, 6]], 3)


def test_bfloat16_is_close_to_transformers(checkpoint, cache_root):
    # The stated tolerance: logprobs of a bfloat16 engine differ from those of transformers in
    # bfloat16 by no more than transformers in bfloat16 differs from itself in float32, doubled.
    folder = checkpoint("llama")
    prompt = random_tokens(100, seed=17)
    exact, rounded = (
        models.logits(folder, prompt, dtype=dtype).log_softmax(-1)
        for dtype in (torch.float32, torch.bfloat16)
    )
    targets = torch.tensor(prompt[1:])
    exact, rounded = (
        scores[:-1].gather(1, targets[:, None]).squeeze(1) for scores in (exact, rounded)
    )
    bound = 2 * (exact - rounded).abs().max().item()
    options = {"dtype": "bfloat16", "num_gpu_blocks_override": 20_000}
    with Engine(folder, HOST, cache_root=cache_root, **options) as engine:
        [output] = engine.generate([prompt], [{"max_tokens": 1, "prompt_logprobs": 0}])
        found = torch.tensor(
            [
                row[token].logprob
                for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
        )
        assert (found - rounded).abs().max().item() <= bound
        assert (found - exact).abs().max().item() <= bound
        # Batches and prefix cache hits change nothing within the engine.
        prompts = mixed_prompts(8, longest=150, seed=19)
        assert engine.tokens(prompts, 16) == [engine.tokens([p], 16)[0] for p in prompts]
        # 160 MB of KV cache; a step that copies or converts it takes above 0.2 s.
        assert engine.call(fastest_decode) < 0.05


def fastest_decode(llm):
    runner = model_runner(llm)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        runner.execute_padding()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
