"""Own lowerings against eager: each family's contract, with chosen and generated inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lowering.parity import Step, assert_parity
from vllm_neuron.errors import LoweringError
from vllm_neuron.lowering.native import NativeLowering

NAN, INF = math.nan, math.inf
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
generated = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def equal():
    with NativeLowering() as lowering:
        yield lambda function, *args, **tolerance: assert_parity(
            lowering, Step(function), args, **tolerance
        )


# --- arithmetic -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_division_and_remainders(equal, dtype):
    left = torch.tensor([7, -7, 7, -7, 0, 5, 100, -100], dtype=dtype)
    right = torch.tensor([3, 3, -3, -3, 5, -5, -9, 9], dtype=dtype)
    equal(
        lambda x, y: (x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc")),
        left,
        right,
    )
    equal(lambda x: (x // 4, x // -4, x % 4, x % -4, torch.fmod(x, 4), x / 4), left)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_float_division_and_remainders(equal, dtype):
    left = torch.tensor([7.5, -7.5, 7.5, -7.5, 0.0, INF, NAN, 1.0, -1.0], dtype=dtype)
    right = torch.tensor([2.0, 2.0, -2.0, -2.0, 3.0, 2.0, 1.0, NAN, 0.0], dtype=dtype)
    equal(lambda x, y: (x // y, x % y, torch.fmod(x, y)), left, right)
    equal(lambda x: (x // -0.1, x % -0.1, torch.fmod(x, 0.7)), left)


@pytest.mark.parametrize("dtype", (*INTEGERS, torch.uint8), ids=str)
def test_shifts_and_bits(equal, dtype):
    value = torch.tensor([-128, 127, -1, 1, 77, -77]).to(dtype)
    amount = torch.tensor([0, 1, 2, 3, 5, 7]).to(dtype)
    equal(lambda x, s: (x << s, x >> s, x[:, None] >> s, x << 2, x >> 2), value, amount)
    equal(lambda x, s: (x & s, x | s, x ^ s, ~x, x & 15, x | 3, x ^ 5), value, amount)


def test_comparisons_promote_and_know_nan_and_unsigned(equal):
    x = torch.tensor([1.0, NAN, -INF, 0.0, -0.0])
    y = torch.tensor([NAN, NAN, 0.0, -0.0, 1.0])
    equal(lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y, x != x), x, y)
    equal(
        lambda x, y: (x < y, x == y, x > 100),
        *(torch.tensor(v).to(torch.uint8) for v in ([200, 1], [100, 1])),
    )
    equal(lambda x, y: (x < y, x == y), torch.tensor([2, 3]), torch.tensor([2.5, 3.0]))
    equal(lambda x: (x < 0.1, x == 0.1, x >= 0.1), torch.tensor([0.1, 0.2]).bfloat16())


def test_narrow_floats_are_rounded_once_per_operator(equal):
    torch.manual_seed(0)
    x, y = torch.randn(2, 200).bfloat16()
    equal(lambda x, y: (x * 0.1, x + 0.3, x * y + y, 0.3 - x), x, y)
    # One unit in the last place: here XLA may fuse the product and the sum.
    equal(lambda x, y: torch.add(x, y, alpha=0.3), x, y, rtol=2**-7, atol=0.0)
    equal(lambda x, s: (x // 0.3, x + s, s + x, x * s, s * x), x, torch.tensor(0.3))
    equal(lambda x, y: (x.to(torch.float32).to(torch.bfloat16).float(), (x * 3).float()), x, y)
    # One unit in the last place: XLA's functions differ a little before the rounding, and it
    # multiplies by the reciprocal of a constant divisor.
    equal(
        lambda x: (x.tanh(), x.exp(), x.sigmoid(), torch.nn.functional.gelu(x), x / 0.3),
        x,
        rtol=2**-7,
        atol=0.0,
    )


def test_clamp_where_and_classification_propagate_nan(equal):
    x = torch.tensor([NAN, INF, -INF, 0.5, -3.0, 3.0])
    equal(lambda x: (x.clamp(-1, 1), x.clamp(min=0), x.clamp(max=0.2), x.clamp(1, -1)), x)
    equal(lambda x: (x.isnan(), x.isinf(), x.isfinite(), torch.maximum(x, x.flip(0))), x)
    equal(lambda x: (torch.where(x > 0, x, 0), x.masked_fill(x > 0, -INF), x.sign(), x.trunc()), x)


@pytest.mark.parametrize(
    "source", (torch.float32, torch.bfloat16, torch.int64, torch.bool), ids=str
)
def test_casts(equal, source):
    values = torch.tensor([0.0, 1.5, 2.5, -1.5, 100.7, 0.25, -0.5]).to(source)
    targets = (torch.int64, torch.int32, torch.int8, torch.bool, torch.float16, torch.bfloat16)
    equal(lambda x: tuple(x.to(target) for target in targets), values)


def test_floats_that_no_integer_holds_are_cast_as_x86_does(equal):
    values = torch.tensor(
        [NAN, INF, -INF, 300.0, -300.0, 7e4, -7e4, 2.0**31, -(2.0**31), 1e10, -1e10, 2.0**63, -1e20]
    )
    targets = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
    for source in (torch.float32, torch.float64, torch.bfloat16):
        equal(lambda x: tuple(x.to(target) for target in targets), values.to(source))


def test_powers_at_the_edges(equal):
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.5, INF, -INF, NAN])
    equal(lambda x: (x**0.5, x**-1, x**2, x**3, x**-2, x**0, x**1), x)
    equal(lambda x: (x**-0.5, 2.0**x, x**x, x.abs() ** 0.3, x.sqrt(), x.rsqrt()), x, **CLOSE)
    integers = torch.tensor([1, -1, 2, -3, 5, 7])
    powers = torch.tensor([-1, -2, -3, 3, 0, 2])
    equal(lambda i, p: (i**2, i**3, i**0, i**p, 2 ** p.abs(), i**0.5), integers, powers, **CLOSE)


def test_special_values_of_activations(equal):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 20.5, -20.5, -INF, NAN, 0.3, -4.0])
    functional = torch.nn.functional
    names = "silu softplus mish hardswish relu elu hardsigmoid selu logsigmoid softsign tanhshrink"
    equal(lambda x: tuple(getattr(functional, name)(x) for name in names.split()), x, **CLOSE)
    equal(lambda x: (functional.gelu(x), functional.gelu(x, approximate="tanh")), x, **CLOSE)
    equal(lambda x: (x.erf(), x.expm1(), x.log1p(), x.log2(), x.exp2(), x.nan_to_num()), x, **CLOSE)
    equal(lambda x: (torch.fmax(x, x.flip(0)), torch.hypot(x, x.flip(0)), x.signbit()), x, **CLOSE)


def test_fp8_casts_saturate_as_eager(equal):
    values = torch.tensor([0.3, 448.0, 460.0, 500.0, -1e6, INF, NAN, 0.0])
    for target in (torch.float8_e4m3fn, torch.float8_e5m2):
        equal(lambda x, target=target: x.to(target).to(torch.float32), values)


def test_integers_wrap_around_and_keep_64_bits(equal):
    equal(lambda x: (x + 1, x * 2, -x), torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32))
    equal(lambda x: (x * 1048576 + 7, x // 3, x % 1000, x.max()), torch.tensor([2**40 + 1, -5]))


# --- indexing -------------------------------------------------------------------------------


@generated
@given(data=st.data())
def test_reading_wraps_negative_indices(equal, data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))
    x = torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)
    count = data.draw(st.integers(1, 4))
    indices = [
        torch.tensor(data.draw(st.lists(st.integers(-s, s - 1), min_size=count, max_size=count)))
        for s in sizes
    ]
    equal(lambda x, i, j: (x[i], x[:, j], x[i, j], x[i[:, None], j], x[None, i]), x, *indices[:2])


@generated
@given(data=st.data())
def test_writing_wraps_negative_indices_and_counts_duplicates(equal, data):
    rows = data.draw(st.integers(2, 6))
    slots = data.draw(st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=5))
    distinct = list({slot % rows: slot for slot in slots}.values())
    x = torch.arange(rows * 3.0).reshape(rows, 3)

    def write(x, slots, distinct):
        x.index_put_((slots,), x.new_ones(slots.shape[0], 3), accumulate=True)
        x[distinct] = -1.0
        return x.sum(0)

    equal(write, x, torch.tensor(slots), torch.tensor(distinct))


def test_masked_writes(equal):
    x = torch.arange(24.0).reshape(4, 3, 2)
    mask = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]]).bool()

    def write(x, mask, rows):
        x[mask] = 0.5
        x[mask[:, 0]] = 7.0
        return x.index_put((mask,), rows), x.masked_scatter(mask[..., None], rows)

    equal(write, x, mask, torch.arange(10.0).reshape(5, 2))


def test_gather_scatter_and_friends(equal):
    torch.manual_seed(0)
    x, source = torch.randn(4, 5), torch.randn(3, 5)
    index = torch.tensor([[0, 3, 1, 2, 0], [1, 1, 1, 1, 1], [3, 0, 2, 2, 1]])
    equal(lambda x, i: (x.gather(0, i), x.gather(1, i[:, :2]), x.take(i - 4)), x, index)
    equal(
        lambda x, i, s: (x.scatter(0, i, s), x.scatter(0, i, 2.5), x.index_select(0, i[0])),
        x,
        index[:1],
        source,
    )
    equal(
        lambda x, i, s: (x.scatter_add(0, i, s), x.index_add(0, i[:, 0], s, alpha=2)),
        x,
        index,
        source,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("include_self", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.int64), ids=str)
def test_scatter_reduce(equal, dtype, include_self):
    base = torch.tensor([1, 2, 3, 4], dtype=dtype)
    index, source = torch.tensor([0, 1, 0, 1, 2, 1]), torch.tensor([-1, 5, 3, 2, -5, 6]).to(dtype)
    names = ("sum", "prod", "mean", "amax", "amin")
    equal(
        lambda b, i, s: tuple(
            b.scatter_reduce(0, i, s, reduce=name, include_self=include_self) for name in names
        ),
        base,
        index,
        source,
        rtol=1e-6,
        atol=1e-6,
    )


# --- ordering, reductions, scans ------------------------------------------------------------

elements = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.0, 3.5, INF, -INF, NAN])


@generated
@given(values=st.lists(elements, min_size=1, max_size=9))
def test_order_with_ties_nan_and_infinity(equal, values):
    x = torch.tensor([values, values[::-1]])
    equal(lambda x: (x.sort(stable=True), x.sort(descending=True, stable=True)), x)
    equal(lambda x: (x.argmax(-1), x.argmin(-1), x.max(-1), x.min(-1), x.argmax(), x.amax(0)), x)
    equal(lambda x: (x.topk(1)[0], x.cummax(-1), x.cummin(-1), x.median(-1)[0]), x)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int8, torch.uint8, torch.bool), ids=str)
def test_order_of_integers(equal, dtype):
    x = torch.tensor([[3, 1, 2, 3, 0, 1], [5, 0, 5, 7, 2, 2]]).to(dtype)
    equal(lambda x: (x.sort(stable=True), x.max(0), x.min(1), x.cummax(1)), x)
    equal(lambda x: (x.sum(1), x.prod(1), x.any(0), x.all(0), x.cumsum(1), x.cumprod(1)), x)


def test_searchsorted(equal):
    bounds, values = torch.tensor([1.0, 3, 3, 7]), torch.tensor([0.0, 1, 3, 8, NAN, -INF])
    equal(
        lambda b, v: (
            torch.searchsorted(b, v),
            torch.searchsorted(b, v, right=True),
            torch.bucketize(v, b, right=True),
        ),
        bounds,
        values,
    )


def test_empty_and_scalar_tensors(equal):
    equal(
        lambda x: (x.sum(0), x.prod(0), x.any(0), x.all(), x.mean(0), x.cumsum(0)),
        torch.zeros(0, 3),
    )
    equal(
        lambda x: (x.sum(), x.argmax(), x.softmax(0), x.cumsum(0), x.max(), x.sort()[0]),
        torch.tensor(2.0),
    )
    equal(lambda x: (torch.cat([x, x[:0]]), x[5:1], x.split([0, 4])), torch.arange(4.0))


def test_softmax_of_nothing_but_infinity_is_nan(equal):
    x = torch.tensor([[-INF, -INF], [0.0, -INF], [NAN, 1.0]])
    equal(lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)), x, rtol=1e-6, atol=1e-6)


# --- shapes ---------------------------------------------------------------------------------


def test_slices_views_and_pads(equal):
    x = torch.arange(60.0).reshape(3, 5, 4)
    pad = torch.nn.functional.pad
    equal(lambda x: (x[1:3], x[:, ::2], x[-2:], x[..., 3], x[:, 1 : 2**62], x.flip(0, 2)), x)
    equal(lambda x: (x.unfold(1, 3, 2), x.as_strided((2, 3), (1, 2), 2), x.diagonal(1, 1, 2)), x)
    equal(lambda x: (pad(x, (1, -1)), pad(x, (0, 0, 1, 1), value=-INF), x.roll((1, -2), (0, 1))), x)


def test_strided_views_count_in_storage(equal):
    x = torch.arange(12.0).reshape(3, 4)
    read = lambda x: (x.as_strided((2, 3), (3, 1), 1), x.as_strided((3,), (0,), 2))  # noqa: E731
    for stored in (x, x.t(), torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)):
        equal(read, stored)
    equal(lambda x, s: x.t().as_strided_scatter(s, (2, 3), (4, 1), 1), x, -torch.ones(2, 3))
    with pytest.raises(LoweringError, match="only a part of that storage"):
        equal(lambda x: x.as_strided((2,), (1,)), x[1:])


def test_arange_and_linspace_round_as_eager(equal):
    def count(x):
        half = torch.arange(0, 10, 0.3, dtype=torch.float16)
        return half, torch.arange(0, 1, 0.1) + x, torch.arange(300, dtype=torch.bfloat16)

    equal(count, torch.zeros(()))
    equal(
        lambda x: (torch.linspace(3, -2, 5) + x, torch.arange(5, 0, -2), torch.eye(3)),
        torch.ones(()),
    )


def test_literals_of_every_dtype(equal):
    def add(x):
        literals = [
            torch.tensor([0, 4], dtype=torch.uint8),
            torch.tensor([True, False]),
            torch.tensor([1.5, NAN]).bfloat16(),
            torch.tensor([2**40, -1]),
        ]
        complex_one = torch.tensor([1 + 2j, 3j], dtype=torch.complex64)
        return [x + item for item in literals], torch.view_as_real(complex_one * x)

    equal(add, torch.ones(2))


def test_unpacking_of_int4_weights(equal):
    torch.manual_seed(0)

    def unpack(words, halves, scale):
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32) * 4
        wide = ((words[:, :, None] >> order) & 15).flatten(1).float() * scale
        nibbles = (halves[..., None] >> torch.tensor([0, 4], dtype=torch.uint8)) & 15
        return wide, nibbles.flatten(-2).to(torch.int8) - 8

    words = torch.randint(-(2**31), 2**31 - 1, (4, 2), dtype=torch.int32)
    halves = torch.randint(0, 255, (4, 8), dtype=torch.uint8)
    equal(unpack, words, halves, torch.rand(16))


def test_scaled_products_of_fp8(equal):
    torch.manual_seed(0)
    left = torch.randn(16, 32).to(torch.float8_e4m3fn)
    right = torch.randn(16, 32).to(torch.float8_e4m3fn)
    bfloat16 = torch.bfloat16

    def product(a, w, one, two, rows, columns, bias):
        return (
            torch._scaled_mm(a, w.t(), one, two, out_dtype=bfloat16),
            torch._scaled_mm(a, w.t(), rows, columns, bias=bias, out_dtype=bfloat16),
        )

    scales = (torch.tensor(0.5), torch.tensor(2.0), torch.rand(16, 1), torch.rand(1, 16))
    equal(product, left, right, *scales, torch.randn(16).bfloat16(), rtol=1e-2, atol=1e-2)


def test_distances_and_integer_products(equal):
    torch.manual_seed(0)
    x, y = torch.randn(4, 6), torch.randn(5, 6)
    equal(
        lambda x, y: (torch.cdist(x, y), torch.dist(x, x + 1), torch.addmv(x[:, 0], x, y[0])),
        x,
        y,
        **CLOSE,
    )
    a = torch.randint(-128, 127, (32, 16), dtype=torch.int8)
    equal(lambda a: (torch._int_mm(a, a.t().contiguous()), a.long() @ a.long().t()), a)


def test_writes_through_views(equal):
    def write(x, y):
        x[0] = 1.0
        x[:, 1] = y[:, 0]
        x[1:3, ::2] = 2
        x[-1, 2:] += 5
        x[2].diagonal().fill_(9)
        return x.sum()

    equal(write, torch.arange(48.0).reshape(3, 4, 4), torch.ones(3, 4, 4))


def test_complex_multiplication(equal):
    x = torch.arange(12.0).reshape(3, 2, 2)

    def rotate(x, angle):
        turned = torch.view_as_complex(x) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(turned)

    equal(rotate, x, torch.tensor([[0.1, 0.2]]), rtol=1e-5, atol=1e-5)


def test_complex_arithmetic(equal):
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, dtype=torch.complex64)
    real = torch.view_as_real

    def compute(a, b):
        numbers = (
            a * b,
            a + b,
            a - b,
            a / b,
            a * 2,
            a * 1j,
            a.conj() + b,
            a @ b,
            a.sum(),
            a.mean(),
        )
        return [real(number.resolve_conj()) for number in numbers], a.abs(), a.angle(), a.real + 1

    equal(compute, a, b, **CLOSE)
