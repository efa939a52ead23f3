"""Checks 9 and 11: what neff.json, kelf-0.json, info.json and def.json must say."""

import copy
import gzip
import json
import struct

import pytest

from vllm_neuron import _core
from vllm_neuron.errors import NeffFormatError

from . import build


def parse(**replaced) -> _core.Neff:
    return _core.Neff.parse(build.sound(**replaced))


def refused(extra: bytes = b"", **replaced) -> NeffFormatError:
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(build.sound(extra, **replaced))
    assert caught.value.status == 2
    return caught.value


def changed(value: dict, path: str, new) -> dict:
    """A deep copy of `value` with the item at `path` (keys and indices joined by dots) replaced."""
    result = copy.deepcopy(value)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = result
    for part in parents:
        place = place[part]
    if new is None:
        del place[last]
    else:
        place[last] = new
    return result


GRAPH = build.graph(build.INPUTS, build.OUTPUTS)
DEFINITION = build.definition(build.VARIABLES)


# ---- neff.json ---------------------------------------------------------------------------------


def test_missing_neff_json_is_refused():
    error = refused(graph=None)
    assert error.member == "neff.json"
    assert (error.expected, error.found) == ("a member of this name", "none")
    assert error.offset == 1024


def test_compressed_archive_places_the_fault_in_the_inflated_stream():
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(build.sound(graph={"nodes": []}, compressed=True))
    assert caught.value.member == "neff.json"
    # kelf-0.json before it: header and content, one block each; then its own header.
    assert (caught.value.offset, caught.value.inflated_offset) == (1024, 3 * 512)
    assert "at inflated offset 1536 of the payload" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        ("nodes", [], "one node with func_name `__kelf`"),
        ("nodes.1.attrs.func_name", "other", "one node with func_name `__kelf`"),
        ("nodes.0.attrs", {"func_name": "__kelf"}, "one node with func_name `__kelf`"),
        ("arg_nodes", [0, 5], "arg_nodes to be nodes of op `null`"),
        ("arg_nodes", [1], "arg_nodes to be nodes of op `null`"),
        ("arg_nodes", [0, 0], "every input name once"),
        ("nodes.1.output_names", [], "at least one output"),
        ("nodes.1.output_names", ["y", "z"], "a shape and a dltype for every tensor"),
        ("node_row_ptr", [0], "a shape and a dltype for every tensor"),
        ("node_row_ptr", [0, 2**64 - 1, 2], "a shape and a dltype for every tensor"),
        ("attrs.shape.1", [[2, 3]], "a shape and a dltype for every tensor"),
        ("attrs.dltype.1", ["float32"], "a shape and a dltype for every tensor"),
        ("attrs.shape.1.0", [-1, 3], "the JSON of a NEFF graph"),
        ("attrs.shape.1.0", [2**64, 3], "the JSON of a NEFF graph"),
        ("attrs.shape.1.0", [2.5], "the JSON of a NEFF graph"),
        ("attrs.shape", "text", "the JSON of a NEFF graph"),
        ("attrs.shape", None, "the JSON of a NEFF graph"),
        ("nodes.1.output_names", 7, "the JSON of a NEFF graph"),
        ("node_row_ptr", None, "the JSON of a NEFF graph"),
    ],
)
def test_graph_without_a_readable_signature_is_refused(path, new, expected):
    error = refused(graph=changed(GRAPH, path, new))
    assert error.member == "neff.json"
    assert error.expected == expected


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff\xfe", b'{"nodes": [}', b"[" * 100_000, b'"' + b"x" * 10_000]
)
def test_text_that_is_not_the_json_is_refused(text):
    archive = build.tar({**build.members(), "neff.json": text})
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(build.container(archive))
    assert caught.value.member == "neff.json"
    assert caught.value.expected == "the JSON of a NEFF graph"
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("path", "new", "warning"),
    [
        ("attrs.storage_id.1", [0], "neff.json: length of storage_id: expected 2, found 1"),
        ("attrs.shape.1", [[2, 3], [4], [5]], "neff.json: length of shape: expected 2, found 3"),
        ("attrs.dltype.1", ["float32", "bfloat16", "a"], "neff.json: length of dltype"),
        ("node_row_ptr", [0, 1, 3], "neff.json: last node_row_ptr: expected 2, found 3"),
        ("nodes.1.attrs.num_inputs", "2", "neff.json: num_inputs: expected 1, found 2"),
        ("nodes.1.attrs.num_outputs", "2", "neff.json: num_outputs: expected 1, found 2"),
        ("nodes.1.inputs", [], "neff.json: the inputs of the `__kelf` node are not the arg_nodes"),
        ("heads", [], "neff.json: heads are not the outputs of the `__kelf` node"),
        (
            "metadata.signatures.default.inputs.x.dtype",
            "int32",
            'neff.json: metadata does not repeat input "x" as float32 [2, 3]',
        ),
    ],
)
def test_field_that_only_repeats_another_is_a_warning(path, new, warning):
    neff = parse(graph=changed(GRAPH, path, new))
    assert len(neff.warnings) == 1
    assert neff.warnings[0].startswith(warning)


