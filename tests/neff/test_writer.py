"""The writer: its rules, its golden files, and that what it writes is what the reader reads."""

import gzip
import hashlib
import json
import struct
import tarfile
import uuid
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_neuron import _core
from vllm_neuron.errors import ConfigurationError, NeuronError

from . import build
from .samples import REPOSITORY

# What the golden files were written from. They are read by every later version: a change of the
# writer needs new files beside them, not instead of them.
GOLDEN_REQUEST = {
    "name": "decode-8.neff",
    "target": "none",
    "compiler_version": "golden 1",
    "inputs": [
        ("input_ids", "int32", [8]),
        ("kv_caches[0]", "bfloat16", [2, 64, 16, 3, 64]),
        ("scale", "float32", []),
    ],
    "outputs": [("logits", "float32", [8, 49152]), ("new kv_caches[0]", "bfloat16", [2, 64, 16])],
    "members": [("module.mlirbc", bytes(range(256)) * 5), ("host/empty", b"")],
}
GOLDEN = {
    kind: REPOSITORY / "tests" / "golden" / "neff" / f"decode-8-{kind}.neff"
    for kind in ("plain", "gzip")
}
COMPRESSION = {"plain": "none", "gzip": "gzip"}


def write(**changes) -> bytes:
    request = {
        "name": "n",
        "target": "none",
        "compiler_version": "1",
        "inputs": [("x", "float32", (2, 3))],
        "outputs": [("y", "float32", (2, 3))],
        **changes,
    }
    return _core.write_neff(**request)


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_file_is_read(kind):
    data = GOLDEN[kind].read_bytes()
    neff = _core.Neff.parse(data)
    assert neff.warnings == []
    assert neff.compression == COMPRESSION[kind]
    assert neff.digest_order == "standard"
    assert (neff.name, neff.target) == ("decode-8.neff", "none")
    assert neff.compiler_version == "golden 1"
    for field in ("inputs", "outputs"):
        read = [(t.name, t.dtype, list(t.shape)) for t in getattr(neff, field)]
        assert read == GOLDEN_REQUEST[field]
    for name, content in GOLDEN_REQUEST["members"]:
        assert neff.member(name) == content


def test_plain_golden_file_is_written_byte_for_byte():
    written = _core.write_neff(**GOLDEN_REQUEST, compression="none")
    assert written == GOLDEN["plain"].read_bytes()


def test_compressed_golden_file_holds_the_same_archive():
    """Its bytes may change with the deflate library; what is inside may not."""
    written = _core.write_neff(**GOLDEN_REQUEST, compression="gzip")
    archive = GOLDEN["plain"].read_bytes()[1024:]
    assert gzip.decompress(written[1024:]) == archive
    assert gzip.decompress(GOLDEN["gzip"].read_bytes()[1024:]) == archive


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_header_follows_the_writer_rules(compression):
    data = write(name="é" * 127, compression=compression)
    payload = data[1024:]
    digest = hashlib.md5(payload).digest()
    numbers = struct.unpack_from("<5Q", data)
    assert numbers == (2, 1024, len(payload), 1, 0)
    assert data[40:168] == bytes(128)
    assert struct.unpack_from("<I", data, 168) == (1,)
    assert data[172:204] == digest + bytes(16)
    assert data[204:220] == digest
    assert data[220:476] == ("é" * 127).encode().ljust(256, b"\0")
    assert struct.unpack_from("<I", data, 476) == (1,)
    assert data[480:544] == b"\1" + bytes(63)
    assert struct.unpack_from("<QI", data, 544) == (0, 1)
    assert data[556:1024] == bytes(468)
    neff = _core.Neff.parse(data)
    assert neff.uuid == str(uuid.UUID(bytes=digest))
    assert neff.warnings == []


