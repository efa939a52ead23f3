"""Bucket lists: defaults, every error text, and the choice of a bucket (spec section 7)."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_neuron.errors import ConfigurationError, ExecutionError
from vllm_neuron.vllm.buckets import (
    decode_label,
    prefill_label,
    resolve_buckets,
    verify_label,
)


def resolve(
    *,
    max_model_len=1024,
    max_num_batched_tokens=None,
    max_num_seqs=8,
    block_size=32,
    dcp_size=1,
    pooling=False,
    draft_tokens=0,
    **options,
):
    config = SimpleNamespace(
        num_batched_tokens_buckets=None,
        num_seqs_buckets=None,
        kv_segment_size_buckets=None,
        decode_context_length_buckets=None,
    )
    vars(config).update(options)
    return resolve_buckets(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens or max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        neuron_config=config,
        dcp_size=dcp_size,
        pooling=pooling,
        draft_tokens=draft_tokens,
    )


def error_of(**options):
    with pytest.raises(ValueError) as caught:
        resolve(**options)
    assert isinstance(caught.value, ConfigurationError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("max_model_len", "prefill"),
    [
        (64, (64,)),
        (127, (127,)),
        (128, (128,)),
        (129, (128, 129)),
        (317, (128, 256, 317)),
        (1024, (128, 256, 512, 1024)),
        (16384, (128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
    ],
)
def test_prefill_default_doubles_from_128_and_ends_with_the_budget(max_model_len, prefill):
    buckets = resolve(max_model_len=max_model_len)
    assert buckets.prefill == prefill
    assert buckets.kv_segments == ()
    assert buckets.prefill_origin == "default"


@pytest.mark.parametrize(
    ("max_num_seqs", "decode"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_decode_default_doubles_from_1_and_ends_with_max_num_seqs(max_num_seqs, decode):
    assert resolve(max_num_seqs=max_num_seqs).decode == decode


def test_budget_is_clamped_to_max_model_len():
    assert resolve(max_model_len=317, max_num_batched_tokens=8192).prefill == (128, 256, 317)


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096, 8192])
def test_chunked_prefill_is_segmented_by_default(size):
    buckets = resolve(max_model_len=32768, max_num_batched_tokens=size)
    assert buckets.prefill == buckets.kv_segments == (size,)
    assert buckets.prefill_origin == "segmented"


def test_explicit_prefill_list_wins_over_the_segmented_default():
    buckets = resolve(
        max_model_len=2048,
        max_num_batched_tokens=512,
        num_batched_tokens_buckets=[16, 128, 512],
    )
    assert buckets.prefill == (16, 128, 512)
    assert buckets.kv_segments == (512,)
    assert buckets.prefill_origin == "explicit"


def test_explicit_segment_size():
    buckets = resolve(
        max_model_len=4096, max_num_batched_tokens=1024, kv_segment_size_buckets=[1024]
    )
    assert buckets.prefill == buckets.kv_segments == (1024,)


def test_single_shot_prefill_ends_at_16384():
    assert error_of(max_model_len=16385, max_num_batched_tokens=20000) == (
        "Single-shot prefill (max_num_batched_tokens=20000 >= max_model_len=16385) is only "
        "supported when max_model_len <= 16384. Set max_num_batched_tokens to one of "
        "[512, 1024, 2048, 4096, 8192] to enable chunked prefill."
    )


def test_chunk_size_must_be_supported():
    assert error_of(max_model_len=1024, max_num_batched_tokens=256) == (
        "max_num_batched_tokens=256 is not a supported chunked prefill size on Neuron. Supported "
        "values: [512, 1024, 2048, 4096, 8192]. Alternatively, set max_num_batched_tokens=1024 "
        "(equal to max_model_len) to disable chunked prefill."
    )
    assert error_of(max_model_len=32768, max_num_batched_tokens=16384) == (
        "max_num_batched_tokens=16384 is not a supported chunked prefill size on Neuron. "
        "Supported values: [512, 1024, 2048, 4096, 8192]."
    )


LISTS = ("num_batched_tokens_buckets", "num_seqs_buckets")


@pytest.mark.parametrize(
    "name", [*LISTS, "kv_segment_size_buckets", "decode_context_length_buckets"]
)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], " cannot be empty"),
        ((1, 2), " must be a list, got tuple"),
        ("8", " must be a list, got str"),
        (8, " must be a list, got int"),
        ([1, "2"], "[1] must be an integer, got 2"),
        ([1.5], "[0] must be an integer, got 1.5"),
        ([True], "[0] must be an integer, got True"),
        ([0, 8], "[0] must be positive, got 0"),
        ([-4], "[0] must be positive, got -4"),
        ([1, 4, 4], " must be in strictly ascending order, got [1, 4, 4]"),
        ([4, 1], " must be in strictly ascending order, got [4, 1]"),
    ],
)
def test_malformed_lists(name, value, problem):
    assert error_of(**{name: value}) == name + problem


@pytest.mark.parametrize(
    ("name", "limit", "value"),
    [(LISTS[0], "max_num_batched_tokens (1024)", [128]), (LISTS[1], "max_num_seqs (8)", [1, 16])],
)
def test_last_bucket_must_be_the_limit(name, limit, value):
    assert error_of(**{name: value}) == (
        f"Last bucket in {name} must equal {limit}, got {value[-1]}"
    )


def test_explicit_segment_size_errors():
    name = "kv_segment_size_buckets"
    chunked = {"max_model_len": 4096, "max_num_batched_tokens": 512}
    assert error_of(**chunked, **{name: [640]}) == (
        f"{name}[0] = 640 is not a supported segment size. "
        "Supported values: [512, 1024, 2048, 4096, 8192]."
    )
    assert error_of(**chunked, **{name: [512, 1024]}) == (
        f"{name} must hold one segment size, got 2: [512, 1024]"
    )
    assert error_of(**chunked, num_batched_tokens_buckets=[128, 512], **{name: [512]}) == (
        f"When {name} is set, num_batched_tokens_buckets must match: the prefill length is the "
        f"segment size. Got num_batched_tokens_buckets=[128, 512], {name}=[512]"
    )
    assert error_of(**chunked, **{name: [1024]}) == (
        f"Last bucket in {name} must equal max_num_batched_tokens (512), got 1024"
    )


@pytest.mark.parametrize("explicit", [None, [512]])
def test_segment_size_must_be_divisible_by_the_block_size(explicit):
    message = error_of(
        max_model_len=4096,
        max_num_batched_tokens=512,
        block_size=48,
        kv_segment_size_buckets=explicit,
    )
    assert message == "kv_segment_size_buckets: 512 must be divisible by block_size (48)"


def test_context_buckets():
    buckets = resolve(max_model_len=1024, decode_context_length_buckets=[128, 512])
    assert buckets.contexts == (128, 512)
    assert buckets.num_decode_graphs == 4 * 3
    # The smallest bucket that holds the computed tokens and the new one.
    assert [buckets.context_for(n) for n in (0, 127, 128, 511, 512, 1023)] == [
        128,
        128,
        512,
        512,
        None,
        None,
    ]
    with pytest.raises(ExecutionError, match=r"No compiled graph covers 1025"):
        buckets.context_for(1024)
    assert resolve().context_for(5) is None


def test_context_bucket_errors():
    name = "decode_context_length_buckets"
    assert error_of(**{name: [128, 1024]}) == (
        f"{name}[1] must be less than max_model_len (1024), which is always compiled, got 1024"
    )
    assert error_of(**{name: [100]}) == f"{name}[0] must be divisible by 128, got 100"


def test_dcp_drops_buckets_that_cannot_be_split():
    buckets = resolve(dcp_size=8, block_size=32)
    assert buckets.prefill == (256, 512, 1024)
    assert buckets.warnings == (
        "DCP prefill alignment: dropped 1 bucket(s) not divisible by dcp_size * block_size (256): "
        "[128]; kept [256, 512, 1024]",
    )
    assert resolve(dcp_size=1, max_model_len=317).warnings == ()


@pytest.mark.parametrize("max_model_len", [100, 1000])
def test_dcp_must_keep_the_largest_bucket(max_model_len):
    assert error_of(dcp_size=8, block_size=32, max_model_len=max_model_len).startswith(
        f"DCP prefill alignment: the largest prefill bucket ({max_model_len}) must be divisible by "
        "dcp_size * block_size (256)"
    )


def test_labels():
    assert prefill_label(1024) == "prefill_s1024"
    assert decode_label(8) == "decode_b8"
    assert decode_label(8, 2048) == "decode_b8_ctx2048"


def test_description_names_lists_and_number_of_graphs():
    assert resolve(max_model_len=317, max_num_seqs=3).describe() == (
        "Buckets: prefill tokens [128, 256, 317] (default), decode sequences [1, 2, 3]: "
        "3 prefill and 3 decode graphs"
    )
    buckets = resolve(
        max_model_len=2048, max_num_batched_tokens=512, decode_context_length_buckets=[128]
    )
    assert buckets.describe() == (
        "Buckets: prefill tokens [512] (segmented, KV segment size 512), decode sequences "
        "[1, 2, 4, 8], context lengths [128, 2048]: 1 prefill and 8 decode graphs"
    )


def test_draft_tokens_double_the_decode_graphs():
    assert resolve().num_verify_graphs == 0
    buckets = resolve(draft_tokens=3, decode_context_length_buckets=[128], num_seqs_buckets=[4, 8])
    assert buckets.num_verify_graphs == buckets.num_decode_graphs == 4
    assert buckets.describe() == (
        "Buckets: prefill tokens [128, 256, 512, 1024] (default), decode sequences [4, 8], context "
        "lengths [128, 1024], 3 draft tokens: 4 prefill, 4 decode and 4 verify graphs"
    )
    # The last position of a step decides: the fourth of these has 128 tokens before it.
    assert [buckets.context_for(start + 3) for start in (124, 125)] == [128, None]
    assert (verify_label(8), verify_label(8, 128)) == ("verify_b8", "verify_b8_ctx128")


@given(
    max_model_len=st.integers(2, 16384),
    max_num_seqs=st.integers(1, 300),
    data=st.data(),
)
def test_every_count_the_scheduler_can_ask_for_has_the_smallest_bucket(
    max_model_len, max_num_seqs, data
):
    buckets = resolve(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    for sizes, choose, most in (
        (buckets.prefill, buckets.prefill_for, max_model_len),
        (buckets.decode, buckets.decode_for, max_num_seqs),
    ):
        assert sizes[-1] == most
        count = data.draw(st.integers(1, most))
        assert choose(count) == min(size for size in sizes if size >= count)
        with pytest.raises(ExecutionError, match=f"No compiled graph covers {most + 1}"):
            choose(most + 1)


def test_a_pooling_model_has_no_decode_buckets():
    buckets = resolve(pooling=True)
    assert (buckets.prefill, buckets.decode, buckets.contexts) == ((128, 256, 512, 1024), (), ())
    assert (buckets.num_prefill_graphs, buckets.num_decode_graphs) == (4, 0)
    assert buckets.warnings == ()
    assert buckets.describe() == (
        "Buckets: prefill tokens [128, 256, 512, 1024] (default): 4 graphs, none to decode "
        "(pooling model)"
    )
    options = {"num_seqs_buckets": [8], "decode_context_length_buckets": [128]}
    buckets = resolve(pooling=True, **options)
    assert buckets.num_decode_graphs == 0
    assert buckets.warnings == tuple(
        f"{name} has no effect: a pooling model decodes nothing" for name in options
    )
