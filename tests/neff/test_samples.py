"""Real NEFFs of public repositories, where they are at hand, and the worked example of one."""

import gzip
import hashlib

import pytest

from vllm_neuron import _core

from . import build
from .samples import GOLDEN, REAL

# Where no real file is at hand, the tests of this file still have our own writer's.
FILES = REAL or GOLDEN


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_is_sound_without_warnings(path):
    neff = _core.Neff.parse(path.read_bytes(), path=str(path))
    assert neff.warnings == []
    assert neff.size_bytes == 1024 + neff.data_size == path.stat().st_size
    if path in REAL:
        assert neff.digest_order == "word-swapped"
        assert neff.compression == "gzip"
        assert neff.neff_version == (2, 0)
        assert neff.lnc_size == 2
        assert neff.target in {"cayman", "mariana"}
        assert neff.compiler_version.startswith(("2.23.6484.0+", "2.24.5133.0+"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_member_is_what_tarfile_reads(path):
    data = path.read_bytes()
    neff = _core.Neff.parse(data)
    payload = data[1024:]
    expected = build.read_tar(gzip.decompress(payload) if neff.compression == "gzip" else payload)
    assert neff.members == [(name, len(content)) for name, content in expected.items()]
    for name, content in expected.items():
        assert neff.member(name) == content


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_rebuilt_from_its_members_is_sound(path, compressed):
    original = _core.Neff.parse(path.read_bytes())
    files = {name: original.member(name) for name, _ in original.members}
    payload = build.tar(files)
    payload = gzip.compress(payload, 1, mtime=0) if compressed else payload
    rebuilt = _core.Neff.parse(
        build.container(
            payload,
            neff_version_major=original.neff_version[0],
            name=original.name.encode(),
            feature_bits=original.feature_bits,
            lnc_size=original.lnc_size,
        )
    )
    assert rebuilt.warnings == []
    assert rebuilt.digest_order == "standard"
    assert rebuilt.compression == ("gzip" if compressed else "none")
    assert rebuilt.members == original.members
    assert (rebuilt.inputs, rebuilt.outputs) == (original.inputs, original.outputs)


@pytest.mark.skipif(not REAL, reason="no neff-samples folder beside the repository")
def test_worked_example_of_matmul_small():
    (path,) = [path for path in REAL if path.name == "aws-neuron__nkipy__matmul_small.neff"]
    data = path.read_bytes()
    neff = _core.Neff.parse(data)
    assert len(data) == neff.size_bytes == 62464
    assert neff.package_version == 2
    assert neff.data_size == 61440
    assert neff.neff_version == (2, 0)
    assert neff.lnc_size == 2
    assert neff.feature_bits == 0x209C00 == sum(1 << bit for bit in (10, 11, 12, 15, 21))
    assert neff.name == "file.neff"
    assert neff.uuid == "00a04c53-5fd9-4f07-bffd-d5eacdefc852"
    assert data[172:204].hex() == "bcb3e9ef77301698cd8b4cb9471ff5ac" + "00" * 16
    assert hashlib.md5(data[1024:]).hexdigest() == "efe9b3bc98163077b94c8bcdacf51f47"
    assert neff.digest_order == "word-swapped"
    assert (neff.target, neff.compiler_version) == ("cayman", "2.23.6484.0+3b612583")
    assert [(t.name, t.dtype, t.shape) for t in neff.inputs] == [
        ("x", "float16", (128, 256)),
        ("y", "float16", (256, 128)),
    ]
    # Listed once per core in the file: [output0, output0].
    assert [(t.name, t.dtype, t.shape) for t in neff.outputs] == [
        ("output0", "float16", (128, 128)),
    ]
    assert neff.to_dict()["features"] == [
        "virtual-neuron-core",
        "newer-than-v2",
        "dge-table",
        "bit-15",
        "dynamic-hardware-queue",
    ]
    assert (neff.to_dict()["num_tpb"], neff.to_dict()["requested_tpb_count"]) == (1, 1)
