"""Engines and servers with n-gram drafts: the same answers in fewer steps."""

from __future__ import annotations

import json
import re

import pytest

from tests import models
from tests.adapters import build_adapter, merge
from tests.serving import Server
from tests.vllm.engine import CPU_MODE, HOST, Engine, EngineError, model_runner
from tests.vllm.test_generation import (
    assert_prompt_logprobs,
    called,
    count_calls,
    mixed_prompts,
    preemptions,
    random_tokens,
    reset_prefix_cache,
)
from tests.vllm.test_lora import generate

pytestmark = pytest.mark.serve

TOKENS = 40
DRAFTS = 3
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
REPETITIVE, NEW = [215] * 8, [60] * 8
"""Of this checkpoint: an answer that repeats itself, and one whose n-grams go on differently."""

BUCKETS = {"neuron_config": {"decode_context_length_buckets": [128], "num_seqs_buckets": [4]}}
ARGUMENTS = (
    *("--max-model-len", "1024", "--max-num-batched-tokens", "512", "--max-num-seqs", "4"),
    *("--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", "72"),
    *("--speculative-config", json.dumps(SPECULATION)),
    *("--additional-config", json.dumps(BUCKETS)),
)
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "num_gpu_blocks_override": 72,
    "disable_log_stats": False,
    "speculative_config": SPECULATION,
    "additional_config": BUCKETS,
}
STRICT = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1"}
"""A start that would have to trace or compile a graph ends with an error."""


@pytest.fixture(scope="module")
def compiled(checkpoint, tmp_path_factory):
    """What CPU compile prints, and the cache root that it leaves; all starts here live on it."""
    folder = tmp_path_factory.mktemp("compile")
    compiling = Server(
        checkpoint("llama"),
        cache_root=folder / "cache",
        folder=folder,
        arguments=ARGUMENTS,
        environment={"VLLM_NEURON_CPU_COMPILE": "1"},
        fork=True,
    )
    try:
        compiling.start()
        assert compiling.wait_exit() == 0, compiling.log_path.read_text()
    finally:
        compiling.close()
    return compiling.log_lines(), folder / "cache"


@pytest.fixture(scope="module")
def engine(checkpoint, compiled):
    settings = HOST | STRICT
    with Engine(checkpoint("llama"), settings, cache_root=compiled[1], **OPTIONS) as found:
        found.call(count_calls)
        yield found


@pytest.fixture(autouse=True)
def fresh(request):
    """Each test of the engine begins with vLLM's drafts and an empty prefix cache."""
    if "engine" in request.fixturenames:
        found = request.getfixturevalue("engine")
        found.call(propose, "lookup")
        found.call(reset_prefix_cache)


class Foreseen:
    """Proposes what is known to come, and something else in every `wrong`-th place.

    Args:
        answers: prompts and their answers.
        wrong: 1 for drafts that are always wrong, 0 for none that is.
    """

    def __init__(self, answers, wrong):
        self.known = [list(prompt) + list(answer) for prompt, answer in answers]
        self.wrong = wrong

    def propose(self, sampled, token_ids, lengths, *, limit):
        return [self.draft(token_ids[row, : lengths[row]].tolist()) for row in range(len(sampled))]

    def draft(self, tokens):
        for known in self.known:
            if known[: len(tokens)] == tokens:
                places = range(len(tokens), min(len(tokens) + DRAFTS, len(known)))
                bad = [self.wrong and place % self.wrong == 0 for place in places]
                return [known[p] ^ 1 if b else known[p] for p, b in zip(places, bad, strict=True)]
        return []


def propose(llm, kind, answers=(), wrong=0):
    """Has the engine draft by "lookup", "foreseen", or not at all ("none")."""
    runner = model_runner(llm)
    runner.lookup = getattr(runner, "lookup", runner.proposer)
    runner.proposer = {
        "lookup": runner.lookup,
        "foreseen": Foreseen(answers, wrong),
        "none": None,
    }[kind]


