"""NEFFs put together byte by byte in Python, without the product's writer: right ones and bad ones.

The layout is that of docs/neff-format.md; `struct` and `tarfile` stand for the other side.
"""

import gzip
import hashlib
import io
import json
import struct
import tarfile

HEADER_BYTES = 1024
# Offset, size and kind of each header field: numbers are little-endian.
FIELDS = {
    "pkg_version": (0, 8),
    "header_size": (8, 8),
    "data_size": (16, 8),
    "neff_version_major": (24, 8),
    "neff_version_minor": (32, 8),
    "neff_build_version": (40, 128),
    "num_tpb": (168, 4),
    "hash": (172, 32),
    "uuid": (204, 16),
    "name": (220, 256),
    "requested_tpb_count": (476, 4),
    "tpb_per_node": (480, 64),
    "feature_bits": (544, 8),
    "lnc_size": (552, 4),
    "pad": (556, 468),
}
ENGINES = {"pe": "PE", "act": "Activation", "pool": "Pool", "dve": "DVE", "sp": "SP"}


def swap_words(digest: bytes) -> bytes:
    return struct.pack("<4I", *struct.unpack(">4I", digest))


def with_field(neff: bytes, field: str, value: int | bytes) -> bytes:
    """A copy of `neff` with one header field replaced."""
    offset, size = FIELDS[field]
    raw = value.to_bytes(size, "little") if isinstance(value, int) else value.ljust(size, b"\0")
    assert len(raw) == size
    return neff[:offset] + raw + neff[offset + size :]


def container(payload: bytes, **fields: int | bytes) -> bytes:
    """A header for `payload` (standard MD5), with `fields` replaced."""
    digest = hashlib.md5(payload).digest()
    values: dict[str, int | bytes] = {
        "pkg_version": 2,
        "header_size": HEADER_BYTES,
        "data_size": len(payload),
        "neff_version_major": 1,
        "num_tpb": 1,
        "hash": digest,
        "uuid": digest,
        "name": b"test.neff",
        "requested_tpb_count": 1,
        "tpb_per_node": b"\1",
        "lnc_size": 1,
        **fields,
    }
    header = bytes(HEADER_BYTES)
    for field, value in values.items():
        header = with_field(header, field, value)
    return header + payload


def info(**changes) -> dict:
    return {
        "tool_version": "0.test",
        "kelp_version": "Dynamic",
        "name": "test.neff",
        "num_tpb": 1,
        "num_tpb_requested": 1,
        "num_tpb_per_node": [1] + [0] * 63,
        **changes,
    }


def kelf(cores: int = 1, **changes) -> dict:
    graphs = [{"definition": f"sg{i:02}/def.json", "name": f"sg{i:02}"} for i in range(cores)]
    return {"graphs": graphs, "version": "0.5", "target": "none", **changes}


def graph(inputs, outputs, cores: int = 1) -> dict:
    """`neff.json` for tensors (name, dtype, shape)."""
    listed = [output for output in outputs for _ in range(cores)]
    n, rows = len(inputs), len(inputs) + len(listed)
    nodes = [
        {"op": "null", "name": name, "inputs": [], "output_names": [name], "is_param": "0"}
        for name, _, _ in inputs
    ]
    program = {
        "op": "tvm_op",
        "name": "sg_coreV10",
        "inputs": [[i, 0, 0] for i in range(n)],
        "output_names": [name for name, _, _ in listed],
        "attrs": {
            "func_name": "__kelf",
            "kelf": "kelf-0.json",
            "flatten_data": "0",
            "num_inputs": str(n),
            "num_outputs": str(len(listed)),
        },
    }
    declared = {
        name: {"id": i, "dtype": dtype, "shape": shape}
        for i, (name, dtype, shape) in enumerate(inputs)
    }
    return {
        "nodes": [*nodes, program],
        "arg_nodes": list(range(n)),
        "heads": [[n, k, 0] for k in range(len(listed))],
        "node_row_ptr": [*range(n + 1), rows],
        "attrs": {
            "shape": ["list_shape", [shape for _, _, shape in [*inputs, *listed]]],
            "dltype": ["list_str", [dtype for _, dtype, _ in [*inputs, *listed]]],
            "storage_id": ["list_int", list(range(rows))],
        },
        "metadata": {"signatures": {"default": {"inputs": declared, "outputs": {}}}},
    }


