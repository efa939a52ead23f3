"""Tiny quantised checkpoints, packed here by hand, each beside what it stands for in float32.

A checkpoint is built from the random Llama of `tests.models`: every linear layer of its decoder
layers is quantised, packed to the published layout of the format, and written; the dequantised
weights are written as an ordinary float32 checkpoint, the reference for transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from tests import models

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns in the order in which AWQ puts them into a word, lowest bits first."""

_LINEAR = re.compile(
    r"model\.layers\.(\d+)\.(?:self_attn|mlp|block_sparse_moe)\."
    r"(?:experts\.\d+\.)?(?:\w+_proj|w\d)\.weight"
)

Tensors = dict[str, torch.Tensor]
Activations = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A quantised checkpoint and its reference.

    Attributes:
        folder: what is served.
        reference: the dequantised weights in float32.
        activations: by decoder layer, what its linear layers do to their inputs.
        cache_scales: of keys and values in an fp8 KV cache; None: the cache is not fp8.
    """

    folder: Path
    reference: Path
    activations: Mapping[int, Activations] = field(default_factory=dict)
    cache_scales: tuple[float, float] | None = None

    def logits(self, ids: Sequence[int], *, rounded: bool = True) -> torch.Tensor:
        """Return the logits of the reference, float32 (len(ids), vocabulary).

        Args:
            ids: token ids.
            rounded: whether inputs of linear layers are quantised as the checkpoint asks.
        """
        model = AutoModelForCausalLM.from_pretrained(
            self.reference, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name, module in model.named_modules():
            match = _LINEAR.fullmatch(f"{name}.weight")
            if rounded and match and (change := self.activations.get(int(match[1]))):
                module.register_forward_pre_hook(lambda _, x, change=change: (change(x[0]),))
        plain = modeling_llama.eager_attention_forward

        def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            assert self.cache_scales is not None
            key, value = (
                fp8_activations(x, scale=scale)
                for x, scale in zip((key, value), self.cache_scales, strict=True)
            )
            return plain(module, query, key, value, *args, **kwargs)

        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if rounded and self.cache_scales is not None:
                patch.setattr(modeling_llama, "eager_attention_forward", attend)
            return model(torch.tensor([list(ids)])).logits[0]


def integers(
    weight: torch.Tensor, *, bits: int, symmetric: bool, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise (outputs, inputs) to unsigned integers, round to nearest.

    Args:
        weight: float32 (N, K).
        bits: of each integer.
        symmetric: whether the zero point is the middle.
        groups: group of each input, (K,).

    Returns:
        Integers (K, N), scales float16 (G, N), zero points (G, N), dequantised float32 (N, K).
    """
    top = (1 << bits) - 1
    columns = weight.t()
    count = int(groups.max()) + 1
    values = torch.empty(columns.shape, dtype=torch.int64)
    scales = torch.empty(count, columns.shape[1], dtype=torch.float16)
    zeros = torch.empty(count, columns.shape[1], dtype=torch.int64)
    exact = torch.empty_like(columns)
    for group in range(count):
        rows = groups == group
        part = columns[rows]
        if symmetric:
            scale = (part.abs().amax(0) / (top / 2)).half()
            zero = torch.full_like(scale, (top + 1) // 2, dtype=torch.int64)
        else:
            low, high = part.amin(0).clamp(max=0), part.amax(0).clamp(min=0)
            scale = ((high - low) / top).half()
            zero = (-low / scale.float()).round().clamp(0, top).long()
        values[rows] = ((part / scale.float()).round().long() + zero).clamp(0, top)
        exact[rows] = (values[rows] - zero).float() * scale.float()
        scales[group], zeros[group] = scale, zero
    return values, scales, zeros, exact.t().contiguous()


def pack(values: torch.Tensor, *, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack unsigned integers into int32 words along a dimension, lowest bits first."""
    count = 32 // bits
    moved = np.moveaxis(values.numpy().astype(np.uint32), dim, -1)
    grouped = moved.reshape(*moved.shape[:-1], -1, count)
    words = np.zeros(grouped.shape[:-1], dtype=np.uint32)
    for place, column in enumerate(order or range(count)):
        words |= grouped[..., column] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, dim)).view(np.int32))


def gptq_layer(
    name: str,
    weight: torch.Tensor,
    *,
    bits: int = 4,
    sym: bool = True,
    group_size: int = 16,
    desc_act: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """Return GPTQ's tensors of a layer, and the dequantised weight (N, K)."""
    inputs = weight.shape[1]
    size = inputs if group_size == -1 else group_size
    groups = torch.arange(inputs) // size
    if desc_act:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    values, scales, zeros, exact = integers(weight, bits=bits, symmetric=sym, groups=groups)
    top = (1 << bits) - 1
    return {
        f"{name}.qweight": pack(values, bits=bits, dim=0),
        f"{name}.qzeros": pack((zeros - 1) & top, bits=bits, dim=1),
        f"{name}.scales": scales,
        f"{name}.g_idx": groups.to(torch.int32),
    }, exact


def awq_layer(
    name: str, weight: torch.Tensor, *, group_size: int = 32
) -> tuple[Tensors, torch.Tensor]:
    """Return AWQ's tensors of a layer (version GEMM), and the dequantised weight (N, K)."""
    groups = torch.arange(weight.shape[1]) // group_size
    values, scales, zeros, exact = integers(weight, bits=4, symmetric=False, groups=groups)
    return {
        f"{name}.qweight": pack(values, bits=4, dim=1, order=AWQ_ORDER),
        f"{name}.qzeros": pack(zeros, bits=4, dim=1, order=AWQ_ORDER),
        f"{name}.scales": scales,
    }, exact


GPTQ_RULES: Mapping[int, Mapping[str, Any]] = {
    0: {},
    1: {"sym": False, "desc_act": True, "group_size": 32},
    2: {"bits": 8, "sym": False},
    3: {"sym": False, "group_size": -1},
}
"""What is not the default of `gptq_layer`, by decoder layer."""


def build_gptq(
    folder: Path,
    rules: Mapping[int, Mapping[str, Any]] = GPTQ_RULES,
    architecture: str = "llama",
    *,
    experts: bool = False,
) -> Checkpoint:
    """Write a GPTQ checkpoint whose decoder layers are each quantised in another way.

    Args:
        folder: where to.
        rules: by decoder layer, what is not the default of `gptq_layer`.
        architecture: see `tests.models`.
        experts: whether experts are quantised.
    """
    return _build(
        folder,
        lambda layer, name, weight: gptq_layer(name, weight, **rules[layer]),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 16,
            "sym": True,
            "desc_act": False,
            "dynamic": {
                rf"+:model\.layers\.{layer}\..*": dict(rule)
                for layer, rule in rules.items()
                if rule
            },
        },
        layers=len(rules),
        architecture=architecture,
        experts=experts,
    )


def build_awq(folder: Path, architecture: str = "llama", *, experts: bool = False) -> Checkpoint:
    """Write an AWQ checkpoint; experts are quantised on request."""
    return _build(
        folder,
        lambda _, name, weight: awq_layer(name, weight),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
        },
        layers=2,
        architecture=architecture,
        experts=experts,
    )


