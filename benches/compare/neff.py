"""NEFF validation beside hashlib and tarfile, and the warm load."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import xxhash

from benches.compare.timing import Row, at_most, faster, interleaved
from vllm_neuron import _core

HEADER_BYTES = 1024


def example(size_bytes: int, compression: str) -> bytes:
    """Return a NEFF with `size_bytes` of members that compress about as real ones do."""
    generator = random.Random(7)
    members = []
    for index in range(8):
        # A fifth is noise: real NEFFs inflate to five to ten times their size.
        part = size_bytes // 8
        noise = generator.randbytes(part // 5)
        members.append((f"sg00/part{index}.bin", noise + bytes(part - len(noise))))
    return _core.write_neff(
        name="example",
        target="host",
        compiler_version="1",
        inputs=[("x", "float32", (8, 8))],
        outputs=[("y", "float32", (8, 8))],
        members=members,
        compression=compression,
    )


def _tarfile_index(payload: memoryview) -> list[tuple[str, int]]:
    with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
        return [(member.name, member.size) for member in archive]


def neff(folder: Path) -> Iterator[Row]:
    """Cold validation of 1 and 64 MiB, and a warm load of 64 MiB."""
    for size, name in ((1 << 20, "1 MiB"), (64 << 20, "64 MiB")):
        packed, plain = example(size, "gzip"), example(size, "none")
        payloads = memoryview(packed)[HEADER_BYTES:], memoryview(plain)[HEADER_BYTES:]
        taken = interleaved(
            {
                "index": lambda p=packed: _core.Neff.parse(p, verify_hash=False),
                "tarfile": lambda p=payloads[0]: _tarfile_index(p),
                "whole": lambda p=plain: _core.Neff.parse(p),
                "unhashed": lambda p=plain: _core.Neff.parse(p, verify_hash=False),
                "md5": lambda p=payloads[1]: hashlib.md5(p, usedforsecurity=False).digest(),
            },
            rounds=7,
        )
        operation = f"NEFF index, {name} inflated, gzip"
        yield faster(operation, "tarfile", taken["index"], taken["tarfile"], 2)
        digest_s = max(taken["whole"] - taken["unhashed"], 1e-9)
        yield faster(f"NEFF hash, {name}", "hashlib's MD5", digest_s, taken["md5"], 0.95)
    store, key = _core.Store(str(folder / "neff")), _core.digest(b"neff")
    content = os.urandom(1 << 20) * 64
    store.put("neff", key, {"neff": content})
    taken = interleaved(
        {
            "checked": lambda: store.get("neff", key),
            "xxhash": lambda: xxhash.xxh3_128_digest(content),
        },
        rounds=15,
    )
    taken |= interleaved({"load": lambda: store.get("neff", key, verify=[])}, rounds=50, calls=10)
    yield at_most("NEFF warm load, 64 MiB, before its checksum", taken["load"], 30e-6)
    checksum_s = taken["checked"] - taken["load"]
    yield faster(
        "NEFF warm load, its checksum", "the xxhash package", checksum_s, taken["xxhash"], 0.7
    )
