"""Sampling a step with draft tokens: what is accepted, what replaces it, and how often."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.sample import sampler
from vllm.v1.sample.ops import penalties
from vllm.v1.worker import gpu_input_batch

from vllm_neuron.vllm.requests import RequestTable
from vllm_neuron.vllm.sampling import HostSampler
from vllm_neuron.vllm.speculation import StepDrafts, sample_step

VOCABULARY = 6
PROMPT = [1, 2, 3]
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(
        runner_type="generate",
        logits_processors=None,
        max_model_len=32,
        get_vocab_size=lambda: VOCABULARY,
    ),
    scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=64),
    speculative_config=None,
    reasoning_config=None,
)


@pytest.fixture(autouse=True)
def unpinned(monkeypatch):
    """No pinned memory, as on the plugin's platform: without a platform vLLM believes in it."""
    monkeypatch.setattr(torch_utils, "is_pin_memory_available", lambda: False)
    for module in (sampler, penalties, gpu_input_batch):
        monkeypatch.setattr(module, "PIN_MEMORY", False)


def step(drafts, *, params=None):
    """A step with these draft tokens of each request; with `params` the requests are new."""
    ids = [str(row) for row in range(len(drafts))]
    new = [
        NewRequestData(
            req_id=req_id,
            prompt_token_ids=list(PROMPT),
            mm_features=[],
            sampling_params=own,
            pooling_params=None,
            block_ids=([1],),
            num_computed_tokens=0,
            lora_request=None,
        )
        for req_id, own in zip(ids, params or (), strict=False)
    ]
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = new
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = {
        req_id: 1 + len(own) for req_id, own in zip(ids, drafts, strict=True)
    }
    output.scheduled_spec_decode_tokens = {
        req_id: own for req_id, own in zip(ids, drafts, strict=True) if own
    }
    return output


class Batch:
    """Requests of equal prompts whose steps have given logits.

    Args:
        params: sampling parameters of each request.
    """

    def __init__(self, *params: SamplingParams) -> None:
        self.table = RequestTable(CONFIG, block_size=16, max_blocks=2)
        self.table.update(step([[]] * len(params), params=params))
        self.sampler = HostSampler(logprobs_mode="raw_logprobs")

    def sample(self, drafts, logits, *, partial=()):
        """Samples a step; `logits` are (rows, vocabulary) in the order of requests and drafts."""
        # As the table does for every step.
        self.table.batch.refresh_metadata()
        layout = StepDrafts.of(step(drafts), self.table.batch.req_ids)
        found = torch.tensor(np.asarray(logits), dtype=torch.float32)
        return sample_step(self.sampler, self.table, found, layout, partial=partial)

    def outputs(self):
        return [request.output_token_ids for request in self.table.requests.values()]


def peaks(*tokens):
    """Logits whose largest value is at each token."""
    return np.eye(VOCABULARY)[list(tokens)] * 8


GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("drafts", "best", "expected"),
    [
        ([4, 5], [4, 5, 1], [4, 5, 1]),
        ([4, 5], [4, 2, 1], [4, 2]),
        ([4, 5], [3, 5, 1], [3]),
        ([], [3], [3]),
        ([-1, -1], [3, 0, 0], [3]),
    ],
    ids=["all", "some", "none", "no drafts", "the scheduler's padding"],
)
def test_greedy_drafts_are_accepted_up_to_the_first_wrong_one(drafts, best, expected):
    batch = Batch(GREEDY)
    sampled, logprobs = batch.sample([drafts], peaks(*best))
    assert (sampled, logprobs) == ([expected], None)
    assert batch.outputs() == [expected]
    assert batch.table.batch.token_ids_cpu[0, : 3 + len(expected)].tolist() == PROMPT + expected
    assert batch.table.batch.num_tokens_no_spec[0] == 3 + len(expected)


def test_requests_of_a_batch_are_independent_and_partial_ones_get_nothing():
    batch = Batch(GREEDY, GREEDY, GREEDY, GREEDY)
    best = peaks(1, *(2, 3, 4), 5, *(2, 0))
    sampled, _ = batch.sample([[], [2, 3], [], [1]], best, partial=[2])
    assert sampled == [[1], [2, 3, 4], [], [2]]


