"""Random LoRA adapters as PEFT saves them, and checkpoints with an adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

EMBEDDING: Final = "embed_tokens"

SPREAD: Final = 0.1
"""Standard deviation of A and B: adapters change most greedy answers of `tests.models`."""


def build_adapter(
    folder: Path, model: Path, modules: Sequence[str], *, rank: int, alpha: int, seed: int
) -> Path:
    """Write a float32 adapter for some modules of every layer of a checkpoint.

    Args:
        folder: where to; made if missing.
        model: folder of the checkpoint.
        modules: last parts of module names, e.g. `q_proj`, `lm_head`, `embed_tokens`.
        rank: of all modules.
        alpha: alpha / rank scales what the adapter adds.
        seed: of the values.

    Returns:
        The folder.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        kind = module.rpartition(".")[2]
        if kind not in modules:
            continue
        # An embedding is the product the other way round: its A is looked up by token.
        outputs, inputs = weight.shape if kind != EMBEDDING else weight.T.shape
        a = SPREAD * torch.randn(rank, inputs, generator=generator)
        b = SPREAD * torch.randn(outputs, rank, generator=generator)
        ending = ("embedding_A", "embedding_B") if kind == EMBEDDING else ("A.weight", "B.weight")
        for part, values in zip(ending, (a, b), strict=True):
            tensors[f"base_model.model.{module}.lora_{part}"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Write a checkpoint whose weights are W + alpha / rank * B A.

    Returns:
        The folder.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    changes = load_file(adapter / "adapter_model.safetensors")
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{module}A.weight" in changes:
            weight += scale * changes[f"{module}B.weight"] @ changes[f"{module}A.weight"]
        elif f"{module}embedding_A" in changes:
            change = changes[f"{module}embedding_B"] @ changes[f"{module}embedding_A"]
            weight += scale * change.T
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
