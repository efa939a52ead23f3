"""Differences, next tokens and tolerances of a comparison."""

import math

import pytest
import torch

from vllm_neuron.comparison.measures import DEFAULT_TOLERANCES, Difference, NextTokens, difference

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "expected", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.5, 0.25),
        # Relative to the largest expected value, not to the one beside it.
        ([0.1, -4.0], [0.0, -4.0], 0.1, 0.025),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([0.1, 0.0], [0.0, 0.0], 0.1, INF),
        ([-INF, 1.0, NAN], [-INF, 1.0, NAN], 0.0, 0.0),
        ([INF, 1.0], [-INF, 1.0], INF, INF),
        ([NAN, 1.0], [0.5, 1.0], INF, INF),
        ([1.0, 1.0], [NAN, 1.0], INF, INF),
        ([], [], 0.0, 0.0),
    ],
)
def test_difference(found, expected, absolute, relative):
    dtype = torch.float64
    here = difference(torch.tensor(found, dtype=dtype), torch.tensor(expected, dtype=dtype))
    assert (here.absolute, here.relative) == (
        pytest.approx(absolute),
        pytest.approx(relative),
    )


def test_difference_of_whole_numbers_and_truth_values():
    assert difference(torch.tensor([3, 5]), torch.tensor([3, 4])) == Difference(1.0, 0.25)
    assert difference(torch.tensor([True]), torch.tensor([False])) == Difference(1.0, INF)


def test_difference_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(1, 2\) differ"):
        difference(torch.zeros(2), torch.zeros(1, 2))


def test_next_tokens():
    tokens = NextTokens()
    tokens.add(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    tokens.add(torch.tensor([[math.log(0.5), math.log(0.5)]]), torch.tensor([[0.0, math.log(3)]]))
    tokens.add(torch.tensor([[0.0, -INF]]), torch.tensor([[-1.0, -INF]]))
    assert (tokens.compared, tokens.agreeing) == (3, 2)
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert tokens.divergences == pytest.approx([0.0, expected, 0.0])


def test_every_dtype_that_is_served_has_a_tolerance():
    from vllm_neuron.vllm.platform import SUPPORTED_DTYPES

    names = {str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES}
    assert names == set(DEFAULT_TOLERANCES)