def drafted(llm):
    """Draft tokens so far: how many were verified, how many of them accepted."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    return tuple(
        found[f"vllm:spec_decode_num_{name}_tokens"].value for name in ("draft", "accepted")
    )


class Steps:
    """What a block of requests took: drafts, accepted ones, and calls by the kind of bucket."""

    def __init__(self, engine):
        self.engine = engine

    def state(self):
        calls = {"decode": 0, "verify": 0}
        for label, count in self.engine.call(called).items():
            if (kind := label.partition("_")[0]) in calls:
                calls[kind] += count
        return (*self.engine.call(drafted), calls["decode"], calls["verify"])

    def __enter__(self):
        self.before = self.state()
        return self

    def __exit__(self, *error):
        pairs = zip(self.state(), self.before, strict=True)
        self.drafts, self.accepted, self.decode, self.verify = (b - a for b, a in pairs)


def test_lookup_gives_the_answers_of_transformers(engine, checkpoint):
    # Chunked prompts, preemptions, prefix cache hits, and prompts of both kinds among them.
    prompts = [random_tokens(270, seed) for seed in range(4)]
    prompts += mixed_prompts(3, longest=300) + [random_tokens(n, n) for n in (513, 700, 980)]
    prompts += [[*prompts[-1][:600], 7], REPETITIVE, NEW]
    expected = models.greedy(checkpoint("llama"), prompts, tokens=TOKENS)
    before = engine.call(preemptions)
    with Steps(engine) as steps:
        assert engine.tokens(prompts, TOKENS) == expected
    assert engine.call(preemptions) > before
    assert steps.drafts > steps.accepted > 0
    assert steps.decode > 0, "steps without drafts have one position per sequence"
    assert engine.call(called)["verify_b4"] > 0
    assert engine.tokens(prompts, TOKENS) == expected, "from the prefix cache"


def test_repetition_is_fast_and_news_is_not_slower(engine, checkpoint):
    for prompt, most in ((REPETITIVE, TOKENS // 2), (NEW, TOKENS - 1)):
        [expected] = models.greedy(checkpoint("llama"), [prompt], tokens=TOKENS)
        with Steps(engine) as steps:
            assert engine.tokens([prompt], TOKENS) == [expected]
        assert steps.drafts > 0
        # The prefill gives the first token; max_tokens may cut the last step short.
        assert steps.decode + steps.verify <= most
        given = steps.decode + steps.verify + steps.accepted
        assert TOKENS - 1 <= given <= TOKENS - 1 + DRAFTS
    assert engine.call(called)["verify_b4_ctx128"] > 0


@pytest.mark.parametrize("wrong", [0, 1, 3], ids=["right", "wrong", "mixed"])
def test_drafts_that_are_right_wrong_and_mixed(engine, checkpoint, wrong):
    prompts = [REPETITIVE, NEW, random_tokens(200, seed=8)]
    expected = models.greedy(checkpoint("llama"), prompts, tokens=TOKENS)
    answers = list(zip(prompts, expected, strict=True))
    engine.call(propose, "foreseen", answers, wrong)
    assert engine.tokens(prompts, TOKENS) == expected
    for prompt, answer in answers:
        with Steps(engine) as steps:
            assert engine.tokens([prompt], TOKENS) == [answer]
        found = (steps.verify, steps.accepted)
        # Of the 39 tokens after the first, four a step; max_tokens cuts the last one short.
        expected_of = {0: found == (10, 30), 1: found == (39, 0), 3: 10 < found[0] < 39}
        assert expected_of[wrong], found
        assert steps.decode == 0


def test_stops_and_limits_inside_drafts(engine, checkpoint):
    [tokens] = models.greedy(checkpoint("llama"), [NEW], tokens=TOKENS)
    long = random_tokens(1017, seed=1)
    [last] = models.greedy(checkpoint("llama"), [long], tokens=7)
    greedy = {"temperature": 0, "ignore_eos": True}
    asked = [
        {**greedy, "max_tokens": 4},
        {**greedy, "max_tokens": 24, "stop_token_ids": [tokens[6]]},
        {**greedy, "max_tokens": 24},
    ]

    def answers(params):
        outputs = [output.outputs[0] for output in engine.generate([NEW] * len(params), params)]
        return [(list(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in outputs]

    engine.call(propose, "none")
    text = answers(asked)[2][1]
    ending = re.search(r"[ -~]", text[3:])
    assert ending, "a printable character to stop at"
    asked.append({**greedy, "max_tokens": 24, "stop": [ending[0]]})
    expected = answers(asked)
    assert [reason for _, _, reason, _ in expected] == ["length", "stop", "length", "stop"]
    assert expected[1][0] == tokens[: tokens.index(tokens[6]) + 1]
    engine.call(propose, "foreseen", [(NEW, tokens), (long, [*last, 70, 71, 72])])
    with Steps(engine) as steps:
        assert answers(asked) == expected
    assert steps.accepted > 0
    # The longest sequence ends inside the drafts too.
    [full] = engine.generate([long], [{**greedy, "max_tokens": 100}])
    assert list(full.outputs[0].token_ids) == last
    assert full.outputs[0].finish_reason == "length"


PARAMETERS = {
    "seed": {"temperature": 1.0, "seed": 5},
    "nucleus": {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 30},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    "frequency": {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.0},
    "minimum": {"temperature": 0, "min_tokens": 9, "stop_token_ids": list(range(6, 200))},
    "allowed": {"temperature": 1.0, "seed": 8, "allowed_token_ids": list(range(70, 90))},
    "bad words": {"temperature": 0, "bad_words": ["a", "b", "c d", "z"]},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "sampled logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 0},
}


def test_parameters_of_requests_mean_what_they_mean_without_drafts(engine, checkpoint):
    prompts = [random_tokens(20, seed) for seed in range(len(PARAMETERS))]
    params = [{"max_tokens": 20, "ignore_eos": True, **own} for own in PARAMETERS.values()]

    def ask():
        return [output.outputs[0] for output in engine.generate(prompts, params)]

    engine.call(propose, "none")
    expected = ask()
    answers = [(p, list(o.token_ids)) for p, o in zip(prompts, expected, strict=True)]
    for wrong in (0, 3):
        engine.call(propose, "foreseen", answers, wrong)
        engine.call(reset_prefix_cache)
        with Steps(engine) as steps:
            outputs = engine.generate(prompts, params)
        assert steps.accepted > 0
        for name, output, before in zip(PARAMETERS, outputs, expected, strict=True):
            found = output.outputs[0]
            assert list(found.token_ids) == list(before.token_ids), name
            if before.logprobs is not None:
                assert scores(found.logprobs) == pytest.approx(scores(before.logprobs), abs=1e-4)
    at = list(PARAMETERS).index("logprobs")
    assert_prompt_logprobs(outputs[at], prompts[at], checkpoint("llama"))


def scores(logprobs):
    """Logprobs by place and token."""
    return {
        (place, token): one.logprob
        for place, tokens in enumerate(logprobs)
        for token, one in tokens.items()
    }


def test_sampling_without_a_seed_and_parameters_that_vllm_refuses(engine):
    [output] = engine.generate([REPETITIVE], [{"temperature": 1.5, "max_tokens": 30, "n": 2}])
    assert len(output.outputs) == 2
    for fields in ({"min_p": 0.5}, {"logit_bias": {70: 5.0}}):
        with pytest.raises(EngineError, match="not yet supported with speculative decoding"):
            engine.generate([NEW], [fields])


def structured(llm, constraint):
    """The answers to two requests, one of them with a grammar: token ids and text."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fixed = {"temperature": 0, "max_tokens": 60}
    grammar = StructuredOutputsParams(**constraint)
    params = [SamplingParams(**fixed, structured_outputs=grammar), SamplingParams(**fixed)]
    prompts = [{"prompt_token_ids": [75] * 9}, {"prompt_token_ids": [215] * 9}]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(list(output.token_ids), output.text) for output in outputs]


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_structured_output(engine):
    for constraint in ({"regex": r"(yes |no ){4}"}, {"json": SCHEMA}):
        engine.call(propose, "none")
        expected = engine.call(structured, constraint)
        prompts = ([75] * 9, [215] * 9)
        answers = [(p, tokens) for p, (tokens, _) in zip(prompts, expected, strict=True)]
        for kind, wrong in (("lookup", 0), ("foreseen", 0), ("foreseen", 3)):
            engine.call(propose, kind, answers, wrong)
            with Steps(engine) as steps:
                assert engine.call(structured, constraint) == expected
            assert steps.accepted > 0, kind
        text = expected[0][1]
        if "regex" in constraint:
            assert re.fullmatch(constraint["regex"], text)
        else:
            assert isinstance(json.loads(text)["ok"], bool)


