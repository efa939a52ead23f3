"""An entry that another user owns."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.attacks.scene import filled, is_refused
from tests.store.places import path_of
from tests.store.processes import forked
from vllm_neuron import _core

STRANGER, VICTIM = 54321, 54322


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_attack():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        os.chown(folder, VICTIM, VICTIM)
        forked(lambda: filled(folder / "store") and None, user=VICTIM)
        os.chown(path_of(folder / "store", 1), STRANGER, STRANGER)
        path_of(folder / "store", 1).chmod(0o444)

        def victim():
            assert path_of(folder / "store", 1).read_bytes()
            is_refused(_core.Store(str(folder / "store")), f"owned by user {STRANGER}")

        forked(victim, user=VICTIM)
    finally:
        shutil.rmtree(folder)
