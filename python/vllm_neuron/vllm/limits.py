"""What this version cannot serve: engine options and request parameters, each with its refusal.

One place for both, so that a limit that falls is removed by deleting its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_neuron.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

__all__ = ["ENGINE_LIMITS", "Limit", "REQUEST_LIMITS", "check_engine", "check_request"]


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that cannot be served.

    Attributes:
        option: the option or parameter, as the user writes it.
        value: reads the value that is refused; None or False when it is not asked for.
        advice: what to do.
    """

    option: str
    value: Callable[[Any], Any]
    advice: str


def _above_one(section: str, name: str) -> Callable[[VllmConfig], int | None]:
    def value(vllm_config: VllmConfig) -> int | None:
        size = getattr(getattr(vllm_config, section), name)
        return size if size > 1 else None

    return value


#: fp8 KV caches; the attention backend has their dtypes, and imports too much for here.
FP8_CACHE = ("fp8", "fp8_e4m3", "fp8_e5m2")


def _kv_cache_dtype(vllm_config: VllmConfig) -> str | None:
    cache_dtype = vllm_config.cache_config.cache_dtype
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return None if cache_dtype in ("auto", model_dtype, *FP8_CACHE) else cache_dtype


def _speculation(vllm_config: VllmConfig) -> str | None:
    config = vllm_config.speculative_config
    assert config is not None
    if vllm_config.model_config.runner_type == "pooling":
        return "pooling model"
    if config.method != "ngram":
        return f"method {config.method}"
    if config.rejection_sample_method != "standard":
        return f"rejection_sample_method {config.rejection_sample_method}"
    return None


def _cut_below_drafts(vllm_config: VllmConfig) -> int | None:
    # vLLM's scheduler pads a request to its drafts, cuts it to the threshold, and asserts.
    threshold: int = vllm_config.scheduler_config.long_prefill_token_threshold
    return threshold if 0 < threshold <= vllm_config.num_speculative_tokens else None


_ONE = "Leave it at 1: this version runs one process on one device."
_UNSET = "Unset it."

