"""A member of JSON that unpacks to many times its size, of a NEFF of some hundred kilobytes."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

from tests.neff.build import container, members, tar
from tests.store.processes import forked
from vllm_neuron import _core

COUNT = 1 << 20
MIB = 1 << 20


def peak_mb() -> float:
    """Return the most memory that this process has had; a forked child begins anew."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def test_attack():
    files = members()
    many = b'{"unknown":[' + b"[]," * COUNT + b"[]]," + files["neff.json"].lstrip()[1:]
    packed = container(gzip.compress(tar({**files, "neff.json": many}), 1))
    assert len(packed) < MIB

    def parse():
        before = peak_mb()
        _core.Neff.parse(packed)
        assert peak_mb() - before < 3 * len(many) / MIB

    # Before anything is freed that could be used again.
    forked(parse)
    # Who makes objects of it holds five to twenty times the text.
    tracemalloc.start()
    json.loads(many)
    assert tracemalloc.get_traced_memory()[1] > 5 * len(many)
    tracemalloc.stop()
