"""Which parts of a vLLM configuration are factors of the trace key.

A field that this file does not name is a factor: an unknown field of a later vLLM may shape the
graph, and a needless miss costs seconds where a stale hit costs a wrong answer (spec PC-24, bugs
A08). A field is named here only when it cannot reach the graph of a step, or reaches it through
the shape of an argument or a weight, which are factors of their own. Paths, ports, ranks and
credentials are never factors (spec CC-12).
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from vllm_neuron.cache.keys import canonical_json

if TYPE_CHECKING:
    import torch
    from vllm.config import LoRAConfig, VllmConfig

__all__ = ["UnkeyableConfigError", "describe", "model_factors"]

#: Fields of ModelConfig that a step's graph does not depend on: names and places of files, the
#: tokenizer, what the API server and the sampler do, and what `hf_config` is handled for.
MODEL_FIELDS_OUTSIDE = frozenset(
    """
    model model_weights tokenizer tokenizer_mode tokenizer_revision revision code_revision seed
    hf_config hf_text_config hf_config_path hf_token hf_overrides allowed_local_media_path
    allowed_media_domains served_model_name skip_tokenizer_init generation_config
    override_generation_config max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel
    enable_trace_replay logits_processors io_processor_plugin renderer_num_workers config_format
    trust_remote_code spec_target_max_model_len max_model_len enforce_eager enable_sleep_mode
    sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
    enable_nccl_comm_suspend enable_cumem_allocator allow_deprecated_quantization
    disable_cascade_attn convert pooler_config multimodal_config
    """.split()
)

#: Fields of CacheConfig that only count, place or account for blocks. The number of blocks is part
#: of the shape of the KV cache arguments.
CACHE_FIELDS_OUTSIDE = frozenset(
    """
    gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override num_gpu_blocks
    num_cpu_blocks enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval
    prefix_match_unit user_specified_block_size _block_size_resolved
    effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency hash_block_size
    cache_hit_alignment_tokens kv_offloading_size kv_offloading_backend is_attention_free
    """.split()
)

#: Fields of ParallelConfig that shape the graph; the others are addresses, ranks and launchers.
PARALLEL_FIELDS_INSIDE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "expert_placement_strategy",
    "enable_eplb",
)

#: Fields of LoRAConfig that do not reach a step: how many adapters the host keeps, what only models
#: with images and CUDA graphs have.
LORA_FIELDS_OUTSIDE = frozenset({"max_cpu_loras", "default_mm_loras", "specialize_active_lora"})

#: Keys of a Hugging Face configuration that say where and by what it was written, not what it is.
HF_KEYS_OUTSIDE = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "_commit_hash",
        "_attn_implementation",
    }
)

#: vLLM's variables that are factors of its own compile cache but cannot reach our graphs; with the
#: plugin's own, which `envs` classifies.
VARIABLES_OUTSIDE = frozenset(
    """
    VLLM_PLUGINS VLLM_RAY_BUNDLE_INDICES VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_RAY_PER_WORKER_GPUS
    VLLM_USE_V2_MODEL_RUNNER VLLM_ENGINE_READY_TIMEOUT_S VLLM_ENGINE_ITERATION_TIMEOUT_S
    VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_SLEEP_WHEN_IDLE VLLM_TRACE_FUNCTION VLLM_DISABLE_LOG_LOGO
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_DISABLE_COMPILE_CACHE CMAKE_BUILD_TYPE VERBOSE NVCC_THREADS
    VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
    """.split()
)


class UnkeyableConfigError(ValueError):
    """A configuration cannot be keyed, so its traces must not be kept.

    A key without the field could give a stale hit (bugs A11).
    """


def model_factors(vllm_config: VllmConfig, model: torch.nn.Module) -> dict[str, Any]:
    """Collect the factors of the trace key that a configuration and a model class contribute.

    Args:
        vllm_config: the configuration of this start.
        model: the loaded model; its class counts, its weights do not.

    Returns:
        JSON values by factor name.

    Raises:
        UnkeyableConfigError: a field holds an object that has no canonical form.
    """
    model_config = vllm_config.model_config
    compilation = vllm_config.compilation_config
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "hf_config": _hf_config(model_config.hf_config),
        "config": _fields(model_config, MODEL_FIELDS_OUTSIDE),
        "quantization": _quantization(vllm_config.quant_config),
        "cache": _fields(vllm_config.cache_config, CACHE_FIELDS_OUTSIDE),
        "parallel": {
            name: _normal(f"parallel_config.{name}", getattr(vllm_config.parallel_config, name))
            for name in PARALLEL_FIELDS_INSIDE
        },
        "lora": _lora(vllm_config.lora_config),
        "speculation": _speculation(vllm_config.speculative_config),
        "custom_ops": sorted(compilation.custom_ops),
        "environment": _environment(),
    }


def describe(vllm_config: VllmConfig) -> dict[str, str]:
    """What a person needs to recognise an entry: the served name without directories."""
    name = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    if isinstance(name, list):
        name = name[0]
    return {"model": str(name).rstrip("/").rsplit("/", 1)[-1]}


def _quantization(config: Any) -> Any:
    """What a checkpoint says of its quantisation; it may stand outside of the model's config."""
    if config is None:
        return None
    return {
        "class": f"{type(config).__module__}.{type(config).__qualname__}",
        "settings": _normal("quantization_config", config.full_config),
    }


def _speculation(config: Any) -> Any:
    """Of n-gram lookup, which runs on the host, models may see how many tokens are verified."""
    if config is not None and config.method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": config.num_speculative_tokens}
    return _normal("speculative_config", config)


def _hf_config(config: Any) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(config.to_dict()))
    except (TypeError, ValueError) as error:
        raise UnkeyableConfigError(
            f"the model's hf_config has no canonical form: {error}"
        ) from error
    return _without(plain, HF_KEYS_OUTSIDE)


def _lora(config: LoRAConfig | None) -> dict[str, Any] | None:
    """The slots for adapters, which shape the graphs; no adapter does."""
    if config is None:
        return None
    fields = _fields(config, LORA_FIELDS_OUTSIDE)
    # A filter by name: order and repetition make no difference.
    targets = fields["target_modules"]
    return {**fields, "target_modules": None if targets is None else sorted(set(targets))}


def _without(value: Any, keys: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner, keys) for name, inner in value.items() if name not in keys}
    if isinstance(value, list):
        return [_without(inner, keys) for inner in value]
    return value


def _fields(config: Any, outside: frozenset[str]) -> dict[str, Any]:
    return {
        item.name: _normal(f"{type(config).__name__}.{item.name}", getattr(config, item.name))
        for item in dataclasses.fields(config)
        if item.name not in outside
    }


def _normal(name: str, value: Any) -> Any:
    from vllm.config.utils import normalize_value

    try:
        return json.loads(canonical_json(normalize_value(value)))
    except (TypeError, ValueError) as error:
        raise UnkeyableConfigError(
            f"{name} holds a {type(value).__name__}, which has no canonical form: {error}"
        ) from error


def _environment() -> dict[str, Any]:
    """Collect the graph-shaping variables of vLLM that are set.

    An unset one has the default of its vLLM version, which is a factor of its own.
    """
    from vllm.envs import compile_factors

    return {
        name: _normal(name, value)
        for name, value in compile_factors().items()
        if name in os.environ
        and name not in VARIABLES_OUTSIDE
        and not name.startswith("VLLM_NEURON_")
        and not name.startswith("RAY_EXPERIMENTAL_NOSET_")
    }
