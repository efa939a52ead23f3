"""The stored index: the same answers without reading the archive, and never for other bytes."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.neff import build
from vllm_neuron import _core
from vllm_neuron.errors import NeffChecksumError, NeffError

FILES = build.members()


def sound(*, compressed: bool) -> bytes:
    payload = build.tar(FILES)
    return build.container(gzip.compress(payload, mtime=0) if compressed else payload)


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
def test_indexed_neff_gives_the_same_answers(compressed):
    data = sound(compressed=compressed)
    parsed = _core.Neff.parse(data)
    indexed = _core.Neff.parse(data, index=parsed.index())
    assert indexed.to_dict() == parsed.to_dict()
    assert indexed.index() == parsed.index()
    assert {name: indexed.member(name) for name, _ in indexed.members} == FILES


def test_the_archive_is_not_read_with_an_index():
    data = sound(compressed=True)
    index = _core.Neff.parse(data).index()
    # Behind the gzip magic nothing is left of the archive.
    emptied = data[:1034] + bytes(len(data) - 1034)
    indexed = _core.Neff.parse(emptied, verify_hash=False, index=index)
    assert indexed.inputs == _core.Neff.parse(data).inputs
    with pytest.raises(NeffError):
        indexed.member("neff.json")
    with pytest.raises(NeffError):
        _core.Neff.parse(emptied, verify_hash=False)
    with pytest.raises(NeffChecksumError):
        _core.Neff.parse(emptied, index=index)


def _changed(index: bytes, **values: object) -> bytes:
    return json.dumps({**json.loads(index), **values}).encode()


def test_an_index_of_other_bytes_is_not_used():
    data = sound(compressed=False)
    parsed = _core.Neff.parse(data)
    index = parsed.index()
    members = json.loads(index)["members"]
    far = [{**members[0], "offset": 1 << 40}]
    huge = [{**members[0], "size": (1 << 64) - 1}]
    for other in (
        b"",
        b"{}",
        index[:-1],
        b"[" * 5000,
        _changed(index, version=2, target="forged"),
        _changed(index, hash="00" * 32, target="forged"),
        _changed(index, data_size=1, target="forged"),
        _changed(index, is_gzip=True, target="forged"),
        _changed(index, members=far, target="forged"),
        _changed(index, members=huge, target="forged"),
        _changed(index, members=[*members, members[0]], target="forged"),
    ):
        assert _core.Neff.parse(data, index=other).to_dict() == parsed.to_dict()
    with pytest.raises(NeffError):
        _core.Neff.parse(data[:1000], index=index)
