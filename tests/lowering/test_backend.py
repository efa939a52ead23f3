"""torch.compile(backend="neuron_native") and its refusing sibling, as a user calls them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vllm_neuron.errors import CaptureError


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="neuron_native", dynamic=False)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_both_backends_are_found_by_name():
    assert {"neuron_native", "vllm_neuron"} <= set(torch._dynamo.list_backends())


def test_a_module_and_its_gradients_equal_eager():
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected = module(x)
    expected.sum().backward()
    gradient = module[0].weight.grad.clone()
    module.zero_grad()
    found = compiled(module)(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module[0].weight.grad, gradient, rtol=1e-5, atol=1e-6)


def test_updates_reach_the_arguments_and_identity_is_kept():
    def write(cache, rows):
        cache[-1] = rows
        return cache, cache.sum()

    cache = torch.zeros(3, 2)
    result, total = compiled(write)(cache, torch.ones(2))
    assert result is cache
    assert cache.tolist() == [[0, 0], [0, 0], [1, 1]] and total == 2


def test_random_numbers_are_those_of_eager_and_move_on():
    def draw(x):
        return x + torch.rand(3), torch.empty(4).exponential_()

    step = compiled(draw)
    torch.manual_seed(7)
    expected = [draw(torch.zeros(3)) for _ in range(2)]
    torch.manual_seed(7)
    found = [step(torch.zeros(3)) for _ in range(2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("overlapping_first", [True, False])
def test_overlapping_and_separate_inputs_do_not_share_a_graph(overlapping_first):
    def step(x, y):
        x.mul_(2)
        return x + y

    function = compiled(step)

    def overlapping():
        base = torch.ones(8)
        return function(base[:4], base[2:6]).tolist()

    def separate():
        return function(torch.ones(4), torch.ones(4)).tolist()

    order = [overlapping, separate] if overlapping_first else [separate, overlapping]
    results = {call.__name__: call() for call in order}
    assert results == {"overlapping": [4, 4, 3, 3], "separate": [3, 3, 3, 3]}


def test_multinomial_draws_what_eager_draws():
    weights = torch.tensor([[0.1, 0.5, 0.4], [0.0, 0.0, 1.0]])

    def step(x):
        return x.multinomial(1), x.multinomial(1, replacement=True), x[:1].multinomial(3)

    torch.manual_seed(5)
    expected = step(weights)
    torch.manual_seed(5)
    assert all(map(torch.equal, compiled(step)(weights), expected))


def test_assertions_of_decompositions_are_left_out():
    function = compiled(lambda x: torch.nn.functional.one_hot(x, 4).sum(0))
    assert function(torch.tensor([1, 3, 1])).tolist() == [0, 2, 0, 1]


def test_a_graph_break_is_two_graphs():
    def step(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    assert compiled(step)(torch.ones(2)).tolist() == [3, 3]


def test_a_dynamic_dimension_is_refused():
    torch._dynamo.reset()
    step = torch.compile(lambda x: x * 2, backend="neuron_native", dynamic=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        step(torch.ones(3, 3))
    assert isinstance(caught.value.inner_exception, CaptureError)
    assert "pass dynamic=False to torch.compile" in str(caught.value)


def test_the_xla_backend_compiles_and_updates():
    torch._dynamo.reset()

    def step(x, cache):
        cache.add_(x)
        return cache * 2

    cache = torch.ones(3)
    result = torch.compile(step, backend="vllm_neuron", dynamic=False)(torch.ones(3), cache)
    assert (result.tolist(), cache.tolist()) == ([4, 4, 4], [2, 2, 2])


def test_the_xla_backend_says_how_to_make_the_worker_s_interpreter(tmp_path):
    program = (
        "import torch\n"
        "step = torch.compile(lambda x: x * 2, backend='vllm_neuron')\n"
        "step(torch.ones(3))\n"
    )
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "Make it: vllm-neuron xla-env create." in run.stderr


class Inference(nn.Module):
    @torch.inference_mode()
    def forward(self, x):
        with torch.inference_mode(False):
            outside = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            product = x @ x.t()
        return x.detach() * 2 + outside, product


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_forward_in_inference_mode_equals_eager(mode):
    x = torch.randn(3, 4)
    with mode():
        found, expected = compiled(Inference())(x), Inference()(x)
    assert not found[0].requires_grad
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


class Refused(nn.Module):
    @torch.inference_mode()
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ torch.linalg.eigh(x)[0], torch.bincount(x.int().view(-1))


def test_a_refusal_names_the_operator_and_leaves_no_mode_behind():
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as failure:
            compiled(Refused())(torch.eye(4))
        text = str(failure.value.inner_exception)
        assert "aten._linalg_eigh.default" in text or "aten.bincount.default" in text
        assert f"{__file__}:" in text
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before
        assert not torch.is_inference_mode_enabled()
        assert (torch.ones(2, requires_grad=True) + 1).requires_grad


def test_a_size_that_depends_on_values_is_named():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as failure:
        torch.compile(
            lambda x: torch.bincount(x, minlength=4) * 2,
            backend="neuron_native",
            dynamic=False,
            fullgraph=True,
        )(torch.tensor([1, 2]))
    text = str(failure.value.inner_exception)
    assert "aten.bincount.default(int64[2])" in text and f"{__file__}:" in text
    assert "has a size that depends on the values of tensors" in text


def test_linear_systems_equal_eager():
    def solve(a, b):
        return torch.linalg.inv(a), torch.linalg.solve(a, b), torch.linalg.cholesky(a @ a.mT)

    a, b = torch.randn(3, 4, 4), torch.randn(3, 4, 2)
    torch.testing.assert_close(compiled(solve)(a, b), solve(a, b), rtol=1e-3, atol=1e-3)


def test_dropout_draws_what_eager_draws_and_its_gradient_follows():
    x = torch.randn(30, requires_grad=True)

    def drop(x):
        kept = torch.empty(40).bernoulli_(0.5)
        certain = [F.dropout(x, p, True) for p in (0.0, 1.0)]
        return F.dropout(x, 0.3, True), kept, torch.bernoulli(x.sigmoid()), certain

    results = []
    for step in (drop, compiled(drop)):
        torch.manual_seed(3)
        result = step(x)
        (gradient,) = torch.autograd.grad(result[0].sum(), x)
        results.append((result, gradient))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0)


def test_random_numbers_need_no_input():
    def draw():
        return torch.rand(3), torch.randperm(5), F.dropout(torch.ones(8), 0.5, True)

    torch.manual_seed(5)
    expected = draw()
    step = compiled(draw)
    torch.manual_seed(5)
    torch.testing.assert_close(step(), expected, rtol=0, atol=0)