def test_outputs_of_two_cores_are_listed_once():
    outputs = [("y", "bfloat16", [4]), ("z", "int32", [])]
    variables = {
        **build.VARIABLES,
        "z": {"type": "output", "var_id": 3, "size": 4, "ops": []},
    }
    files = build.members(
        kelf=build.kelf(2),
        graph=build.graph(build.INPUTS, outputs, cores=2),
        definition=build.definition(variables, neff_features=["neff_feature_vnc"]),
    )
    files |= {name.replace("sg00", "sg01"): data for name, data in files.items() if "sg00" in name}
    data = build.container(build.tar(files), lnc_size=2, feature_bits=1 << 10, neff_version_major=2)
    neff = _core.Neff.parse(data)
    assert [(t.name, t.dtype, t.shape) for t in neff.outputs] == [
        ("y", "bfloat16", (4,)),
        ("z", "int32", ()),
    ]
    assert neff.warnings == []
    assert _core.Neff.parse(build.with_field(data, "lnc_size", 1)).warnings == [
        "lnc_size is 1, the number of subgraphs is 2",
        "feature bit 0x400 is set although it is not true that lnc_size is 2",
    ]


def test_output_listed_twice_with_different_shapes_is_refused():
    graph = build.graph(build.INPUTS, build.OUTPUTS, cores=2)
    error = refused(graph=changed(graph, "attrs.shape.1.2", [5]))
    assert error.expected == 'every listing of output "y" to be bfloat16 [4]'
    assert error.found == "bfloat16 [5]"


def test_unknown_dtype_is_passed_on_with_a_warning():
    graph = build.graph([("x", "float8e4", [24])], build.OUTPUTS)
    neff = parse(graph=graph)
    assert neff.inputs[0].dtype == "float8e4"
    assert neff.warnings == ['"x" has the unknown dtype "float8e4"; its size is not checked']


# ---- kelf-0.json and info.json -----------------------------------------------------------------


def test_kelf_under_another_name_is_read():
    files = build.members(graph=changed(GRAPH, "nodes.1.attrs.kelf", "kelf-a.json"))
    files["kelf-a.json"] = files.pop("kelf-0.json")
    assert _core.Neff.parse(build.container(build.tar(files))).target == "none"


def test_metadata_under_unusual_names_is_read_out_of_a_compressed_archive():
    files = build.members(
        graph=changed(GRAPH, "nodes.1.attrs.kelf", "parts/list"),
        kelf=build.kelf(graphs=[{"definition": "sg00/program", "name": "sg00"}]),
    )
    files["parts/list"] = files.pop("kelf-0.json")
    files["sg00/program"] = files.pop("sg00/def.json")
    neff = _core.Neff.parse(build.container(gzip.compress(build.tar(files))))
    assert (neff.target, neff.warnings) == ("none", [])


def test_kelf_that_is_not_in_the_archive_is_refused():
    error = refused(graph=changed(GRAPH, "nodes.1.attrs.kelf", "kelf-1.json"))
    assert (error.member, error.found) == ("kelf-1.json", "none")


@pytest.mark.parametrize(
    ("kelf", "expected"),
    [
        ({"target": "none"}, "the JSON of a NEFF's subgraph list"),
        (build.kelf(0), "1 to 64 subgraphs"),
        (build.kelf(65), "1 to 64 subgraphs"),
        (build.kelf(graphs=build.kelf()["graphs"] * 2), "every subgraph definition once"),
    ],
)
def test_bad_subgraph_list_is_refused(kelf, expected):
    error = refused(kelf=kelf)
    assert (error.member, error.expected) == ("kelf-0.json", expected)


def test_missing_definition_is_refused():
    assert refused(kelf=build.kelf(2)).member == "sg01/def.json"


