"""Convolutions, pooling, resizing and padding against eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lowering.parity import Step, assert_parity
from vllm_neuron.lowering.native import NativeLowering

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def equal():
    with NativeLowering() as lowering:
        yield lambda function, *args, **tolerance: assert_parity(
            lowering, Step(function), args, **(tolerance or CLOSE)
        )


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_pooling_windows(equal, data):
    size = data.draw(st.tuples(st.integers(4, 9), st.integers(4, 9)))
    kernel, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    padding = data.draw(st.integers(0, kernel // 2))
    ceil, count = data.draw(st.booleans()), data.draw(st.booleans())
    x = torch.randint(-3, 4, (2, 3, *size)).float()
    place = {"stride": stride, "padding": padding, "ceil_mode": ceil}
    equal(
        lambda x: (
            F.max_pool2d(x, kernel, return_indices=True, **place),
            F.avg_pool2d(x, kernel, count_include_pad=count, **place),
            F.avg_pool1d(x[0], kernel, count_include_pad=count, **place),
            F.adaptive_avg_pool2d(x, (3, 2)),
        ),
        x,
    )


def test_pooling_of_nan_infinity_and_narrow_floats(equal):
    x = torch.arange(-8.0, 8.0).reshape(1, 1, 4, 4)
    x[0, 0, 0, 1] = x[0, 0, 1, 0] = math.nan
    x[0, 0, 2:, 2:] = -math.inf
    equal(lambda x: F.max_pool2d(x, 2, return_indices=True), x)
    equal(lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 1, 1)), torch.randn(1, 2, 5, 5).half())
    equal(lambda x: F.max_pool2d(x, 3, dilation=2), torch.randn(1, 2, 7, 7))


@pytest.mark.parametrize("groups", (1, 4))
def test_convolutions(equal, groups):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, 9), torch.randn(8, 4 // groups, 3), torch.randn(8)
    equal(
        lambda x, w, b: (
            F.conv1d(x, w, b, padding=2, groups=groups)[..., :-2],
            F.conv1d(x, w, stride=2, dilation=2, groups=groups),
            F.conv2d(x[..., None], w[..., None], b, padding="same", groups=groups),
        ),
        x,
        weight,
        bias,
    )


def test_patches_and_transposed_convolutions(equal):
    torch.manual_seed(0)
    image, patch = torch.randn(1, 3, 8, 8), torch.randn(5, 3, 4, 4)
    equal(lambda x, w: F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2), image, patch)
    equal(
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        torch.randn(2, 4, 5, 5),
        torch.randn(4, 3, 3, 3),
    )
    equal(
        lambda x, w: F.conv3d(x, w, stride=2), torch.randn(1, 3, 4, 4, 4), torch.ones(5, 3, 2, 2, 2)
    )


def test_resizing_and_padding(equal):
    torch.manual_seed(0)
    x = torch.randn(1, 4, 5, 5)
    equal(
        lambda x: (
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(7, 3), mode="bilinear"),
            F.interpolate(x, size=(7, 8), mode="bilinear", align_corners=True),
            F.interpolate(x, size=(6, 6), mode="nearest-exact"),
            F.pixel_shuffle(x, 2),
            F.unfold(x, 3, padding=1, stride=2),
        ),
        x,
    )
    equal(lambda x: F.interpolate(x, size=(7, 7), mode="bicubic"), x, rtol=1e-4, atol=1e-4)
    for mode in ("reflect", "replicate", "circular", "constant"):
        equal(
            lambda x, mode=mode: (F.pad(x, (1, 2, 0, 3), mode=mode), F.pad(x[0], (2, 1), mode)), x
        )
    equal(lambda x: F.fold(F.unfold(x, 2, stride=2), (4, 4), 2, stride=2), x[..., :4, :4].clone())


def test_normalisations(equal):
    torch.manual_seed(0)
    x, weight, var = torch.randn(2, 4, 6), torch.randn(4), torch.rand(4)
    equal(
        lambda x, w, v: (
            F.batch_norm(x, w, v, w, w),
            F.batch_norm(x, w, v),
            F.group_norm(x, 2, w, w),
            F.instance_norm(x),
            F.layer_norm(x, (6,)),
            F.rms_norm(x, (6,)),
            F.normalize(x, dim=1),
            x.var(1),
            x.std(2, correction=0),
        ),
        x,
        weight,
        var,
    )
    equal(
        lambda x: (
            F.batch_norm(x, x[0, :, 0].float(), x[1, :, 0].float().abs()),
            F.group_norm(x, 2),
        ),
        x.half(),
        rtol=2e-3,
        atol=2e-3,
    )