def definition(variables: dict, **changes) -> dict:
    engines = {key: f"{stem}.json" for key, stem in ENGINES.items()}
    code = {f"{key}_instr": f"{stem}.bin" for key, stem in ENGINES.items()}
    return {**engines, **code, "var": variables, "dma_queue": {}, "neff_features": [], **changes}


VARIABLES = {
    "SB": {"type": "state-buffer", "var_id": 0},
    "x": {"type": "input", "var_id": 1, "size": 24, "ops": []},
    "y": {"type": "output", "var_id": 2, "size": 8, "ops": []},
}
INPUTS = [("x", "float32", [2, 3])]
OUTPUTS = [("y", "bfloat16", [4])]


def members(**replaced) -> dict[str, bytes]:
    """The files of a small sound NEFF; `replaced` gives new JSON values, None leaves a file out.

    Keywords are `info`, `kelf`, `graph` and `definition`.
    """
    values = {
        "kelf-0.json": replaced.get("kelf", kelf()),
        "neff.json": replaced.get("graph", graph(INPUTS, OUTPUTS)),
        "info.json": replaced.get("info", info()),
        "sg00/def.json": replaced.get("definition", definition(VARIABLES)),
    }
    files = {name: json.dumps(value).encode() for name, value in values.items() if value}
    for stem in ENGINES.values():
        files[f"sg00/{stem}.json"] = b"{}"
        files[f"sg00/{stem}.bin"] = bytes(64)
    return files


def tar(files: dict[str, bytes], **options) -> bytes:
    """A tar archive by Python's tarfile, POSIX ustar unless `options` say otherwise."""
    stream = io.BytesIO()
    with tarfile.open(
        fileobj=stream, mode="w", **{"format": tarfile.USTAR_FORMAT, **options}
    ) as out:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def block(name: bytes, size: int | bytes = 0, *, kind: bytes = b"0", **fields: bytes) -> bytes:
    """One tar header block with a right checksum; `fields` replaces raw fields."""
    places = {
        "name": (0, 100),
        "mode": (100, 8),
        "size": (124, 12),
        "typeflag": (156, 1),
        "linkname": (157, 100),
        "magic": (257, 6),
        "version": (263, 2),
        "prefix": (345, 155),
    }
    values = {
        "name": name,
        "mode": b"0000644\0",
        "size": size if isinstance(size, bytes) else b"%011o\0" % size,
        "typeflag": kind,
        "magic": b"ustar\0",
        "version": b"00",
        **{key: value for key, value in fields.items() if key != "checksum"},
    }
    raw = bytearray(512)
    for field, value in values.items():
        offset, length = places[field]
        raw[offset : offset + length] = value.ljust(length, b"\0")
    raw[148:156] = b" " * 8
    raw[148:156] = fields.get("checksum", b"%06o\0 " % sum(raw))
    return bytes(raw)


def record(name: bytes, content: bytes = b"", **fields) -> bytes:
    """A tar header block and its content, padded."""
    size = fields.pop("size", len(content))
    return block(name, size, **fields) + content + bytes(-len(content) % 512)


def pax(*lines: bytes, kind: bytes = b"x") -> bytes:
    """A PAX record block with lines `KEY=VALUE`, lengths put in front."""
    text = b""
    for line in lines:
        length = len(line) + 3
        while len(b"%d %s\n" % (length, line)) != length:
            length += 1
        text += b"%d %s\n" % (length, line)
    return record(b"pax", text, kind=kind)


def sound(extra_records: bytes = b"", *, compressed: bool = False, **replaced) -> bytes:
    """A small NEFF with raw tar records appended to its archive."""
    payload = without_end(tar(members(**replaced))) + extra_records + bytes(1024)
    if compressed:
        payload = gzip.compress(payload, 1, mtime=0)
    return container(payload)


def without_end(archive: bytes) -> bytes:
    """A tar archive up to the blocks of zeros at its end."""
    stream = io.BytesIO(archive)
    with tarfile.open(fileobj=stream) as opened:
        opened.getmembers()
        return archive[: opened.offset]


def read_tar(archive: bytes) -> dict[str, bytes]:
    """Name and content of every file of a tar archive, by Python's tarfile."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        return {entry.name: opened.extractfile(entry).read() for entry in opened.getmembers()}