def test_missing_target_is_a_warning():
    neff = parse(kelf=build.kelf(target=""))
    assert (neff.target, neff.warnings) == ("", ["kelf-0.json names no target"])


def test_missing_info_is_a_warning():
    neff = parse(info=None)
    assert neff.compiler_version == ""
    assert neff.warnings == ["there is no info.json: the compiler's version is unknown"]


def test_info_that_differs_from_the_header_is_a_warning():
    neff = parse(info=build.info(name="x", num_tpb=2, num_tpb_requested=None, tool_version=""))
    assert neff.warnings == [
        'header says name "test.neff", info.json says "x"',
        "header says num_tpb 1, info.json says 2",
        "header says requested_tpb_count 1, info.json says nothing",
        "info.json names no tool_version",
    ]


def test_info_that_is_not_json_is_refused():
    assert refused(info=[1]).member == "info.json"


# ---- def.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", list(build.ENGINES) + [f"{key}_instr" for key in build.ENGINES])
def test_engine_without_its_files_is_refused(key):
    error = refused(definition=changed(DEFINITION, key, None))
    assert (error.member, error.expected) == ("sg00/def.json", f'a file name under "{key}"')
    error = refused(definition=changed(DEFINITION, key, "gone"))
    assert error.expected == f'the file of "{key}", "gone", beside the definition'
    # A path that climbs is not resolved, it is simply no member.
    assert refused(definition=changed(DEFINITION, key, "../sg00/PE.json")).found == "no such member"


def test_engine_files_are_looked_up_by_the_names_in_the_definition():
    files = build.members(definition=changed(DEFINITION, "pe_instr", "PE0.bin"))
    files["sg00/PE0.bin"] = files.pop("sg00/PE.bin")
    assert _core.Neff.parse(build.container(build.tar(files))).warnings == []


def test_engine_code_of_a_broken_size_is_a_warning():
    files = {**build.members(), "sg00/PE.bin": bytes(65)}
    neff = _core.Neff.parse(build.container(build.tar(files)))
    assert neff.warnings == ["sg00/PE.bin has 65 bytes, not whole instructions of 64"]


@pytest.mark.parametrize(
    ("ids", "found"),
    [((0, 1, 1), "1"), ((0, 1, 3), "3"), ((1, 2, 3), "3"), ((0, 1, 2**64 - 1), str(2**64 - 1))],
)
def test_variable_ids_that_are_not_dense_are_refused(ids, found):
    variables = copy.deepcopy(build.VARIABLES)
    for variable, number in zip(variables.values(), ids, strict=True):
        variable["var_id"] = number
    error = refused(definition=build.definition(variables))
    assert error.expected == "each var_id of 0 to 2 once"
    assert error.found.startswith(f"{found} (variable ")


@pytest.mark.parametrize("value", [-1, "1", 1.5, None])
def test_variable_id_that_is_no_number_is_refused(value):
    error = refused(definition=changed(DEFINITION, "var.x.var_id", value))
    assert error.expected == "the JSON of a subgraph definition"


@pytest.mark.parametrize("name", ["x", "y"])
def test_tensor_without_its_variable_is_refused(name):
    kind = {"x": "input", "y": "output"}[name]
    expected = f'an {kind} variable "{name}", as neff.json says'
    others = [key for key in build.VARIABLES if key != name]
    variables = {key: {**build.VARIABLES[key], "var_id": i} for i, key in enumerate(others)}
    assert refused(definition=build.definition(variables)).expected == expected
    error = refused(definition=changed(DEFINITION, f"var.{name}.type", "tmp-buf"))
    assert error.expected == expected


@pytest.mark.parametrize("size", [0, 23, 25, 48, None])
def test_tensor_of_another_size_is_refused(size):
    error = refused(definition=changed(DEFINITION, "var.x.size", size))
    assert error.expected == '24 bytes for input "x" (float32 [2, 3])'
    assert error.found == ("no size" if size is None else str(size))