ENGINE_LIMITS = (
    Limit("--tensor-parallel-size", _above_one("parallel_config", "tensor_parallel_size"), _ONE),
    Limit(
        "--pipeline-parallel-size", _above_one("parallel_config", "pipeline_parallel_size"), _ONE
    ),
    Limit("--data-parallel-size", _above_one("parallel_config", "data_parallel_size"), _ONE),
    Limit(
        "--decode-context-parallel-size",
        _above_one("parallel_config", "decode_context_parallel_size"),
        _ONE,
    ),
    Limit(
        "--prefill-context-parallel-size",
        _above_one("parallel_config", "prefill_context_parallel_size"),
        _ONE,
    ),
    Limit(
        "--enable-lora for a pooling model",
        lambda c: c.lora_config is not None and c.model_config.runner_type == "pooling",
        "Unset it: adapters are served for generating models only.",
    ),
    Limit(
        "--fully-sharded-loras",
        lambda c: c.lora_config is not None and c.lora_config.fully_sharded_loras,
        _UNSET,
    ),
    Limit(
        "--speculative-config",
        lambda c: c.speculative_config and _speculation(c),
        "Use method ngram, which needs no draft model, with a model that generates text.",
    ),
    Limit(
        "--long-prefill-token-threshold with --speculative-config",
        _cut_below_drafts,
        "Unset it, or set it above num_speculative_tokens.",
    ),
    Limit(
        "--enable-lora with --speculative-config and vLLM's Transformers backend",
        lambda c: (
            c.lora_config is not None
            and c.speculative_config is not None
            and c.model_config.using_transformers_backend()
        ),
        "Leave one of the three out.",
    ),
    Limit(
        "--kv-transfer-config",
        lambda c: c.kv_transfer_config and c.kv_transfer_config.kv_connector,
        _UNSET,
    ),
    Limit("--ec-transfer-config", lambda c: c.ec_transfer_config is not None, _UNSET),
    Limit(
        "--weight-transfer-config",
        lambda c: c.weight_transfer_config is not None,
        "Unset it. LLM.apply_model and the worker's refresh_weights take changed weights over.",
    ),
    Limit(
        "--quantization-config",
        lambda c: c.model_config.quantization_config is not None,
        "Unset it: weights are not quantised while they are loaded.",
    ),
    Limit(
        "--kv-cache-dtype",
        _kv_cache_dtype,
        f"Leave it at auto, for the model's dtype, or set one of {', '.join(FP8_CACHE)}.",
    ),
    Limit(
        "--kv-cache-dtype-skip-layers",
        lambda c: ", ".join(c.cache_config.kv_cache_dtype_skip_layers or ()) or None,
        "Unset it: all layers have one KV cache dtype.",
    ),
    Limit(
        "--runner",
        lambda c: (
            c.model_config.runner_type
            if c.model_config.runner_type not in ("generate", "pooling")
            else None
        ),
        "Only generating and pooling models are served.",
    ),
    # vLLM only warns, and then pools a part of the prompt or attends to one.
    Limit(
        "--enable-chunked-prefill",
        lambda c: (
            c.model_config.runner_type == "pooling"
            and c.scheduler_config.enable_chunked_prefill
            and not c.model_config.is_chunked_prefill_supported
        ),
        "Unset it: this pooling model needs every prompt in one piece.",
    ),
    Limit(
        "--enable-prefix-caching",
        lambda c: (
            c.model_config.runner_type == "pooling"
            and c.cache_config.enable_prefix_caching
            and not c.model_config.is_prefix_caching_supported
        ),
        "Unset it: this pooling model needs every prompt in one piece.",
    ),
    Limit("--enable-prompt-embeds", lambda c: c.model_config.enable_prompt_embeds, _UNSET),
    Limit("--enable-sleep-mode", lambda c: c.model_config.enable_sleep_mode, _UNSET),
    Limit(
        "multimodal model",
        lambda c: c.model_config.is_multimodal_model and c.model_config.architecture,
        "Only decoder models of text are served.",
    ),
    Limit(
        "encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder and c.model_config.architecture,
        "Only decoder models of text are served.",
    ),
    Limit(
        "model with state-space or linear attention layers",
        lambda c: (
            (c.model_config.is_hybrid or c.model_config.is_attention_free)
            and c.model_config.architecture
        ),
        "Only models whose layers all have softmax attention are served.",
    ),
    Limit(
        "model with multi-head latent attention",
        lambda c: c.model_config.use_mla and c.model_config.architecture,
        "Unset VLLM_MLA_DISABLE or set it to 1: the model then runs with full keys and values.",
    ),
)

REQUEST_LIMITS = (
    Limit("prompt_logprob_token_ids", lambda p: p.prompt_logprob_token_ids is not None, _UNSET),
)

POOLING_REQUEST_LIMITS = (
    Limit(
        "token_type_ids",
        lambda p: "compressed_token_type_ids" in (p.extra_kwargs or {}),
        "Use a model that tells two texts apart by its prompt.",
    ),
)


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse an engine configuration that this version cannot serve.

    Raises:
        ConfigurationError: naming the first option that cannot be served, and its value.
    """
    for limit in ENGINE_LIMITS:
        value = limit.value(vllm_config)
        if value not in (None, False):
            shown = "" if value is True else f" ({value})"
            raise ConfigurationError(
                f"{limit.option}{shown} is not supported on Neuron in this version. {limit.advice}",
                name=limit.option,
                value=value,
            )


def check_request(params: SamplingParams | PoolingParams) -> None:
    """Refuse a request that the model runner cannot serve; vLLM answers it with HTTP 400.

    Raises:
        ValueError: naming the parameter.
    """
    from vllm.sampling_params import SamplingParams

    limits = REQUEST_LIMITS if isinstance(params, SamplingParams) else POOLING_REQUEST_LIMITS
    for limit in limits:
        value = limit.value(params)
        if value not in (None, False):
            raise ValueError(
                f"{limit.option}={value} is not supported on Neuron in this version. {limit.advice}"
            )
