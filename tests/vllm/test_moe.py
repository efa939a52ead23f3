"""Routing and experts of the plugin's mixture-of-experts layer against vLLM's and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

from vllm_neuron.vllm.moe import DenseExperts

TOKENS, EXPERTS, HIDDEN, INNER, CHOSEN = 9, 8, 6, 4, 3


def layer_of(**fields):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    values = {
        "scoring_func": "softmax",
        "use_grouped_topk": False,
        "e_score_correction_bias": None,
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "top_k": CHOSEN,
        "activation": MoEActivation.SILU,
        "w13_weight": noise(EXPERTS, 2 * INNER, HIDDEN),
        "w2_weight": noise(EXPERTS, HIDDEN, INNER),
        "w13_bias": noise(EXPERTS, 2 * INNER),
        "w2_bias": noise(EXPERTS, HIDDEN),
    }
    return SimpleNamespace(**values | fields)


def apply(layer, *, has_bias=False):
    """The layer's output, and its inputs."""
    experts = DenseExperts.__new__(DenseExperts)
    torch.nn.Module.__init__(experts)
    experts.moe = SimpleNamespace(has_bias=has_bias)
    torch.manual_seed(1)
    x, logits = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    return experts.apply_monolithic(layer, x, logits), x, logits


def by_hand(layer, x, weights, experts, activation, *, has_bias):
    rows = []
    for token, row in enumerate(x):
        total = torch.zeros(HIDDEN)
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            inner = layer.w13_weight[expert] @ row + has_bias * layer.w13_bias[expert]
            outer = layer.w2_weight[expert] @ activation(inner) + has_bias * layer.w2_bias[expert]
            total += weight * outer
        rows.append(total)
    return torch.stack(rows)


def silu(inner):
    gate, up = inner.chunk(2)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, EXPERTS)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_grouped_routing_is_that_of_vllm(score, bias, renormalize):
    layer = layer_of(
        scoring_func=score,
        use_grouped_topk=True,
        num_expert_group=4,
        topk_group=2,
        e_score_correction_bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
    )
    output, x, logits = apply(layer)
    weights, experts = grouped_topk(
        x, logits, CHOSEN, renormalize, 4, 2, score, 2.5, e_score_correction_bias=bias
    )
    expected = by_hand(layer, x, weights, experts, silu, has_bias=False)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_experts_with_biases_and_the_activation_of_gpt_oss():
    layer = layer_of(activation=MoEActivation.SWIGLUOAI)
    output, x, logits = apply(layer, has_bias=True)
    best, experts = logits.topk(CHOSEN)
    activation = SwigluOAIAndMul.forward_native
    settings = SimpleNamespace(alpha=1.702, limit=7.0)
    expected = by_hand(
        layer, x, best.softmax(-1), experts, lambda h: activation(settings, h), has_bias=True
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