def test_shape_whose_size_overflows_is_refused():
    graph = build.graph([("x", "float32", [2**33, 2**33])], build.OUTPUTS)
    error = refused(graph=graph)
    assert error.expected == 'a shape of "x" that fits 64 bits'


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [
        ("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1),
        ("float8_e5m2", 1), ("int64", 8), ("int32", 4), ("int16", 2), ("int8", 1), ("uint64", 8),
        ("uint32", 4), ("uint16", 2), ("uint8", 1), ("bool", 1), ("complex64", 8),
    ],
)  # fmt: skip
def test_item_sizes(dtype, item_bytes):
    graph = build.graph([("x", dtype, [3])], build.OUTPUTS)
    for size in range(26):
        definition = changed(DEFINITION, "var.x.size", size)
        if size == 3 * item_bytes:
            assert parse(graph=graph, definition=definition).warnings == []
        else:
            refused(graph=graph, definition=definition)


def numpy_file(data: bytes, version: int = 1) -> bytes:
    """A numpy file by numpy's documented layout."""
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % len(data)
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def with_constant(name: str, size: int, content: bytes | None) -> dict:
    variables = {
        **build.VARIABLES,
        "c": {"type": "file", "var_id": 3, "size": size, "file_name": name, "ops": []},
    }
    extra = b"" if content is None else build.record(f"sg00/{name}".encode(), content)
    return {"definition": build.definition(variables), "extra_records": extra}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_numpy_constant_of_the_right_size_is_accepted(version):
    parts = with_constant("c.npy", 16, numpy_file(bytes(16), version))
    extra = parts.pop("extra_records")
    assert _core.Neff.parse(build.sound(extra, **parts)).warnings == []
    assert _core.Neff.parse(build.sound(extra, compressed=True, **parts)).warnings == []


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (numpy_file(bytes(15)), "15 bytes"),
        (numpy_file(bytes(17)), "17 bytes"),
        (numpy_file(bytes(16))[:20], "no numpy header"),
        (b"\x93NUMPY\x04\0" + bytes(100), "no numpy header"),
        (b"NUMPY" + bytes(100), "no numpy header"),
        (b"", "no numpy header"),
    ],
)
def test_numpy_constant_of_another_size_is_refused(content, found):
    parts = with_constant("c.npy", 16, content)
    error = refused(parts.pop("extra_records"), **parts)
    assert error.member == "sg00/c.npy"
    assert error.expected == 'a numpy file with 16 bytes of data, as variable "c" says'
    assert error.found == found


def test_raw_constant_of_another_size_is_a_warning():
    parts = with_constant("c.bin", 16, bytes(15))
    neff = _core.Neff.parse(build.sound(parts.pop("extra_records"), **parts))
    assert neff.warnings == ['sg00/c.bin has 15 bytes, its variable "c" has 16']


def test_missing_constant_is_refused():
    parts = with_constant("c.npy", 16, None)
    error = refused(parts.pop("extra_records"), **parts)
    assert error.expected == 'a size and the file "c.npy" for variable "c"'


def test_feature_bits_that_the_last_subgraph_asks_for():
    variables = {**build.VARIABLES, "DGETable0": {"type": "dge-table", "var_id": 3, "list": [1]}}
    definition = build.definition(variables, dma_queue={"qSPDynamicHW": {"type": "dynamic"}})
    assert parse(definition=definition).warnings == [
        "feature bit 0x1000 is clear although it is true that the last subgraph has a DGE table",
        "feature bit 0x200000 is clear although it is true that the last subgraph has a dynamic "
        "hardware queue",
    ]


# ---- bounds ------------------------------------------------------------------------------------


def test_metadata_beyond_64_mebibytes_is_refused_without_being_kept():
    padding = json.dumps(GRAPH).encode().ljust((64 << 20) + 1)
    archive = build.tar({**build.members(), "neff.json": padding})
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(build.container(archive))
    assert "beyond the reader's limits, bytes of metadata" in str(caught.value)
    assert caught.value.found == f'{(64 << 20) + 1} bytes in "neff.json"'


def test_texts_out_of_the_file_are_cut_in_messages_and_warnings():
    long_name = "n" * 5000
    error = refused(graph=changed(GRAPH, "nodes.1.attrs.kelf", long_name))
    assert len(str(error)) < 1000
    assert error.member == "n" * 400 + "..."
    assert len(parse(info=build.info(name=long_name)).warnings[0]) == 403


def test_warnings_are_counted_beyond_the_first_hundred():
    constants = {
        f"c{i}": {"type": "file", "var_id": 3 + i, "size": 1, "file_name": "PE.json", "ops": []}
        for i in range(150)
    }
    neff = parse(definition=build.definition({**build.VARIABLES, **constants}))
    assert len(neff.warnings) == 101
    assert neff.warnings[-1] == "50 more warnings"
