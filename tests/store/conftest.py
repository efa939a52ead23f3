"""Stores in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_neuron import _core


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a store that nobody has made yet."""
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Iterator[_core.Store]:
    """Yield a store; at the end every look-up was a hit or a miss."""
    store = _core.Store(str(root))
    yield store
    counters = store.counters()
    reasons = sum(counters[name] for name in ("corrupt", "untrusted", "other_kind", "errors"))
    assert reasons <= counters["misses"]