def test_requests_with_adapters(checkpoint, tmp_path):
    model = checkpoint("llama")
    modules = ("q_proj", "v_proj", "down_proj", "lm_head")
    adapter = build_adapter(tmp_path / "adapter", model, modules, rank=4, alpha=16, seed=1)
    merged = merge(tmp_path / "merged", model, adapter)
    prompts = [NEW, random_tokens(30, seed=2)]
    expected = [
        tokens
        for folder in (model, merged)
        for tokens in models.greedy(folder, prompts, tokens=TOKENS)
    ]
    requests = [
        (prompt, *named) for named in (("", 0, ""), ("own", 1, str(adapter))) for prompt in prompts
    ]
    assert expected[:2] != expected[2:]
    options = {**OPTIONS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with Engine(model, CPU_MODE, cache_root=tmp_path / "cache", **options) as engine:
        engine.call(count_calls)
        # Each answer of the base model is foreseen for the adapter's request too, and wrong there.
        engine.call(propose, "foreseen", list(zip(prompts, expected[:2], strict=True)))
        with Steps(engine) as steps:
            found = engine.call(generate, requests, TOKENS)
        assert [tokens for tokens, _ in found] == expected
        assert steps.drafts > steps.accepted > TOKENS


def metric(server, name):
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in server.metrics().splitlines()
        if line.startswith(name)
    )


