"""The static shapes that a server compiles: bucket lists, their defaults, errors and choice.

Pure functions of plain numbers; nothing here imports torch or vLLM. Rule numbers (BK-...) are those
of the behavioural specification, section 7; `docs/buckets.md` explains them to users.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from vllm_neuron.errors import ConfigurationError, ExecutionError

__all__ = [
    "Buckets",
    "decode_label",
    "encode_label",
    "prefill_label",
    "resolve_buckets",
    "verify_label",
]

SMALLEST_PREFILL_BUCKET = 128  # BK-1
KV_SEGMENT_SIZES = (512, 1024, 2048, 4096, 8192)  # BK-3
LONGEST_SINGLE_SHOT = 16384  # BK-4: max_model_len up to which one prefill may be the whole prompt
CONTEXT_MULTIPLE = 128  # BK-5


class BucketOptions(Protocol):
    """The bucket options of `additional_config.neuron_config`, unchecked."""

    @property
    def num_batched_tokens_buckets(self) -> Any:
        """Prefill lengths, or None."""

    @property
    def num_seqs_buckets(self) -> Any:
        """Decode batch sizes, or None."""

    @property
    def kv_segment_size_buckets(self) -> Any:
        """Chunk length of segmented prefill, or None."""

    @property
    def decode_context_length_buckets(self) -> Any:
        """Context lengths of decode, or None."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The resolved bucket lists of one server.

    Attributes:
        prefill: tokens per prefill graph, ascending; the last is the largest chunk the scheduler
            can ask for.
        decode: sequences per decode graph, ascending; the last is `max_num_seqs`. Empty for a
            pooling model.
        kv_segments: the segment size of segmented (chunked) prefill, or empty for single-shot.
        contexts: context lengths in tokens that decode may be cut to, ascending; `max_model_len`
            is not in it and always available.
        max_model_len: longest sequence in tokens.
        prefill_origin: where the prefill list comes from, for the log: "explicit", "segmented"
            or "default".
        warnings: texts for the log.
        draft_tokens: the most draft tokens that a step verifies per sequence; 0 without
            speculative decoding.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    kv_segments: tuple[int, ...]
    contexts: tuple[int, ...]
    max_model_len: int
    prefill_origin: str
    warnings: tuple[str, ...] = ()
    draft_tokens: int = 0

    @property
    def num_prefill_graphs(self) -> int:
        """Token buckets times segment sizes (BK-17)."""
        return len(self.prefill) * max(1, len(self.kv_segments))

    @property
    def num_decode_graphs(self) -> int:
        """Sequence buckets times context buckets, the implicit one included (BK-13)."""
        return len(self.decode) * (len(self.contexts) + 1)

    @property
    def num_verify_graphs(self) -> int:
        """One for each decode graph, if there are draft tokens to verify."""
        return self.num_decode_graphs if self.draft_tokens else 0

    def prefill_for(self, num_tokens: int) -> int:
        """Returns the smallest prefill bucket for `num_tokens` tokens (BK-11)."""
        return _smallest("num_batched_tokens_buckets", self.prefill, num_tokens)

    def decode_for(self, num_seqs: int) -> int:
        """Returns the smallest decode bucket for `num_seqs` sequences (BK-11)."""
        return _smallest("num_seqs_buckets", self.decode, num_seqs)

    def context_for(self, num_computed_tokens: int) -> int | None:
        """Returns the context bucket of a decode step, or None for `max_model_len` (BK-13).

        Args:
            num_computed_tokens: the most tokens that any sequence of the batch has in its KV
                cache before the last token of the step, which is the last of its draft tokens
                if there are any.
        """
        needed = num_computed_tokens + 1
        if needed > self.max_model_len:
            _smallest("decode_context_length_buckets", (*self.contexts, self.max_model_len), needed)
        at = bisect_left(self.contexts, needed)
        return self.contexts[at] if at < len(self.contexts) else None

    def describe(self) -> str:
        """Returns the line that is logged before compiling (BK-17)."""
        context = f", context lengths {[*self.contexts, self.max_model_len]}"
        segment = f", KV segment size {self.kv_segments[0]}" if self.kv_segments else ""
        prefill = f"Buckets: prefill tokens {list(self.prefill)} ({self.prefill_origin}{segment})"
        if not self.decode:
            return f"{prefill}: {self.num_prefill_graphs} graphs, none to decode (pooling model)"
        decode = f"decode sequences {list(self.decode)}{context if self.contexts else ''}"
        if self.draft_tokens:
            return (
                f"{prefill}, {decode}, {self.draft_tokens} draft tokens: {self.num_prefill_graphs} "
                f"prefill, {self.num_decode_graphs} decode and {self.num_verify_graphs} verify "
                f"graphs"
            )
        return (
            f"{prefill}, {decode}: {self.num_prefill_graphs} prefill and "
            f"{self.num_decode_graphs} decode graphs"
        )


