"""Mixture-of-experts layers in plain tensor operations of static shape.

vLLM leaves the unquantised experts of an out-of-tree platform to the platform, and would hide the
layer from the trace in a custom operator; both are replaced here. Every expert is applied to every
token and weighted by the router, with weight 0 for experts that were not chosen: no shape depends
on the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_neuron.errors import ConfigurationError

__all__ = ["DenseExperts", "TracedMoERunner", "apply_experts", "check_experts"]

Activation = Callable[[torch.Tensor], torch.Tensor]


@MoERunner.register_oot(name="MoERunner")
class TracedMoERunner(MoERunner):
    """vLLM's runner of a mixture-of-experts layer, called directly, not as an operator."""

    def _select_forward(self) -> Any:
        return self._forward_traced

    def _encode_layer_name(self) -> str:
        return self.layer_name

    def _forward_traced(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        layer_name: str,
        hidden_dim_unpadded: int,
    ) -> Any:
        return self._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)


@UnquantizedFusedMoEMethod.register_oot(name="UnquantizedFusedMoEMethod")
class DenseExperts(UnquantizedFusedMoEMethod):
    """Routing and experts of one layer."""

    @property
    def is_monolithic(self) -> bool:
        """Returns True: routing is done here, vLLM's router needs compiled kernels."""
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Checks that the layer is of a kind that `apply_monolithic` computes.

        Raises:
            ConfigurationError: it is not.
        """
        check_experts(layer)
        # vLLM would build it on the first call, inside the trace.
        layer._ensure_moe_quant_config_init()

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies the experts.

        Args:
            layer: holds `w13_weight` (experts, 2 * intermediate, hidden), `w2_weight` (experts,
                hidden, intermediate), and with biases `w13_bias` (experts, 2 * intermediate) and
                `w2_bias` (experts, hidden).
            x: hidden states (T, hidden).
            router_logits: (T, experts).
            input_ids: unused.

        Returns:
            (T, hidden), of x's dtype.
        """
        return apply_experts(
            layer,
            x,
            router_logits,
            gate_up_weights=layer.w13_weight,
            down_weights=layer.w2_weight,
            has_bias=self.moe.has_bias,
        )


def apply_experts(
    layer: Any,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    *,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    has_bias: bool,
) -> torch.Tensor:
    """Applies every expert to every token, weighted by the router.

    Args:
        layer: its routing, and with biases `w13_bias` (experts, 2 * intermediate) and `w2_bias`
            (experts, hidden).
        x: hidden states (T, hidden).
        router_logits: (T, experts).
        gate_up_weights: (experts, 2 * intermediate, hidden).
        down_weights: (experts, hidden, intermediate).
        has_bias: whether there are biases.

    Returns:
        (T, hidden), of x's dtype.
    """
    weights = _routing_weights(layer, router_logits)
    gate_up = torch.einsum("th,eih->eti", x, gate_up_weights)
    if has_bias:
        gate_up = gate_up + layer.w13_bias.unsqueeze(1)
    hidden = _ACTIVATIONS[layer.activation](gate_up)
    outputs = torch.einsum("eti,ehi->eth", hidden, down_weights)
    if has_bias:
        outputs = outputs + layer.w2_bias.unsqueeze(1)
    return (outputs * weights.t().unsqueeze(-1).to(x.dtype)).sum(0)


def check_experts(layer: Any) -> None:
    """Checks that a layer is of a kind that `apply_experts` computes.

    Raises:
        ConfigurationError: it is not.
    """
    score = layer.scoring_func
    for feature, present in (
        ("a custom routing function", layer.custom_routing_function is not None),
        (f"router score {score}", score not in ("softmax", "sigmoid")),
        (f"activation {layer.activation.value}", layer.activation not in _ACTIVATIONS),
        ("router weights applied to the input", layer.apply_router_weight_on_input),
        ("expert parallelism", layer.expert_map is not None),
    ):
        if present:
            raise ConfigurationError(
                f"This model cannot be served on Neuron: {feature} in {layer.layer_name} is "
                f"not implemented in the plugin's mixture-of-experts layer.",
                name="model",
                value=feature,
            )


def _routing_weights(layer: Any, router_logits: torch.Tensor) -> torch.Tensor:
    """The weight of every expert for every token, float32 (T, experts); 0 if it is not chosen.

    Experts are chosen by their score plus the layer's bias, from the best groups only where it has
    groups, and weighted by the score alone (vLLM's grouped_topk and fused_topk_bias).
    """
    scores = router_logits.float()
    scores = scores.softmax(-1) if layer.scoring_func == "softmax" else scores.sigmoid()
    merits = scores
    bias = layer.e_score_correction_bias
    if bias is not None:
        merits = scores + bias.float()
    if layer.use_grouped_topk:
        grouped = merits.view(len(merits), layer.num_expert_group, -1)
        # With a bias a group is as good as its two best experts, else as its best one.
        best = grouped.topk(2 if bias is not None else 1, dim=-1)[0].sum(-1)
        groups = best.topk(layer.topk_group, dim=-1)[1]
        open_groups = torch.zeros_like(best).scatter(1, groups, 1.0) > 0
        merits = torch.where(open_groups.unsqueeze(-1), grouped, float("-inf")).view_as(merits)
    experts = torch.topk(merits, layer.top_k, dim=-1)[1]
    chosen = scores.gather(1, experts)
    if layer.renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    if layer.routed_scaling_factor != 1.0:
        chosen = chosen * layer.routed_scaling_factor
    return torch.zeros_like(scores).scatter(1, experts, chosen)


def _gated(function: Callable[[torch.Tensor], torch.Tensor]) -> Activation:
    """An activation of the first half of the features times the second half."""

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return apply


def _swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: gate and up alternate, and are clamped (vLLM's SwigluOAIAndMul)."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(max=_OAI_LIMIT)
    return (up.clamp(-_OAI_LIMIT, _OAI_LIMIT) + 1) * gate * torch.sigmoid(gate * _OAI_ALPHA)


_OAI_LIMIT = 7.0
_OAI_ALPHA = 1.702

_ACTIVATIONS: dict[MoEActivation, Activation] = {
    MoEActivation.SILU: _gated(functional.silu),
    MoEActivation.GELU: _gated(functional.gelu),
    MoEActivation.GELU_TANH: _gated(partial(functional.gelu, approximate="tanh")),
    MoEActivation.SWIGLUOAI: _swiglu_oai,
}