def test_cpu_compile_and_a_server_from_what_it_left(checkpoint, compiled, tmp_path):
    log, cache_root = compiled
    plan = "3 draft tokens: 1 prefill, 2 decode and 2 verify graphs"
    assert any(plan in line for line in log), log
    assert log[-1] == "5 of 5 graphs are in the caches"
    for label in ("verify_b4", "verify_b4_ctx128"):
        assert any(re.match(rf"{label} +[0-9a-f]{{32}} .* compiled$", line) for line in log)

    folder = checkpoint("llama")
    options = {"cache_root": cache_root, "folder": tmp_path, "fork": True}
    with Server(folder, arguments=ARGUMENTS, environment=STRICT, **options) as server:
        prompts = [REPETITIVE, NEW, *mixed_prompts(10, longest=200)]
        expected = models.greedy(folder, prompts, tokens=TOKENS)
        fixed = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        bodies = [{"prompt": prompt, **fixed} for prompt in prompts]
        answers = [server.complete(**body) for body in bodies[:2]]
        accepted = metric(server, "vllm:spec_decode_num_accepted_tokens_total{")
        steps = [
            metric(server, f'vllm_neuron:neff_execution_count_total{{bucket_name="{kind}_b4"')
            for kind in ("decode", "verify")
        ]
        assert accepted > TOKENS // 2
        assert 0 <= sum(steps) + accepted - 2 * (TOKENS - 1) <= 2 * DRAFTS
        answers += server.complete_all(bodies[2:])
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        refused = server.post("/v1/completions", {"prompt": NEW, "max_tokens": 1, "min_p": 0.5})
        assert refused.status_code == 400
        assert "not yet supported with speculative decoding" in refused.text
