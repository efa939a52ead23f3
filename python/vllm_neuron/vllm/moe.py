"""Mixture-of-experts layers in plain tensor operations of static shape.

vLLM leaves the unquantised experts of an out-of-tree platform to the platform, and would hide the
layer from the trace in a custom operator; both are replaced here. Every expert is applied to every
token and weighted by the router, with weight 0 for experts that were not chosen: no shape depends
on the routing.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_neuron.errors import ConfigurationError

__all__ = ["DenseExperts", "TracedMoERunner"]


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
        score = layer.scoring_func
        for feature, present in (
            ("grouped top-k routing", layer.use_grouped_topk),
            ("a routing bias", layer.e_score_correction_bias is not None),
            ("a custom routing function", layer.custom_routing_function is not None),
            (f"router score {score}", score not in ("softmax", "sigmoid")),
            (f"activation {layer.activation.value}", layer.activation != MoEActivation.SILU),
            ("expert biases", self.moe.has_bias),
            ("a routed scaling factor", layer.routed_scaling_factor != 1.0),
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
            layer: holds `w13_weight` (experts, 2 * intermediate, hidden; gate above up) and
                `w2_weight` (experts, hidden, intermediate).
            x: hidden states (T, hidden).
            router_logits: (T, experts).
            input_ids: unused.

        Returns:
            (T, hidden), of x's dtype.
        """
        scores = router_logits.float()
        scores = scores.softmax(-1) if layer.scoring_func == "softmax" else scores.sigmoid()
        chosen, experts = torch.topk(scores, layer.top_k, dim=-1)
        if layer.renormalize:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(1, experts, chosen)

        gate_up = torch.einsum("th,eih->eti", x, layer.w13_weight)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        outputs = torch.einsum("eti,ehi->eth", hidden, layer.w2_weight)
        return (outputs * weights.t().unsqueeze(-1).to(x.dtype)).sum(0)
