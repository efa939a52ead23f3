"""Tiny random checkpoints of real architectures, built here, and transformers' own answers to them.

    python -m tests.models ARCHITECTURE FOLDER

A checkpoint is a folder as `vllm serve` takes it: config, safetensors, a byte-level tokenizer of
264 tokens with a chat template. The same call always writes the same weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from tests.architectures import ARCHITECTURES, build_model

SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
RESERVED_TOKENS: Final = ("<reserved_0>", "<reserved_1>")
VOCABULARY_SIZE: Final = len(SPECIAL_TOKENS) + 256 + len(RESERVED_TOKENS)
BOS, EOS, PAD = 1, 2, 3

MAX_POSITIONS: Final = 1024

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

INITIALIZER_RANGE: Final = 0.2
"""Ten times the usual: logits lie so far apart that rounding changes no greedy answer."""


def _tokenizer() -> Any:
    """Return a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *RESERVED_TOKENS)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _shape(layers: int) -> dict[str, Any]:
    """Return the configuration that all architectures share."""
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }


def build(architecture: str, folder: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """Write a float32 checkpoint.

    Args:
        architecture: one of `architectures.ARCHITECTURES`.
        folder: where to; made if missing.
        layers: number of decoder layers.
        seed: of the weights.

    Returns:
        The folder.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(architecture, _shape(layers)).to(torch.float32)
        # At their initial value of one a norm that is left out could not be told from one applied.
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    # transformers 5 writes "TokenizersBackend", which transformers 4 does not know.
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(fields, indent=2))
    return folder


@cache
def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    # Not by scaled_dot_product_attention, which leaves Gemma 2's soft cap out.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def greedy(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """Return transformers' greedy continuation of each prompt, one prompt at a time.

    Args:
        folder: checkpoint.
        prompts: token ids.
        tokens: how many to generate; the end-of-sequence token does not stop it.
        dtype: what to compute in.

    Returns:
        `tokens` token ids per prompt.
    """
    model = _loaded(folder, dtype)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


def logits(folder: Path, ids: Sequence[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return transformers' logits, float32 `[len(ids), vocabulary]`."""
    with torch.no_grad():
        return _loaded(folder, dtype)(torch.tensor([list(ids)])).logits[0].float()


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("architecture", choices=sorted(ARCHITECTURES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    print(build(options.architecture, options.folder, layers=options.layers))


if __name__ == "__main__":
    main()
