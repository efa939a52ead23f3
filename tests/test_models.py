"""The tiny checkpoints: deterministic, loadable, with answers that rounding does not change."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests import models


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_checkpoint_is_deterministic(architecture, checkpoint, tmp_path):
    first = checkpoint(architecture)
    second = models.build(architecture, tmp_path)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        digests = [hashlib.sha256((f / name).read_bytes()).hexdigest() for f in (first, second)]
        assert digests[0] == digests[1], name
    assert json.loads((first / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_greedy_answers_are_clear(architecture, checkpoint):
    folder = checkpoint(architecture)
    prompts = [[77, 74, 81, 81, 84], [65] * 20, [5]]
    for prompt, answer in zip(prompts, models.greedy(folder, prompts, tokens=24), strict=True):
        # Row i predicts token i + 1; the last token has no successor.
        logits = models.logits(folder, prompt + answer)[len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == answer
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        assert (first - second).min() > 1e-3, "a tie within what float32 rounding can move"


def test_tokenizer_round_trip_and_chat(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
    assert len(tokenizer) == models.VOCABULARY_SIZE == 264
    text = "Grüße, 世界!\n\t🙂"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
