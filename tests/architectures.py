"""Tiny configurations of the decoder architectures that the table of models runs.

Each keeps what is special about its architecture (windows, soft caps, sinks, experts, latent
attention) at a size where 64 tokens take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WINDOW: Final = 24
"""Sliding window in tokens: shorter than the prompts, so that it counts."""

_MOE: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ALTERNATING: Final = ["sliding_attention", "full_attention"]
_LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

ARCHITECTURES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "llama": ("Llama", {}),
    # Its published small sizes tie the embeddings and have heads wider than hidden / heads.
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "olmo2": ("Olmo2", {}),
    "gemma2": (
        "Gemma2",
        {
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "initializer_range": 0.25,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
"""Prefix of transformers' classes, and what differs from the shape that all share, by name."""

SERVED_BY_TEXT_CONFIG: Final = {"Gemma3": "Gemma3TextConfig"}
"""Architectures whose plain config is that of a multimodal model."""


def build_model(architecture: str, shape: Mapping[str, Any]) -> Any:
    """Return a model with transformers' own initialisation.

    Args:
        architecture: a key of `ARCHITECTURES`.
        shape: configuration that all architectures share.
    """
    import transformers

    prefix, fields = ARCHITECTURES[architecture]
    config = getattr(transformers, SERVED_BY_TEXT_CONFIG.get(prefix, f"{prefix}Config"))
    return getattr(transformers, f"{prefix}ForCausalLM")(config(**{**shape, **fields}))
