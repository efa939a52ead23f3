"""Operators on the XLA route against eager: contracts and inputs of the native route's tests."""

from __future__ import annotations

import pytest

from tests.lowering.parity import assert_parity, lowering_of

# Collected here they take the fixture below.
from tests.lowering.test_operators import (  # noqa: F401
    Step,
    test_arange_and_linspace_round_as_eager,
    test_clamp_where_and_classification_propagate_nan,
    test_comparisons_promote_and_know_nan_and_unsigned,
    test_complex_multiplication,
    test_distances_and_integer_products,
    test_empty_and_scalar_tensors,
    test_float_division_and_remainders,
    test_floats_that_no_integer_holds_are_cast_as_x86_does,
    test_fp8_casts_saturate_as_eager,
    test_gather_scatter_and_friends,
    test_integer_division_and_remainders,
    test_integers_wrap_around_and_keep_64_bits,
    test_literals_of_every_dtype,
    test_masked_writes,
    test_narrow_floats_are_rounded_once_per_operator,
    test_order_of_integers,
    test_powers_at_the_edges,
    test_reading_wraps_negative_indices,
    test_scaled_products_of_fp8,
    test_scatter_reduce,
    test_searchsorted,
    test_shifts_and_bits,
    test_slices_views_and_pads,
    test_softmax_of_nothing_but_infinity_is_nan,
    test_special_values_of_activations,
    test_writes_through_views,
    test_writing_wraps_negative_indices_and_counts_duplicates,
)
from vllm_neuron.route import Route


@pytest.fixture(scope="module")
def equal():
    lowering = lowering_of(Route.XLA)
    yield lambda function, *args, **tolerance: assert_parity(
        lowering, Step(function), args, **tolerance
    )
    lowering.close()
