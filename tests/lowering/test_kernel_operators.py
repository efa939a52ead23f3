"""Special functions, statistics, transforms and kernels that are decomposed, against eager."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lowering.parity import Step, assert_parity
from vllm_neuron.lowering.native import NativeLowering

NAN, INF = math.nan, math.inf
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def lowering():
    with NativeLowering() as lowering:
        yield lowering


@pytest.fixture
def equal(lowering):
    return lambda function, *args, **tolerance: assert_parity(
        lowering, Step(function), args, **tolerance
    )


class Encoder(torch.nn.Module):
    """Attention and encoder layers, which take their fast paths."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        layer = functools.partial(torch.nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
        self.layers = torch.nn.ModuleList([layer(), layer(norm_first=True, activation="gelu")])

    def forward(self, x):
        attended = self.attention(x, x, x), self.attention(x, x, x, need_weights=False)[0]
        return attended, [layer(x) for layer in self.layers]


def test_special_functions_at_their_edges(equal):
    x = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -2.5, 6.0, 30.0, -30.0, INF, -INF, NAN])
    equal(
        lambda x: (x.erfc(), x.lgamma(), x.digamma(), x.erfinv(), torch.special.ndtr(x)),
        x,
        rtol=2e-5,
        atol=1e-5,
    )
    equal(
        lambda x: (torch.polygamma(1, x), torch.special.zeta(x + 1.5, x), torch.mvlgamma(x + 1, 2)),
        torch.tensor([0.1, 0.5, 1.0, 3.5, 20.0]),
        rtol=1e-4,
        atol=1e-4,
    )
    equal(lambda x: (x.erfc(), x.lgamma()), x[2:9].bfloat16(), rtol=2**-7, atol=1e-6)
    equal(lambda x, y: torch.nextafter(x, y), x, x.flip(0))
    equal(lambda x: torch.frexp(x), torch.tensor([0.0, -0.0, 1.0, -0.3, 1e30, 2.0**-126, INF, NAN]))


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pairs=st.lists(st.tuples(st.integers(-120, 127), st.integers(-120, 127)), min_size=3))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int8), ids=str)
def test_common_divisors_and_multiples(equal, dtype, pairs):
    one, two = torch.tensor([*pairs, (0, 0), (0, 5)]).to(dtype).unbind(1)
    equal(lambda x, y: (torch.gcd(x, y), torch.gcd(x[0], y[0])), one, two)
    if dtype == torch.int64:
        equal(lambda x, y: torch.lcm(x, y), one, two)


def test_running_sums_of_exponentials(equal):
    x = torch.tensor([[-INF, 1.0, 2.0, -INF, 100.0, INF], [3.0, -200.0, 90.0, 90.0, NAN, 1.0]])
    equal(lambda x: (x.logcumsumexp(1), x.logcumsumexp(0), x[0, 1].logcumsumexp(0)), x, **CLOSE)


def test_variances_of_little(equal):
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    equal(
        lambda x: (
            torch.var_mean(x, 1),
            x.var((0, 1)),
            x.std(0, correction=2, keepdim=True),
            x[:, :1].var(1),
            x.var(1, correction=7),
            x[:0].var(0),
            x[:, :0].var(1),
            x[0, 0].var(correction=0),
        ),
        x,
        **CLOSE,
    )
    equal(lambda x: (x.var(), x.std(1)), torch.randn(3, 4, dtype=torch.complex64), **CLOSE)


def test_statistics(equal):
    x = torch.tensor([[1.0, 2.0, 5.0, 5.0], [1.0, 3.0, 3.0, 0.0], [2.0, 3.0, 3.0, 2.0]])
    equal(lambda x: (x.mode(0), x.mode(1, keepdim=True), x.int().mode(), x[0, 0].mode()), x)
    broken = torch.tensor([[1.0, NAN, 3.0], [4.0, 2.0, 2.0], [NAN, NAN, NAN]])
    equal(lambda x: (x.nanmedian(), x.nanmedian(1), x.nanmedian(0, keepdim=True)), broken)
    values = torch.tensor([0.5, 1.5, 1.7, 4.0, -1.0, 5.0])
    equal(lambda x: (torch.histc(x, 4, 0, 4), torch.histc(x, 4), torch.histc(x[:1], 4)), values)


def test_bags_of_embeddings(equal):
    torch.manual_seed(0)
    table, indices = torch.randn(7, 3), torch.tensor([0, 6, 2, 2, 5])
    offsets = torch.tensor([0, 2, 2, 5])
    equal(
        lambda w, i, o, s: (
            [F.embedding_bag(i, w, o, mode=mode) for mode in ("sum", "mean", "max")],
            [F.embedding_bag(i, w, o, mode=m, padding_idx=2) for m in ("sum", "mean", "max")],
            F.embedding_bag(i, w, o, mode="mean", include_last_offset=True),
            F.embedding_bag(i[:4].view(2, 2), w, mode="sum", per_sample_weights=s),
        ),
        table,
        indices,
        offsets,
        torch.rand(2, 2),
        **CLOSE,
    )


def test_fourier_transforms(equal):
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.randn(6, 5, dtype=torch.complex64)
    fft = torch.fft
    equal(
        lambda x, y: (
            [fft.fft(y, norm=norm, dim=0) for norm in ("forward", "backward", "ortho")],
            [fft.ifft(y, norm=norm) for norm in ("forward", "backward", "ortho")],
            [fft.irfft(y, norm=norm) for norm in ("forward", "backward", "ortho")],
            fft.fft2(y),
            fft.rfft2(x),
            fft.irfft2(y, s=(4, 7)),
            fft.fft(x),
            fft.irfft(fft.rfft(x, n=16) * fft.rfft(x + 1, n=16), n=16),
        ),
        x,
        y,
        rtol=1e-4,
        atol=1e-4,
    )


