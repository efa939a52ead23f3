"""What the attacks share: a filled store, NEFFs around an archive, and the way others unpack."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from tests.neff.build import block, container, members, tar
from tests.store.places import key_of
from vllm_neuron import _core
from vllm_neuron.errors import NeffError

CONTENT = b"sound content"


def filled(root: Path) -> _core.Store:
    """Return a store with one entry, number 1."""
    store = _core.Store(str(root))
    store.put("neff", key_of(1), {"neff": CONTENT})
    return store


def is_refused(store: _core.Store, expected: str) -> None:
    """Check that entry 1 is a miss, and that the reason says `expected`."""
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    assert expected in problem.reason


def archive_with(name: bytes, content: bytes = b"", **fields: bytes) -> bytes:
    """Return a sound NEFF's archive with one more member in front."""
    padded = content + bytes(-len(content) % 512)
    return block(name, len(content), **fields) + padded + tar(members())


def neff_is_refused(archive: bytes, expected: str) -> None:
    """Check that a NEFF around an archive is refused, plain and compressed."""
    for payload in (archive, gzip.compress(archive, mtime=0)):
        with pytest.raises(NeffError) as caught:
            _core.Neff.parse(container(payload))
        assert expected in str(caught.value)


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack as a tool does that trusts its archives."""
    folder.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        opened.extractall(folder, filter="fully_trusted")
