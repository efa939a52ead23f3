"""The bindings: buffers, the GIL, exceptions that travel, plain values."""

import json
import mmap
import pickle
import threading
import time

import pytest

from vllm_neuron import _core
from vllm_neuron.errors import (
    NeffChecksumError,
    NeffError,
    NeffFormatError,
    NeffUnsupportedError,
    NeuronError,
)

from . import build

SOUND = build.sound(build.record(b"extra", b"content"))


@pytest.mark.parametrize(
    "buffer",
    [
        SOUND,
        bytearray(SOUND),
        memoryview(SOUND),
        memoryview(b"before" + SOUND)[6:],
        memoryview(SOUND).cast("c"),
    ],
    ids=["bytes", "bytearray", "memoryview", "slice", "cast"],
)
def test_any_contiguous_buffer_is_read(buffer):
    neff = _core.Neff.parse(buffer)
    assert neff.size_bytes == len(SOUND)
    assert neff.member("extra") == b"content"


def test_map_of_a_file_is_read_in_place(tmp_path):
    path = tmp_path / "a.neff"
    path.write_bytes(SOUND)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        neff = _core.Neff.parse(mapped)
        assert neff.member("extra") == b"content"
        # The NEFF holds on to the map: closing it now would pull it from under the reader.
        with pytest.raises(BufferError):
            mapped.close()
        del neff


@pytest.mark.parametrize(
    "view",
    [lambda buffer: buffer, memoryview, lambda buffer: memoryview(buffer).toreadonly()[:]],
    ids=["bytearray", "view", "read-only view"],
)
def test_writable_buffer_is_copied(view):
    buffer = bytearray(SOUND)
    neff = _core.Neff.parse(view(buffer))
    buffer[:] = bytes(len(buffer))
    buffer.clear()
    assert neff.member("extra") == b"content"


def test_strided_buffer_is_refused():
    with pytest.raises(BufferError, match="expected a C-contiguous buffer"):
        _core.Neff.parse(memoryview(SOUND)[::2])


@pytest.mark.parametrize("value", ["text", None, 7, [1, 2]])
def test_what_is_no_buffer_is_a_type_error(value):
    with pytest.raises(TypeError):
        _core.Neff.parse(value)


def test_empty_buffer_is_refused():
    for empty in (b"", bytearray(), memoryview(b"")):
        with pytest.raises(NeffFormatError) as caught:
            _core.Neff.parse(empty)
        assert caught.value.found == "0 bytes"


def test_gil_is_released_while_parsing():
    """Another thread must get on while 48 MiB are hashed."""
    data = build.sound(build.record(b"large", bytes(48 << 20)))
    span = []

    def parse():
        started = time.perf_counter()
        _core.Neff.parse(data)
        span.extend([started, time.perf_counter()])

    thread = threading.Thread(target=parse)
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    started, ended = span
    middle = [tick for tick in ticks if started + 0.01 < tick < ended - 0.01]
    assert ended - started > 0.03
    assert len(middle) >= 3


CASES = [
    (build.with_field(SOUND, "data_size", 1 << 40), NeffFormatError, 16, 2),
    (build.with_field(SOUND, "hash", b"x"), NeffChecksumError, 172, 2),
    (build.with_field(SOUND, "pkg_version", 7), NeffUnsupportedError, 0, 10),
]


@pytest.mark.parametrize(("data", "kind", "offset", "status"), CASES)
def test_exception_has_its_parts_and_survives_pickling(data, kind, offset, status):
    with pytest.raises(kind) as caught:
        _core.Neff.parse(data, path="/a/b.neff")
    copy = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, copy):
        assert type(error) is kind
        assert isinstance(error, NeffError)
        assert isinstance(error, NeuronError)
        assert error.path == "/a/b.neff"
        assert (error.offset, error.status) == (offset, status)
        assert error.inflated_offset is None
        assert error.member is None
        assert str(error) == str(caught.value)
        assert error.expected in str(error)
        assert error.found in str(error)


def test_missing_member_is_an_error_that_names_it():
    neff = _core.Neff.parse(SOUND, path="p")
    with pytest.raises(NeffFormatError) as caught:
        neff.member("absent")
    assert str(caught.value) == (
        'p: NEFF member "absent", at offset 1024: expected a member of this name, found none'
    )


def test_to_dict_is_plain_json():
    neff = _core.Neff.parse(SOUND, path="p")
    description = neff.to_dict()
    assert json.loads(json.dumps(description)) == description
    assert list(description) == [
        "path", "size_bytes", "name", "uuid", "target", "compiler_version", "package_version",
        "neff_version", "feature_bits", "features", "lnc_size", "num_tpb", "requested_tpb_count",
        "digest_order", "compression", "data_size", "inputs", "outputs", "members", "warnings",
    ]  # fmt: skip
    assert description["path"] == "p"
    assert description["inputs"] == [{"name": "x", "dtype": "float32", "shape": [2, 3]}]
    assert description["outputs"] == [{"name": "y", "dtype": "bfloat16", "shape": [4]}]
    assert description["members"][-1] == {"name": "extra", "size_bytes": 7}
    assert description["neff_version"] == "1.0"


def test_tensors_are_values():
    first, second = _core.Neff.parse(SOUND), _core.Neff.parse(SOUND)
    assert first.inputs == second.inputs
    assert first.inputs[0] != first.outputs[0]
    assert len({*first.inputs, *second.inputs}) == 1
    assert repr(first.inputs[0]) == 'NeffTensor(name="x", dtype="float32", shape=(2, 3))'
    assert first.inputs[0].shape == (2, 3)


def test_objects_are_frozen():
    neff = _core.Neff.parse(SOUND)
    with pytest.raises(AttributeError):
        neff.name = "other"
    with pytest.raises(AttributeError):
        neff.inputs[0].name = "other"


def test_arguments_are_keywords():
    with pytest.raises(TypeError):
        _core.Neff.parse(SOUND, "path")
    with pytest.raises(TypeError):
        _core.write_neff("name", "target")