def test_logits_of_calls_are_put_in_the_order_of_the_batch():
    drafts = StepDrafts.of(step([[], [4, 5], [-1], [3]]), ["0", "1", "2", "3"])
    assert drafts.num_tokens == {"0": 1, "1": 1, "2": 1, "3": 1}
    single = torch.tensor([[1.0], [2.0]])
    several = torch.tensor([[[3.0], [4.0], [9.0]], [[5.0], [6.0], [7.0]]])
    merged = drafts.merge([([0, 2], single), ([3, 1], several)]).flatten().tolist()
    assert merged[:5] + merged[6:] == [1, 5, 6, 7, 2, 3, 4]
    assert drafts.num_logits == 8


def test_logprobs_follow_the_accepted_tokens():
    logprobs = SamplingParams(temperature=0, logprobs=1)
    batch = Batch(logprobs, logprobs, logprobs)
    logits = np.random.default_rng(0).normal(size=(7, VOCABULARY))
    best = logits.argmax(-1).tolist()
    drafts = [best[:2], [(best[3] + 1) % VOCABULARY], best[5:6]]
    sampled, found = batch.sample(drafts, logits)
    assert sampled == [best[:3], best[3:4], best[5:7]]
    rows = [0, 1, 2, 3, 5, 6]
    expected = torch.tensor(logits[rows]).log_softmax(-1).amax(-1).tolist()
    assert found.cu_num_generated_tokens == [0, 3, 4, 6]
    assert found.logprobs[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert found.logprob_token_ids[:, 0].tolist() == [best[row] for row in rows]
    assert found.sampled_token_ranks.tolist() == [1] * 6
    last = found.slice_request(2, 2)
    assert last.logprob_token_ids[:, 0].tolist() == best[5:7]


PARAMETERS = {
    "seed": {"temperature": 1.0, "seed": 7},
    "top-k and top-p": {"temperature": 0.7, "seed": 7, "top_k": 4, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "seed": 7, "min_p": 0.2},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
    },
    "minimum": {"temperature": 0, "min_tokens": 3, "stop_token_ids": [4, 5]},
    "allowed": {"temperature": 1.0, "seed": 7, "allowed_token_ids": [1, 4, 5]},
    "bias": {"temperature": 0, "logit_bias": {3: 1.5}},
}


@pytest.mark.parametrize("fields", PARAMETERS.values(), ids=PARAMETERS)
def test_drafts_change_nothing_but_the_number_of_steps(fields):
    logits = np.random.default_rng(3).normal(size=(8, VOCABULARY))

    def batch():
        return Batch(SamplingParams(**fields), GREEDY)

    one_by_one = batch()
    for row in logits:
        one_by_one.sample([[], []], [row, row])
    tokens = one_by_one.outputs()
    for right in range(5):
        at_once = batch()
        drafts = [*tokens[0][:right], (tokens[0][right] + 1) % VOCABULARY]
        sampled, _ = at_once.sample([drafts, []], [*logits[: right + 2], logits[0]])
        assert sampled == [tokens[0][: right + 1], tokens[1][:1]]
        for row in logits[right + 1 :]:
            at_once.sample([[], []], [row, row])
        assert at_once.outputs()[0] == tokens[0]


def test_what_is_sampled_has_the_distribution_of_the_target():
    # Chi-square with 5 degrees of freedom: 20.5 is its 0.999 quantile. The seeds are fixed.
    requests, rounds = 64, 40
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(2, VOCABULARY))
    target = torch.tensor(logits).softmax(-1).numpy()
    draft = int(target[0].argsort()[-2])
    first, second = np.zeros(VOCABULARY), np.zeros(VOCABULARY)
    for number in range(rounds):
        batch = Batch(*(SamplingParams(seed=number * requests + row) for row in range(requests)))
        sampled, _ = batch.sample([[draft]] * requests, np.tile(logits, (requests, 1)))
        for tokens in sampled:
            first[tokens[0]] += 1
            assert len(tokens) == (2 if tokens[0] == draft else 1)
            if len(tokens) == 2:
                second[tokens[1]] += 1
    for counts, expected in ((first, target[0]), (second, target[1])):
        expected = expected * counts.sum()
        assert ((counts - expected) ** 2 / expected).sum() < 20.5
    # Most drafts are rejected, and a tenth of the requests is left to count the second token.
    assert requests * rounds * 0.1 < second.sum() < requests * rounds * 0.5
