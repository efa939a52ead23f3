"""Everybody can write to the cache directory, so everybody can put a program there."""

from __future__ import annotations

import pytest

from tests.attacks.scene import filled, is_refused
from tests.store.places import key_of
from vllm_neuron import _core
from vllm_neuron.errors import StoreUntrustedError


def test_attack(tmp_path):
    filled(tmp_path / "store")
    (tmp_path / "store").chmod(0o777)
    store = _core.Store(str(tmp_path / "store"))
    is_refused(store, "writable by group or others (mode 0777)")
    with pytest.raises(StoreUntrustedError):
        store.put("neff", key_of(2), {"neff": b"x"})
    with pytest.raises(StoreUntrustedError):
        store.evict(max_size_bytes=0)