def prefill_label(num_tokens: int) -> str:
    """Returns the name of a prefill graph, such as `prefill_s1024`."""
    return f"prefill_s{num_tokens}"


def encode_label(num_tokens: int) -> str:
    """Returns the name of an encoder's graph, such as `encode_s256`."""
    return f"encode_s{num_tokens}"


def decode_label(num_seqs: int, context: int | None = None) -> str:
    """Returns the name of a decode graph, such as `decode_b8` or `decode_b8_ctx2048`.

    Args:
        num_seqs: sequences in the bucket.
        context: context length in tokens, or None for the implicit `max_model_len`.
    """
    return f"decode_b{num_seqs}" + (f"_ctx{context}" if context is not None else "")


def verify_label(num_seqs: int, context: int | None = None) -> str:
    """Returns the name of a graph that verifies draft tokens, such as `verify_b8_ctx2048`.

    Args:
        num_seqs: sequences in the bucket.
        context: context length in tokens, or None for the implicit `max_model_len`.
    """
    return f"verify_b{num_seqs}" + (f"_ctx{context}" if context is not None else "")


def resolve_buckets(
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    neuron_config: BucketOptions,
    dcp_size: int = 1,
    pooling: bool = False,
    draft_tokens: int = 0,
) -> Buckets:
    """Resolves and checks every bucket list of a server.

    Args:
        max_model_len: longest sequence in tokens.
        max_num_batched_tokens: scheduler's budget of tokens per step; clamped to `max_model_len`.
        max_num_seqs: scheduler's limit of running sequences.
        block_size: KV cache block size in tokens.
        neuron_config: the options as the user gave them; None means the default.
        dcp_size: decode context parallel size.
        pooling: the model is a pooling model, which decodes nothing.
        draft_tokens: the most draft tokens of a sequence in a step.

    Raises:
        ConfigurationError: (a ValueError) an option breaks a rule of BK-1 to BK-5 or BK-7.
    """
    budget = min(max_num_batched_tokens, max_model_len)
    explicit = neuron_config.num_batched_tokens_buckets
    if explicit is not None:
        _check_list("num_batched_tokens_buckets", explicit)

    if neuron_config.kv_segment_size_buckets is not None:
        segments = _explicit_segments(neuron_config.kv_segment_size_buckets, explicit, budget)
    else:
        segments = _default_segments(budget, max_num_batched_tokens, max_model_len)
    for size in segments:
        if size % block_size:
            raise ConfigurationError(
                f"kv_segment_size_buckets: {size} must be divisible by block_size ({block_size})",
                name="kv_segment_size_buckets",
                value=size,
            )

    if explicit is not None:
        _check_last("num_batched_tokens_buckets", explicit, "max_num_batched_tokens", budget)
        prefill, origin = tuple(explicit), "explicit"
    elif segments:
        prefill, origin = segments, "segmented"
    else:
        prefill, origin = _doubling(SMALLEST_PREFILL_BUCKET, budget), "default"
    prefill, warnings = _align_for_dcp(prefill, dcp_size * block_size if dcp_size > 1 else 1)

    seqs = neuron_config.num_seqs_buckets
    if seqs is not None:
        _check_list("num_seqs_buckets", seqs)
        _check_last("num_seqs_buckets", seqs, "max_num_seqs", max_num_seqs)
    decode = tuple(seqs) if seqs is not None else _doubling(1, max_num_seqs)
    contexts = _contexts(neuron_config.decode_context_length_buckets, max_model_len)
    if pooling:
        warnings += tuple(
            f"{name} has no effect: a pooling model decodes nothing"
            for name in ("num_seqs_buckets", "decode_context_length_buckets")
            if getattr(neuron_config, name) is not None
        )
        decode, contexts = (), ()
    return Buckets(
        prefill=prefill,
        decode=decode,
        kv_segments=segments,
        contexts=contexts,
        max_model_len=max_model_len,
        prefill_origin=origin,
        warnings=warnings,
        draft_tokens=draft_tokens,
    )


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return (*sizes, last)


def _smallest(name: str, buckets: Sequence[int], count: int) -> int:
    at = bisect_left(buckets, count)
    if at == len(buckets):
        raise ExecutionError(
            f"No compiled graph covers {count}: {name} is {list(buckets)}. Nothing is compiled "
            f"while serving; restart the server with a larger last bucket.",
            bucket=None,
            reason=f"{count} > {buckets[-1]}",
        )
    return buckets[at]