def int8_activations(
    x: torch.Tensor, *, scale: float | None = None, zero: float = 0.0
) -> torch.Tensor:
    """Return what int8 makes of activations: with a given scale, or one per token."""
    step = x.abs().amax(-1, keepdim=True) / 127 if scale is None else scale
    return (((x / step).round() + zero).clamp(-128, 127) - zero) * step


def int8_asymmetric_activations(x: torch.Tensor) -> torch.Tensor:
    """Return what int8 with a scale and a zero point per token makes of activations."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / 255
    zero = (-128 - low / step).round()
    return (((x / step).round() + zero).clamp(-128, 127) - zero) * step


def fp8_activations(
    x: torch.Tensor, *, scale: float | None = None, group: int | None = None
) -> torch.Tensor:
    """Return what float8_e4m3fn makes of activations: a given scale, or per token or group."""
    parts = x.unflatten(-1, (-1, group or x.shape[-1]))
    step = parts.abs().amax(-1, keepdim=True) / 448 if scale is None else scale
    return ((parts / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step).flatten(-2)


def int8_weight(name: str, weight: torch.Tensor, *, channel: bool) -> tuple[Tensors, torch.Tensor]:
    """Return the int8 tensors of a layer, and the dequantised weight."""
    scale = (weight.abs().amax(1, keepdim=True) if channel else weight.abs().amax()) / 127
    values = (weight / scale).round().to(torch.int8)
    stored = scale if channel else scale.view(1)
    return {f"{name}.weight": values, f"{name}.weight_scale": stored}, values.float() * scale


def fp8_weight(
    name: str, weight: torch.Tensor, *, channel: bool = False, block: int | None = None
) -> tuple[Tensors, torch.Tensor]:
    """Return the fp8 tensors of a layer, and the dequantised weight."""
    if block is not None:
        rows, columns = (-(-size // block) for size in weight.shape)
        scale = torch.empty(rows, columns)
        spread = torch.empty_like(weight)
        for row in range(rows):
            for column in range(columns):
                place = (
                    slice(row * block, (row + 1) * block),
                    slice(column * block, (column + 1) * block),
                )
                scale[row, column] = weight[place].abs().amax() / 448
                spread[place] = scale[row, column]
        values = (weight / spread).to(torch.float8_e4m3fn)
        stored = {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}
        return stored, values.float() * spread
    scale = (weight.abs().amax(1, keepdim=True) if channel else weight.abs().amax()) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {
        f"{name}.weight": values,
        f"{name}.weight_scale": scale if channel else scale.view(1),
    }, values.float() * scale


def packed_weight(
    name: str, weight: torch.Tensor, *, bits: int, symmetric: bool, group_size: int | None
) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of compressed-tensors' pack-quantized, and the dequantised weight."""
    groups = torch.arange(weight.shape[1]) // (group_size or weight.shape[1])
    values, scales, zeros, exact = integers(weight, bits=bits, symmetric=symmetric, groups=groups)
    tensors = {
        f"{name}.weight_packed": pack(values.t(), bits=bits, dim=1),
        f"{name}.weight_scale": scales.t(),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = pack(zeros.t(), bits=bits, dim=0)
    return tensors, exact


def _weights(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **others,
    }


STATIC = {"int8": {"scale": 0.05, "zero": -3.0}, "fp8": {"scale": 0.02}}
"""What the static schemes do to activations; the outermost ones are cut off."""

Scheme = tuple[str, dict[str, Any], dict[str, Any] | None, Callable[..., Any], Activations | None]
SCHEMES: Sequence[Scheme] = (
    (
        "int-quantized",
        _weights(8, "int", "channel"),
        _weights(8, "int", "token", dynamic=True),
        partial(int8_weight, channel=True),
        int8_activations,
    ),
    (
        "int-quantized",
        _weights(8, "int", "tensor"),
        _weights(8, "int", "tensor", symmetric=False),
        partial(int8_weight, channel=False),
        partial(int8_activations, **STATIC["int8"]),
    ),
    (
        "int-quantized",
        _weights(8, "int", "channel"),
        _weights(8, "int", "token", dynamic=True, symmetric=False),
        partial(int8_weight, channel=True),
        int8_asymmetric_activations,
    ),
    (
        "float-quantized",
        _weights(8, "float", "channel"),
        _weights(8, "float", "token", dynamic=True),
        partial(fp8_weight, channel=True),
        fp8_activations,
    ),
    (
        "float-quantized",
        _weights(8, "float", "tensor"),
        _weights(8, "float", "tensor"),
        fp8_weight,
        partial(fp8_activations, **STATIC["fp8"]),
    ),
    (
        "float-quantized",
        _weights(8, "float", "tensor"),
        None,
        fp8_weight,
        None,
    ),
    (
        "pack-quantized",
        _weights(4, "int", "group", group_size=32, symmetric=False),
        None,
        partial(packed_weight, bits=4, symmetric=False, group_size=32),
        None,
    ),
    (
        "pack-quantized",
        _weights(8, "int", "channel"),
        None,
        partial(packed_weight, bits=8, symmetric=True, group_size=None),
        None,
    ),
)
"""Of compressed-tensors, a decoder layer each: format, weights, activations, and what they do."""


def build_compressed(folder: Path) -> Checkpoint:
    """Write a compressed-tensors checkpoint with a scheme of `SCHEMES` in each decoder layer."""

    def quantise(layer: int, name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        _, _, activations, pack_weight, _ = SCHEMES[layer]
        tensors, exact = pack_weight(name, weight)
        if activations is not None and not activations["dynamic"]:
            static = STATIC["fp8" if activations["type"] == "float" else "int8"]
            tensors[f"{name}.input_scale"] = torch.tensor([static["scale"]])
            if not activations["symmetric"]:
                tensors[f"{name}.input_zero_point"] = torch.tensor([static["zero"]]).to(torch.int8)
        return tensors, exact

    return _build(
        folder,
        quantise,
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head"],
            "config_groups": {
                f"group_{layer}": {
                    "targets": [rf"re:.*layers\.{layer}\..*"],
                    "format": form,
                    "weights": weights,
                    "input_activations": activations,
                }
                for layer, (form, weights, activations, _, _) in enumerate(SCHEMES)
            },
        },
        layers=len(SCHEMES),
        activations={n: scheme[4] for n, scheme in enumerate(SCHEMES) if scheme[4] is not None},
    )


FP8_BLOCK = 32
CACHE_SCALES = (0.0131, 0.0047)
"""Of keys and values; what is beyond 448 of them is cut off."""


def build_fp8(folder: Path, *, scheme: str) -> Checkpoint:
    """Write a checkpoint of the method fp8.

    Args:
        folder: where to.
        scheme: "dynamic" or "static", of the activations, weights per tensor; or "block". The
            static one has scales of an fp8 KV cache too.
    """
    changes: dict[str, Activations] = {
        "dynamic": fp8_activations,
        "static": partial(fp8_activations, **STATIC["fp8"]),
        "block": partial(fp8_activations, group=FP8_BLOCK),
    }

    def quantise(_: int, name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, exact = fp8_weight(name, weight, block=FP8_BLOCK if scheme == "block" else None)
        if scheme == "static":
            tensors[f"{name}.input_scale"] = torch.tensor(STATIC["fp8"]["scale"])
            for letter, scale in zip("kv", CACHE_SCALES, strict=True):
                if name.endswith(f".{letter}_proj"):
                    tensors[f"{name}.{letter}_scale"] = torch.tensor(scale)
        return tensors, exact

    return _build(
        folder,
        quantise,
        {
            "quant_method": "fp8",
            "activation_scheme": "static" if scheme == "static" else "dynamic",
            **({"weight_block_size": [FP8_BLOCK, FP8_BLOCK]} if scheme == "block" else {}),
        },
        layers=2,
        activations=dict.fromkeys(range(2), changes[scheme]),
        cache_scales=CACHE_SCALES if scheme == "static" else None,
    )


def _build(
    folder: Path,
    quantise: Callable[[int, str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    settings: Mapping[str, Any],
    *,
    layers: int,
    activations: Mapping[int, Activations] | None = None,
    cache_scales: tuple[float, float] | None = None,
    architecture: str = "llama",
    experts: bool = False,
) -> Checkpoint:
    reference = models.build(architecture, folder / "reference", layers=layers)
    served = folder / "served"
    shutil.copytree(reference, served)
    weights = load_file(reference / "model.safetensors")
    packed: Tensors = {}
    for key, weight in list(weights.items()):
        match = _LINEAR.fullmatch(key)
        if match is None or (".experts." in key and not experts):
            packed[key] = weight
            continue
        tensors, weights[key] = quantise(int(match[1]), key.removesuffix(".weight"), weight)
        packed.update(tensors)
    save_file(weights, reference / "model.safetensors", {"format": "pt"})
    save_file(
        {name: tensor.contiguous() for name, tensor in packed.items()},
        served / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings}, indent=2)
    )
    return Checkpoint(served, reference, activations or {}, cache_scales)