def test_triangular_systems_and_cholesky_factors(equal):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 3), torch.randn(2, 3, 4)
    solve = torch.linalg.solve_triangular

    def compute(x, y):
        lower = x.tril(-1) + 2 * torch.eye(3)
        symmetric = x @ x.mT + torch.eye(3)
        return (
            solve(lower, y, upper=False),
            solve(x, y, upper=True, unitriangular=True),
            solve(lower.mT, y.mT, upper=True, left=False),
            solve(lower[0], y, upper=False),
            torch.linalg.cholesky_ex(symmetric),
            torch.linalg.cholesky_ex(symmetric, upper=True),
        )

    equal(compute, x, y, rtol=1e-4, atol=1e-4)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=2, max_size=2))
def test_linear_systems_with_equal_and_zero_pivots(equal, rows):
    """Whole numbers, so that equal pivots and singular matrices are exact in eager too."""
    x = torch.tensor(rows, dtype=torch.float64).view(2, 3, 3)
    y = torch.arange(12.0, dtype=torch.float64).view(2, 3, 2)

    def compute(x, y):
        inverse, info = torch.linalg.inv_ex(x)
        good = (torch.linalg.det(x).abs() > 0.5).view(2, 1, 1)
        safe = torch.where(good, x, torch.eye(3, dtype=x.dtype))
        return (
            torch.where(good, inverse, 0.0),
            torch.where(good.view(2), info, 1),
            torch.linalg.solve(safe, y),
            torch.linalg.solve(safe, y[..., 0]),
            torch.linalg.solve(safe, y.mT, left=False),
            torch.linalg.solve(safe[0], y),
            torch.linalg.det(safe),
            torch.linalg.slogdet(safe),
            torch.linalg.lu(safe),
            torch.linalg.lu_factor(safe),
        )

    equal(compute, x, y, rtol=1e-9, atol=1e-9)


def test_factors_of_little_and_much(equal):
    torch.manual_seed(0)
    empty, one, many = torch.zeros(2, 0, 0), torch.full((1, 1), 4.0), torch.randn(40, 40)
    equal(lambda x: (torch.linalg.inv(x), torch.linalg.det(x)), empty)
    equal(lambda x: (x.inverse(), torch.linalg.cholesky(x), torch.linalg.slogdet(x)), one)
    equal(torch.linalg.inv, many + 10 * torch.eye(40), rtol=1e-4, atol=1e-4)

    def cholesky(x):
        symmetric = x[:4, :4] @ x[:4, :4].mT + torch.eye(4)
        lower = torch.linalg.cholesky(symmetric)
        return (
            torch.cholesky_solve(x[:4, :2], lower),
            torch.cholesky_solve(x[:4, :2], lower.mT, upper=True),
            torch.cholesky_inverse(lower),
            torch.cholesky(symmetric, upper=True),
        )

    equal(cholesky, many, rtol=1e-4, atol=1e-4)
    singular = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    equal(lambda x: torch.linalg.inv_ex(x)[1], singular)


def test_functions_of_complex_numbers(equal):
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.complex64)
    names = "sqrt rsqrt log log1p exp expm1 sin cos tan sinh cosh tanh asin acos atan sigmoid"
    equal(
        lambda x: [getattr(torch, name)(x) for name in (*names.split(), "reciprocal")],
        x,
        rtol=1e-4,
        atol=1e-4,
    )
    equal(lambda x: (x**0.5, x**x, 2**x, x**2), x, rtol=1e-4, atol=1e-4)


def test_fast_paths_of_attention_modules(lowering):
    torch.manual_seed(0)
    assert_parity(lowering, Encoder().eval(), (torch.randn(2, 5, 8),), **CLOSE)


def test_simulated_quantisation(equal):
    torch.manual_seed(0)
    x = torch.tensor([[0.05, 0.15, -0.25, 99.0], [-99.0, 0.0, 0.349, 1.0]])
    scale, zero = torch.tensor([0.1, 0.3]), torch.tensor([0, 3], dtype=torch.int32)
    equal(
        lambda x, s, z: (
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
            torch.fake_quantize_per_tensor_affine(x, 0.1, 7, 0, 255),
            torch.fake_quantize_per_channel_affine(x, s, z, 0, -128, 127),
        ),
        x,
        scale,
        zero,
        **CLOSE,
    )
    weight = torch.randint(-128, 127, (8, 16), dtype=torch.int8)
    equal(
        torch._weight_int8pack_mm,
        torch.randn(3, 16).bfloat16(),
        weight,
        torch.rand(8).bfloat16(),
        rtol=1e-2,
        atol=1e-2,
    )


def test_windows_and_statistics_of_batches(equal):
    torch.manual_seed(0)
    equal(
        lambda x: (torch.hamming_window(4) + x, torch.hann_window(5, periodic=False) * x),
        torch.tensor(1.0),
    )
    equal(
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        torch.randn(4, 3, 5),
        torch.zeros(3),
        torch.ones(3),
        **CLOSE,
    )


def test_distances_within_a_set(equal):
    torch.manual_seed(0)
    equal(lambda x: (F.pdist(x), F.pdist(x, p=1)), torch.randn(4, 3), **CLOSE)