def test_archive_follows_the_writer_rules():
    data = write(compression="none", members=[("b/extra", b"abc"), ("a", b"")])
    with tarfile.open(fileobj=BytesIO(data[1024:]), mode="r:") as archive:
        entries = archive.getmembers()
    engines = [
        f"sg00/{stem}.{suffix}" for stem in build.ENGINES.values() for suffix in ("json", "bin")
    ]
    fixed = ["kelf-0.json", "neff.json", "info.json", "sg00/def.json", *engines]
    assert [entry.name for entry in entries] == [*fixed, "b/extra", "a"]
    for entry in entries:
        assert entry.type == tarfile.REGTYPE
        assert (entry.mode, entry.mtime, entry.uid, entry.gid) == (0o644, 0, 0, 0)
        assert (entry.uname, entry.gname, entry.pax_headers) == ("", "", {})
    first = data[1024:1536]
    assert first[100:108] == b"0000644\0"
    assert first[124:136] == b"%011o\0" % entries[0].size
    assert first[257:265] == b"ustar\x0000"
    assert data.endswith(bytes(1024))
    assert len(data) % 512 == 0


def test_gzip_header_has_level_1_and_no_time():
    data = write()
    # ID, method 8, no flags, MTIME 0, XFL 4 (fastest), OS 3 (Unix).
    assert data[1024:1034] == bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 4, 3])


def test_metadata_follows_the_shape_of_real_files():
    data = write(
        inputs=[("x", "float16", [128, 256]), ("y", "float16", [256, 128])],
        outputs=[("output0", "float16", [128, 128])],
    )
    neff = _core.Neff.parse(data)
    graph = json.loads(neff.member("neff.json"))
    assert graph == build.graph(
        [("x", "float16", [128, 256]), ("y", "float16", [256, 128])],
        [("output0", "float16", [128, 128])],
    )
    assert json.loads(neff.member("kelf-0.json")) == build.kelf()
    assert json.loads(neff.member("info.json")) == build.info(name="n", tool_version="1")
    definition = json.loads(neff.member("sg00/def.json"))
    assert definition["var"] == {
        "SB": {"type": "state-buffer", "var_id": 0},
        "x": {"type": "input", "var_id": 1, "size": 65536, "ops": []},
        "y": {"type": "input", "var_id": 2, "size": 65536, "ops": []},
        "output0": {"type": "output", "var_id": 3, "size": 32768, "ops": []},
    }
    for key, stem in build.ENGINES.items():
        assert definition[key] == f"{stem}.json"
        assert definition[f"{key}_instr"] == f"{stem}.bin"
        assert neff.member(f"sg00/{stem}.bin") == b""
        assert json.loads(neff.member(f"sg00/{stem}.json")) == {
            "name": f"{stem}.json",
            "instr": f"{stem}.bin",
            "dma": [],
        }


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_equal_requests_give_equal_bytes_and_others_another_uuid(compression):
    members = [("m", b"content" * 1000)]
    first = write(members=members, compression=compression)
    assert write(members=members, compression=compression) == first
    changes = [
        {"name": "other"},
        {"target": "other"},
        {"compiler_version": "2"},
        {"inputs": [("x", "float32", (3, 2))]},
        {"outputs": [("z", "float32", (2, 3))]},
        {"members": [("m", b"content" * 999 + b"Content")]},
        {"members": [("n", b"content" * 1000)]},
    ]
    uuids = {_core.Neff.parse(first).uuid}
    for change in changes:
        data = write(**{"members": members, "compression": compression, **change})
        uuids.add(_core.Neff.parse(data).uuid)
    assert len(uuids) == 1 + len(changes)


REAL_TARGETS = ["sunda", "cayman", "mariana", "Cayman", "trn1", "trn2", "TRN3", "inf2"]


