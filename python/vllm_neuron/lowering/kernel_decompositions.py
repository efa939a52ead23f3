"""Decompositions of operators that PyTorch has as one kernel only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["KERNELS"]

aten = torch.ops.aten

_Pair = tuple[torch.Tensor, torch.Tensor]
_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> _Four:
    """Sum (mode 0), mean (1) or greatest (2) of the rows of each bag; an empty bag gives zeros.

    The results after the first are for the backward pass only.
    """
    del scale_grad_by_freq, sparse
    bags = offsets[:-1] if include_last_offset else offsets
    place = torch.arange(indices.shape[0], device=indices.device)
    bag = torch.searchsorted(bags.to(place.dtype), place, right=True) - 1
    counted = torch.ones_like(bag, dtype=torch.bool)
    if padding_idx >= 0:
        counted = indices != padding_idx
    rows = weight.index_select(0, indices).float()
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.float().unsqueeze(1)
    size = (bags.shape[0], weight.shape[1])
    length = rows.new_zeros(size[0]).index_add(0, bag, counted.to(rows.dtype))
    if mode == 2:
        rows = rows.masked_fill(~counted.unsqueeze(1), -torch.inf)
        spread = bag.unsqueeze(1).expand(rows.shape)
        result = rows.new_full(size, -torch.inf).scatter_reduce(0, spread, rows, "amax")
        result = result.masked_fill(length.unsqueeze(1) == 0, 0)
    else:
        rows = rows.masked_fill(~counted.unsqueeze(1), 0)
        result = rows.new_zeros(size).index_add(0, bag, rows)
        if mode == 1:
            result = result / length.clamp(min=1).unsqueeze(1)
    counts = length.to(indices.dtype)
    return result.to(weight.dtype), bag, counts, counts


def _frexp(self: torch.Tensor) -> _Pair:
    # IEEE 754 single precision: 8 bits of exponent with a bias of 127 above 23 of fraction. A
    # denormal number is first multiplied by 2**24.
    if self.dtype == torch.float64:
        return NotImplemented
    wide = self.float()
    small = wide.abs() < 2.0**-126
    bits = torch.where(small, wide * 2.0**24, wide).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) - 126 - torch.where(small, 24, 0)
    fraction = ((bits & ~(0xFF << 23)) | (126 << 23)).view(torch.float32)
    whole = (wide == 0) | ~wide.isfinite()
    return (
        torch.where(whole, wide, fraction).to(self.dtype),
        torch.where(whole, 0, exponent).to(torch.int32),
    )


def _histc(self: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    """Counts in `bins` equal parts of [min, max], or of the range of all values."""
    if not self.numel():
        return self.new_zeros(bins)
    values = self.reshape(-1)
    low = values.new_full((), min) if min != max else values.amin()
    high = values.new_full((), max) if min != max else values.amax()
    single = low == high
    low, high = torch.where(single, low - 1, low), torch.where(single, high + 1, high)
    inside = (values >= low) & (values <= high)
    place = ((values - low) * bins / (high - low)).to(torch.int64).clamp(0, bins - 1)
    return self.new_zeros(bins).index_add(0, place, inside.to(self.dtype))


def _lcm(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    divisor = torch.gcd(self, other)
    whole = torch.div(self, torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    return (whole * other).abs()


def _mode(self: torch.Tensor, dim: int = -1, keepdim: bool = False) -> _Pair:
    """The least of the most frequent values, and its last position.

    Eager sorts without care for NaN, so that with NaN its choice is unspecified.
    """
    if self.ndim == 0:
        return self.clone(), torch.zeros_like(self, dtype=torch.int64)
    last = self.movedim(dim, -1)
    same = last.unsqueeze(-1) == last.unsqueeze(-2)
    count = same.sum(-1)
    frequent = count == count.amax(-1, keepdim=True)
    order = last.sort(dim=-1, stable=True)[1]
    first = frequent.gather(-1, order).to(torch.int8).argmax(-1, keepdim=True)
    value = last.gather(-1, order.gather(-1, first))
    positions = torch.arange(last.shape[-1], device=self.device)
    place = torch.where(last == value, positions, 0).amax(-1, keepdim=True)
    if keepdim:
        return value.movedim(-1, dim), place.movedim(-1, dim)
    return value.squeeze(-1), place.squeeze(-1)


def _nanmedian(self: torch.Tensor) -> torch.Tensor:
    return _nanmedian_dim(self.reshape(-1), 0)[0]


def _nanmedian_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> _Pair:
    """The lower median of the numbers; NaN where there is none."""
    if self.ndim == 0 or not self.dtype.is_floating_point:
        return aten.median.dim(self, dim, keepdim)
    values, order = self.sort(dim=dim, stable=True)
    middle = ((~self.isnan()).sum(dim, keepdim=True) - 1).clamp(min=0) // 2
    value, place = values.gather(dim, middle), order.gather(dim, middle)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _pdist(self: torch.Tensor, p: float = 2) -> torch.Tensor:
    count = self.shape[0]
    rows, columns = torch.triu_indices(count, count, 1, device=self.device)
    apart = self.index_select(0, rows) - self.index_select(0, columns)
    return torch.linalg.vector_norm(apart, p, dim=1)


def _fake_quantize(
    self: torch.Tensor,
    scale: torch.Tensor | float,
    zero_point: torch.Tensor | int,
    quant_min: int,
    quant_max: int,
) -> _Pair:
    # Eager multiplies by the inverse of the scale and adds the zero point after rounding.
    inverse = scale.reciprocal() if isinstance(scale, torch.Tensor) else 1.0 / scale
    whole = (self * inverse).round() + zero_point
    inside = (whole >= quant_min) & (whole <= quant_max)
    return ((whole.clamp(quant_min, quant_max) - zero_point) * scale).to(self.dtype), inside


def _fake_quantize_channels(
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> _Pair:
    shape = [1] * self.ndim
    shape[axis] = -1
    return _fake_quantize(
        self, scale.view(shape), zero_point.float().view(shape), quant_min, quant_max
    )


def _weight_int8pack_mm(
    self: torch.Tensor, mat2: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    product = self.float() @ mat2.t().float()
    return (product * scales.float()).to(self.dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """nn.MultiheadAttention's fast path without a mask."""
    if mask is not None:
        return NotImplemented
    del embed_dim, mask_type
    heads = []
    projections = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    for tensor, weight, bias in projections:
        projected = F.linear(tensor, weight, bias)
        heads.append(projected.unflatten(-1, (num_head, -1)).transpose(1, 2))
    scores = heads[0] @ heads[1].transpose(-1, -2) * heads[0].shape[-1] ** -0.5
    weights = scores.softmax(-1)
    mixed = (weights @ heads[2]).transpose(1, 2).flatten(2)
    result = F.linear(mixed, proj_weight, proj_bias)
    if not need_weights:
        return result, result.new_empty(0)
    return result, weights.mean(1) if average_attn_weights else weights


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """nn.TransformerEncoderLayer's fast path without a mask."""
    if mask is not None:
        return NotImplemented
    del mask_type

    def first_norm(tensor: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(tensor, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second_norm(tensor: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(tensor, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attend(tensor: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attention(tensor, tensor, tensor, embed_dim, num_heads, *weights)[0]

    def feed_forward(tensor: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(tensor, ffn_weight_1, ffn_bias_1)
        hidden = F.gelu(hidden) if use_gelu else F.relu(hidden)
        return F.linear(hidden, ffn_weight_2, ffn_bias_2)

    if norm_first:
        hidden = src + attend(first_norm(src))
        return hidden + feed_forward(second_norm(hidden))
    hidden = first_norm(src + attend(src))
    return second_norm(hidden + feed_forward(hidden))


KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._native_multi_head_attention.default: _attention,
    aten._pdist_forward.default: _pdist,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    aten._weight_int8pack_mm.default: _weight_int8pack_mm,
    aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantize_channels,
    aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantize,
    aten.frexp.Tensor: _frexp,
    aten.histc.default: _histc,
    aten.lcm.default: _lcm,
    aten.mode.default: _mode,
    aten.nanmedian.default: _nanmedian,
    aten.nanmedian.dim: _nanmedian_dim,
}
