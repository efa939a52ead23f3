"""Fixtures for all tests: a clean environment, tiny checkpoints."""

from __future__ import annotations

import os

# Before anything imports torch, transformers or vllm: they read these once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
