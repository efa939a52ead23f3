"""`--additional-config` of a Neuron server: its keys, their types, and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_neuron.errors import ConfigurationError

__all__ = ["NeuronConfig", "neuron_config_of", "parse_additional_config"]

_SECTION = "neuron_config"
_VISION_SECTION = "vision_neuron_config"
# Keys of `additional_config` that this package reads; and those that vLLM puts there itself
# (EngineArgs: gdn_prefill_backend, kda_prefill_backend, kda_decode_backend).
_TOP_LEVEL = (_SECTION, _VISION_SECTION, "mm_language_model_only", "neuron_profiler")
_OF_VLLM = (
    "gdn_prefill_backend",
    "kda_prefill_backend",
    "kda_decode_backend",
    "kda_prefill_checkpoint",
    "kda_spec_decode_backend",
)
_VISION_KEYS = (
    "num_vision_tokens_buckets",
    "vision_attention_block_size",
    "max_vision_seq_len",
    "tp_size",
    "dp_size",
    "encoder_cache_num_blocks",
    "encoder_cache_min_hold_time_ms",
)
_PROFILER_KEYS = ("activities", "neuron_cores", "output_dir", "sys_trace_max_events_per_nc")


@dataclass(frozen=True, slots=True)
class NeuronConfig:
    """`additional_config["neuron_config"]`.

    The bucket lists are as the user wrote them: `vllm_neuron.vllm.buckets` checks them and has
    the texts for what is wrong.

    Attributes:
        num_batched_tokens_buckets: prefill buckets in tokens, or None for the default.
        num_seqs_buckets: decode buckets in sequences, or None for the default.
        kv_segment_size_buckets: the KV segment size in tokens, in a list, or None.
        decode_context_length_buckets: decode context buckets in tokens, or None for off.
        on_device_sampling_config: sampling inside the graph, or None.
        quantization: the plugin's own quantisation, or None.
        ep_degree: expert parallel degree, or None for the default.
        enable_structured_outputs: whether graphs take a grammar mask.
    """

    num_batched_tokens_buckets: Any = None
    num_seqs_buckets: Any = None
    kv_segment_size_buckets: Any = None
    decode_context_length_buckets: Any = None
    on_device_sampling_config: Mapping[str, Any] | None = None
    quantization: str | None = None
    ep_degree: int | None = None
    enable_structured_outputs: bool = False


_FIELDS = tuple(field.name for field in fields(NeuronConfig))
# Documented keys that ask for what this version does not do, and what becomes of them.
_IGNORED = (
    "on_device_sampling_config",
    "enable_structured_outputs",
)
_REFUSED = ("quantization", "ep_degree")


def neuron_config_of(vllm_config: Any) -> NeuronConfig:
    """The Neuron part of a `vllm.config.VllmConfig`.

    Raises:
        ConfigurationError: see `parse_additional_config`.
    """
    return parse_additional_config(vllm_config.additional_config)[0]


def parse_additional_config(additional_config: Any) -> tuple[NeuronConfig, list[str]]:
    """Parse and check `additional_config`.

    Returns:
        The configuration, and WARNING lines about keys that are unknown or without effect.

    Raises:
        ConfigurationError: a section is not a mapping, a value has the wrong type, or a key asks
            for what this version cannot do and must not ignore.
    """
    top = _mapping(additional_config or {}, "additional_config")
    warnings = _unknown(top, (*_TOP_LEVEL, *_OF_VLLM), "additional_config", hints=_FIELDS)
    section = _mapping(top.get(_SECTION) or {}, _SECTION)
    if "mm_language_model_only" in section:
        warnings.append(
            "neuron_config.mm_language_model_only has no effect there: it is a key of "
            "additional_config itself."
        )
    known = (*_FIELDS, "mm_language_model_only", *(k for k in section if k.endswith("_dp_size")))
    warnings += _unknown(section, known, _SECTION, hints=_VISION_KEYS)
    vision = _mapping(top.get(_VISION_SECTION) or {}, _VISION_SECTION)
    warnings += _unknown(vision, _VISION_KEYS, _VISION_SECTION, hints=_FIELDS)
    profiler = _mapping(top.get("neuron_profiler") or {}, "neuron_profiler")
    warnings += _unknown(profiler, _PROFILER_KEYS, "neuron_profiler")

    for name, value in section.items():
        if name in _REFUSED and value not in (None, 1):
            raise ConfigurationError(
                f"neuron_config.{name}={value!r} is not supported in this version. Remove it.",
                name=f"neuron_config.{name}",
                value=value,
            )
        if (name.endswith("_dp_size") and value != 1) or (name in _IGNORED and value):
            warnings.append(f"neuron_config.{name} has no effect in this version.")
    for name in (_VISION_SECTION, "mm_language_model_only", "neuron_profiler"):
        if top.get(name):
            warnings.append(f"additional_config.{name} has no effect in this version.")
    sampling = section.get("on_device_sampling_config")
    if sampling is not None:
        _mapping(sampling, "neuron_config.on_device_sampling_config")
    if not isinstance(section.get("enable_structured_outputs", False), bool):
        raise _wrong_type(section, "enable_structured_outputs", "true or false")
    return NeuronConfig(**{name: section[name] for name in _FIELDS if name in section}), warnings


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name} must be a mapping of keys to values, got {value!r} ({type(value).__name__}).",
            name=name,
            value=value,
        )
    return value


def _wrong_type(section: Mapping[str, Any], key: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"{_SECTION}.{key}={section[key]!r} is not valid: expected {expected}.",
        name=f"{_SECTION}.{key}",
        value=section[key],
    )


def _unknown(
    section: Mapping[str, Any], known: tuple[str, ...], where: str, hints: tuple[str, ...] = ()
) -> list[str]:
    """One line for each key of `section` that is not known; `hints` are keys of other sections."""
    lines = []
    for key in section:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        if close:
            advice = f" Did you mean {close[0]}?"
        elif key in hints:
            place = _VISION_SECTION if key in _VISION_KEYS else _SECTION
            advice = f" It is a key of {place}."
        else:
            advice = ""
        lines.append(f"Unknown key {key!r} in {where} has no effect.{advice}")
    return lines
