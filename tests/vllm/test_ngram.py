"""Drafts by n-gram lookup, against vLLM's own search run as plain Python."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.vllm.ngram import NgramProposer, continuation

MODULE = "vllm.v1.spec_decode.ngram_proposer"


@pytest.fixture(scope="module")
def reference():
    """vLLM's search; its module imports Numba, which is absent, for nothing but decorators."""
    plain = ModuleType("numba")
    plain.jit = plain.njit = lambda **options: lambda function: function
    plain.prange = range
    plain.get_num_threads = plain.set_num_threads = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numba", plain)
        patch.delitem(sys.modules, MODULE, raising=False)
        found = importlib.import_module(MODULE)._find_longest_matched_ngram_and_propose_tokens
        patch.delitem(sys.modules, MODULE)
    return found


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    count=st.integers(1, 6),
)
def test_the_same_drafts_as_vllm(reference, tokens, sizes, count):
    sequence = np.array(tokens, np.int32)
    shortest, longest = sorted(sizes)
    expected = reference(
        origin_tokens=sequence,
        min_ngram=shortest,
        max_ngram=longest,
        max_model_len=1000,
        k=count,
    )
    found = continuation(sequence, shortest=shortest, longest=longest, count=count)
    assert found == expected.tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1]),
        ([7, 1, 2, 5, 8, 1, 2, 6, 8, 1, 2], [6, 8, 1]),
        ([5, 5, 5, 5, 5], [5]),
        ([1, 2, 3], []),
        ([], []),
    ],
    ids=["the first of two", "the longer ending", "overlapping", "none", "empty"],
)
def test_what_followed_the_longest_ending(tokens, expected):
    sequence = np.array(tokens, np.int32)
    assert continuation(sequence, shortest=1, longest=4, count=3) == expected


def test_a_batch_has_drafts_where_something_was_sampled_and_there_is_room():
    config = SimpleNamespace(prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=4)
    proposer = NgramProposer(config, max_model_len=10)
    rows = np.array([[1, 2, 3, 4, 1, 2, 0, 0, 0, 0]] * 4, np.int32)
    rows[2, :] = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    rows[3, :9] = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    lengths = np.array([6, 6, 10, 9], np.int32)
    sampled = [[1, 2], [], [2], [2]]
    drafts = proposer.propose(sampled, rows, lengths, limit=9)
    assert drafts == [[3, 4, 1, 2], [], [], [3]]
    assert proposer.propose(sampled, rows, lengths, limit=2) == [[3, 4], [], [], [3]]
    assert proposer.propose(sampled, rows, lengths, limit=0) == [[], [], [], []]