@pytest.mark.parametrize("target", ["", *REAL_TARGETS])
def test_target_that_a_device_could_have_is_refused(target):
    with pytest.raises(ConfigurationError) as caught:
        write(target=target)
    assert (caught.value.name, caught.value.value) == ("target", target)
    assert str(caught.value) == (
        "cannot write a NEFF: target must be a name that no device has, because the NEFF holds no "
        f'device code, found "{target}"'
    )
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"name": ""}, "name", ""),
        ({"name": "n" * 256}, "name", "n" * 256),
        ({"name": "a\0b"}, "name", "a\0b"),
        ({"outputs": []}, "outputs", "[]"),
        ({"inputs": [("", "float32", [1])]}, "inputs", ""),
        ({"inputs": [("x" * 256, "float32", [1])]}, "inputs", "x" * 256),
        ({"inputs": [("x", "float32", [1])] * 2}, "inputs", "x"),
        ({"inputs": [("y", "float32", [1])]}, "outputs", "y"),
        ({"inputs": [("SB", "float32", [1])]}, "inputs", "SB"),
        ({"inputs": [("x", "float4", [1])]}, "inputs", "float4"),
        ({"outputs": [("y", "torch.float32", [1])]}, "outputs", "torch.float32"),
        ({"outputs": [("y", "float32", [2**32, 2**32])]}, "outputs", "[4294967296, 4294967296]"),
        ({"members": [("../m", b"")]}, "members", "../m"),
        ({"members": [("/m", b"")]}, "members", "/m"),
        ({"members": [("m/", b"")]}, "members", "m/"),
        ({"members": [("", b"")]}, "members", ""),
        ({"members": [("m", b""), ("m", b"")]}, "members", "m"),
        ({"members": [("neff.json", b"")]}, "members", "neff.json"),
        ({"members": [("m" * 101, b"")]}, "members", "m" * 101),
        ({"compression": "zstd"}, "compression", "zstd"),
    ],
)
def test_request_that_cannot_be_written_is_refused(changes, field, value):
    with pytest.raises(ConfigurationError) as caught:
        write(**changes)
    assert (caught.value.name, caught.value.value) == (field, value)
    assert str(caught.value).startswith(f"cannot write a NEFF: {field} must be ")


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": [("x", "float32", [-1])]},
        {"inputs": [("x", "float32", [1.5])]},
        {"inputs": [("x", "float32")]},
        {"members": [("m", "text")]},
    ],
)
def test_argument_of_another_type_is_a_python_error(changes):
    with pytest.raises((TypeError, ValueError, OverflowError, BufferError)) as caught:
        write(**changes)
    assert not isinstance(caught.value, NeuronError)


def test_long_paths_are_split_over_prefix_and_name():
    path = "d" * 120 + "/" + "f" * 90
    neff = _core.Neff.parse(write(members=[(path, b"x")]))
    assert neff.members[-1] == (path, 1)


def test_archive_that_packs_best_is_within_the_inflate_ratio_of_the_reader():
    zeros = bytes(80 << 20)
    neff = _core.Neff.parse(write(members=[("zeros", zeros)]))
    assert neff.compression == "gzip"
    assert 50 < len(zeros) / neff.data_size < 160
    assert neff.members[-1] == ("zeros", len(zeros))


TENSOR_NAMES = st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=60
)
DTYPES = st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"])
TENSORS = st.tuples(DTYPES, st.lists(st.integers(0, 1 << 12), max_size=4))
PATHS = st.lists(
    st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=20).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=3,
).map("/".join)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        TENSOR_NAMES.filter(lambda name: name != "SB"), TENSORS, min_size=1, max_size=6
    ),
    st.integers(0, 5),
    st.dictionaries(PATHS.filter(lambda path: len(path.encode()) <= 100), st.binary(max_size=700)),
    st.sampled_from(["none", "gzip"]),
)
def test_what_is_written_is_what_is_read(tensors, split, members, compression):
    rows = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    inputs, outputs = rows[: min(split, len(rows) - 1)], rows[min(split, len(rows) - 1) :]
    data = write(
        inputs=inputs, outputs=outputs, members=list(members.items()), compression=compression
    )
    neff = _core.Neff.parse(data)
    assert neff.warnings == []
    assert neff.compression == compression
    assert [(t.name, t.dtype, list(t.shape)) for t in neff.inputs] == inputs
    assert [(t.name, t.dtype, list(t.shape)) for t in neff.outputs] == outputs
    assert neff.members[14:] == [(name, len(content)) for name, content in members.items()]
    for name, content in members.items():
        assert neff.member(name) == content