def _check_list(name: str, buckets: Any) -> None:
    """Checks form, element type, sign and order of a list (BK-1, BK-2)."""

    def fail(text: str) -> ConfigurationError:
        return ConfigurationError(f"{name}{text}", name=name, value=buckets)

    if not isinstance(buckets, list):
        raise fail(f" must be a list, got {type(buckets).__name__}")
    if not buckets:
        raise fail(" cannot be empty")
    for index, bucket in enumerate(buckets):
        if not isinstance(bucket, int) or isinstance(bucket, bool):
            raise fail(f"[{index}] must be an integer, got {bucket}")
        if bucket <= 0:
            raise fail(f"[{index}] must be positive, got {bucket}")
    if any(left >= right for left, right in pairwise(buckets)):
        raise fail(f" must be in strictly ascending order, got {buckets}")


def _check_last(name: str, buckets: list[int], limit_name: str, limit: int) -> None:
    """Checks that the largest bucket is the scheduler's limit: no count can lie outside."""
    if buckets[-1] != limit:
        raise ConfigurationError(
            f"Last bucket in {name} must equal {limit_name} ({limit}), got {buckets[-1]}",
            name=name,
            value=buckets,
        )


def _explicit_segments(segments: Any, prefill: list[int] | None, budget: int) -> tuple[int, ...]:
    name = "kv_segment_size_buckets"
    _check_list(name, segments)
    for index, size in enumerate(segments):
        if size not in KV_SEGMENT_SIZES:
            raise ConfigurationError(
                f"{name}[{index}] = {size} is not a supported segment size. "
                f"Supported values: {list(KV_SEGMENT_SIZES)}.",
                name=name,
                value=segments,
            )
    if len(segments) > 1:
        raise ConfigurationError(
            f"{name} must hold one segment size, got {len(segments)}: {segments}",
            name=name,
            value=segments,
        )
    if prefill is not None and prefill != segments:
        raise ConfigurationError(
            f"When {name} is set, num_batched_tokens_buckets must match: the prefill length is "
            f"the segment size. Got num_batched_tokens_buckets={prefill}, {name}={segments}",
            name=name,
            value=segments,
        )
    _check_last(name, segments, "max_num_batched_tokens", budget)
    return tuple(segments)


def _default_segments(budget: int, asked: int, max_model_len: int) -> tuple[int, ...]:
    """Applies BK-4 and returns the segment size that chunked prefill implies (BK-3)."""
    if budget == max_model_len:
        if max_model_len > LONGEST_SINGLE_SHOT:
            raise ConfigurationError(
                f"Single-shot prefill (max_num_batched_tokens={asked} >= "
                f"max_model_len={max_model_len}) is only supported when max_model_len <= "
                f"{LONGEST_SINGLE_SHOT}. Set max_num_batched_tokens to one of "
                f"{list(KV_SEGMENT_SIZES)} to enable chunked prefill.",
                name="max_num_batched_tokens",
                value=asked,
            )
        return ()
    if budget not in KV_SEGMENT_SIZES:
        way_out = (
            f" Alternatively, set max_num_batched_tokens={max_model_len} (equal to "
            f"max_model_len) to disable chunked prefill."
            if max_model_len <= LONGEST_SINGLE_SHOT
            else ""
        )
        raise ConfigurationError(
            f"max_num_batched_tokens={budget} is not a supported chunked prefill size on Neuron. "
            f"Supported values: {list(KV_SEGMENT_SIZES)}.{way_out}",
            name="max_num_batched_tokens",
            value=budget,
        )
    return (budget,)


def _contexts(contexts: Any, max_model_len: int) -> tuple[int, ...]:
    """Checks `decode_context_length_buckets` (BK-5)."""
    if contexts is None:
        return ()
    name = "decode_context_length_buckets"
    _check_list(name, contexts)
    for index, context in enumerate(contexts):
        if context >= max_model_len:
            problem = f"must be less than max_model_len ({max_model_len}), which is always compiled"
        elif context % CONTEXT_MULTIPLE:
            problem = f"must be divisible by {CONTEXT_MULTIPLE}"
        else:
            continue
        raise ConfigurationError(
            f"{name}[{index}] {problem}, got {context}", name=name, value=contexts
        )
    return tuple(contexts)


def _align_for_dcp(
    prefill: tuple[int, ...], stride: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Drops prefill buckets that decode context parallelism cannot split evenly (BK-7)."""
    kept = tuple(bucket for bucket in prefill if bucket % stride == 0)
    if kept == prefill:
        return prefill, ()
    dropped = [bucket for bucket in prefill if bucket % stride]
    if not kept or kept[-1] != prefill[-1]:
        raise ConfigurationError(
            f"DCP prefill alignment: the largest prefill bucket ({prefill[-1]}) must be divisible "
            f"by dcp_size * block_size ({stride}); buckets {list(prefill)}",
            name="num_batched_tokens_buckets",
            value=list(prefill),
        )
    return kept, (
        f"DCP prefill alignment: dropped {len(dropped)} bucket(s) not divisible by "
        f"dcp_size * block_size ({stride}): {dropped}; kept {list(kept)}",
    )
