"""Publish, look up, list, remove: what one process sees."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

from tests.store.places import files_below, key_of, path_of
from vllm_neuron import _core
from vllm_neuron.errors import StoreCorruptError, StoreError

GOLDEN = Path(__file__).parents[1] / "golden" / "entries"
SECTIONS = {"record": b'{"model": "tiny"}', "neff": bytes(range(256)) * 100, "log": b""}


def test_published_entry_is_found(store, root):
    assert store.get("neff", key_of(1)) is None
    assert store.put("neff", key_of(1), SECTIONS) is True
    entry = store.get("neff", key_of(1))
    assert (entry.kind, entry.key, entry.path) == ("neff", key_of(1), str(path_of(root, 1)))
    assert entry.sections == {"record": 17, "neff": 25600, "log": 0}
    assert {name: bytes(entry.section(name)) for name in entry.sections} == SECTIONS
    assert entry.size_bytes == path_of(root, 1).stat().st_size == 4096 * (1 + 1 + 7)
    assert store.take_problems() == []
    expected = {"hits": 1, "misses": 1, "published": 1}
    assert store.counters() == dict.fromkeys(store.counters(), 0) | expected


def test_root_is_absolute_and_made_late(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = _core.Store("caches/neuron")
    assert store.root == str(tmp_path / "caches" / "neuron")
    assert store.get("trace", key_of(1)) is None
    assert store.entries() == []
    assert store.remove("trace", key_of(1)) is False
    assert not (tmp_path / "caches").exists()
    monkeypatch.chdir("/")
    store.put("trace", key_of(1), SECTIONS)
    assert path_of(tmp_path / "caches" / "neuron", 1).exists()


def test_modes_keep_others_out(store, root):
    old = os.umask(0)
    try:
        store.put("trace", key_of(1), SECTIONS)
        with store.lock(key_of(2)):
            modes = {
                str(path.relative_to(root)): stat.filemode(path.stat().st_mode)
                for path in [root, *root.rglob("*")]
            }
    finally:
        os.umask(old)
    first, second = key_of(1), key_of(2)
    assert modes == {
        ".": "drwx------",
        "v1": "drwx------",
        f"v1/{first[:2]}": "drwx------",
        f"v1/{first[:2]}/{first}": "-r--------",
        "v1/locks": "drwx------",
        f"v1/locks/{second[:2]}": "drwx------",
        f"v1/locks/{second[:2]}/{second}": "-rw-------",
    }


def test_second_publication_changes_nothing(store, root):
    assert store.put("neff", key_of(1), SECTIONS) is True
    before = path_of(root, 1).stat()
    assert store.put("neff", key_of(1), {"neff": b"other"}) is False
    assert path_of(root, 1).stat() == before
    assert store.counters()["existed"] == 1
    assert files_below(root) == [path_of(root, 1)]


def test_sections_are_read_only_pages_of_the_file(store):
    store.put("neff", key_of(1), {"neff": bytes(range(256)) * 400})
    view = store.get("neff", key_of(1)).section("neff")
    assert view.readonly
    assert (view.format, view.itemsize, view.nbytes) == ("B", 1, 102400)
    with pytest.raises(TypeError):
        view[0] = 1
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    assert address % 4096 == 0
    maps = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
    ]
    assert maps[0].endswith(key_of(1))
    assert maps[0].split()[1] == "r--s"


def test_short_entries_are_read_instead_of_mapped(store, root):
    content = bytes(range(256)) * 16
    store.put("neff", key_of(1), {"neff": content})
    view = store.get("neff", key_of(1)).section("neff")
    assert bytes(view) == content
    assert view.readonly
    assert np.frombuffer(view, dtype=np.uint8).ctypes.data % 4096 == 0
    assert str(path_of(root, 1)) not in Path("/proc/self/maps").read_text()


def test_held_bytes_outlive_entry_and_file(store, root):
    store.put("neff", key_of(1), SECTIONS)
    view = store.get("neff", key_of(1)).section("neff")
    assert store.remove("neff", key_of(1)) is True
    store.put("neff", key_of(1), {"neff": b"other"})
    shutil.rmtree(root)
    assert bytes(view) == SECTIONS["neff"]


def test_absent_section_is_named(store):
    store.put("neff", key_of(1), SECTIONS)
    with pytest.raises(KeyError, match='has no section "module", only'):
        store.get("neff", key_of(1)).section("module")


def test_key_finds_one_kind(store, root):
    store.put("lowering", key_of(1), SECTIONS)
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    assert type(problem.error) is StoreError
    reason = f"{path_of(root, 1)}: expected an entry of kind neff, found one of kind lowering"
    assert (problem.path, problem.reason) == (str(path_of(root, 1)), reason)
    for change in (store.put, lambda *args: store.remove(*args[:2])):
        with pytest.raises(StoreError, match="found one of kind lowering"):
            change("neff", key_of(1), SECTIONS)
    assert store.get("lowering", key_of(1)) is not None
    assert store.counters()["other_kind"] == 1


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        ("hlo", key_of(1), r"expected a kind \(trace, lowering or neff\), found \"hlo\""),
        ("neff", key_of(1)[1:], "expected 64 lower-case hex digits"),
        ("neff", key_of(1).upper(), "expected 64 lower-case hex digits"),
        ("neff", "../" + key_of(1)[3:], "expected 64 lower-case hex digits"),
    ],
)
def test_misuse_is_refused(store, kind, key, message):
    calls = [
        lambda: store.get(kind, key),
        lambda: store.put(kind, key, SECTIONS),
        lambda: store.remove(kind, key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "expected 1 to 64 sections, found 0"),
        ({str(i): b"" for i in range(65)}, "expected 1 to 64 sections, found 65"),
        ({"a b": b""}, 'section name "a b": expected 1 to 16 printable ASCII characters'),
        ({"seventeen-letters": b""}, "expected 1 to 16 printable ASCII characters"),
    ],
)
def test_sections_that_cannot_be_stored_are_refused(store, root, sections, message):
    with pytest.raises(ValueError, match=message):
        store.put("neff", key_of(1), sections)
    assert not root.exists()


def test_any_contiguous_buffer_is_taken(store):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    buffers = {"bytearray": bytearray(b"ab"), "array": array, "view": memoryview(b"abcd")[1:3]}
    store.put("neff", key_of(1), buffers)
    entry = store.get("neff", key_of(1))
    assert bytes(entry.section("bytearray")) == b"ab"
    assert bytes(entry.section("array")) == array.tobytes()
    assert bytes(entry.section("view")) == b"bc"
    with pytest.raises(BufferError):
        store.put("neff", key_of(2), {"strided": memoryview(b"abcd")[::2]})


def test_listing_reads_headers(store, root):
    for number, kind in enumerate(("trace", "lowering", "neff")):
        store.put(kind, key_of(number), SECTIONS)
    (root / "v1" / "notes").mkdir()
    (root / "v1" / key_of(0)[:2] / ".1.tmp").write_bytes(b"half an entry")
    path_of(root, 2).chmod(0o600)
    with path_of(root, 2).open("r+b") as file:
        file.seek(40)
        file.write(b"X")
    found = {info.key: info for info in store.entries()}
    assert set(found) == {key_of(0), key_of(1)}
    info = found[key_of(1)]
    assert (info.kind, info.path, info.size_bytes) == ("lowering", str(path_of(root, 1)), 9 * 4096)
    assert info.sections == {"record": 17, "neff": 25600, "log": 0}
    assert info.modified_s == pytest.approx(path_of(root, 1).stat().st_mtime)
    (problem,) = store.take_problems()
    assert type(problem.error) is StoreCorruptError
    # A listing changes nothing.
    assert path_of(root, 2).exists()


def test_golden_entries_are_read_and_written_byte_for_byte(store, root):
    for kind in ("trace", "lowering", "neff"):
        golden = (GOLDEN / f"v1-{kind}.entry").read_bytes()
        key = golden[32:64].hex()
        path = root / "v1" / key[:2] / key
        path.parent.mkdir(parents=True, exist_ok=True)
        for directory in (root, root / "v1", path.parent):
            directory.chmod(0o700)
        path.write_bytes(golden)
        path.chmod(0o400)
        entry = store.get(kind, key)
        sections = {name: bytes(entry.section(name)) for name in entry.sections}
        assert store.remove(kind, key)
        assert store.put(kind, key, sections)
        assert path.read_bytes() == golden


def test_removed_root_is_made_again(store, root):
    store.put("neff", key_of(1), SECTIONS)
    shutil.rmtree(root)
    assert store.get("neff", key_of(1)) is None
    assert _core.Store(str(root)).put("neff", key_of(1), SECTIONS)
    assert store.get("neff", key_of(1)) is not None
    shutil.rmtree(root)
    assert store.put("neff", key_of(2), SECTIONS) is True
    assert path_of(root, 2).exists()


def test_store_survives_somebody_who_wipes_it(store, root):
    """`rm -rf root/*` in a loop while four threads publish, look up and lock."""
    done = threading.Event()
    content = os.urandom(100_000)

    def wipe():
        count = 0
        while not done.is_set():
            for child in root.glob("*"):
                shutil.rmtree(child, ignore_errors=True)
            count += 1
        return count

    def use(first):
        found = []
        for number in range(first, first + 60):
            with store.lock(key_of(number)):
                store.put("neff", key_of(number), {"neff": content})
            entry = store.get("neff", key_of(number))
            if entry is not None:
                found.append(bytes(entry.section("neff")) == content)
        return found

    with ThreadPoolExecutor() as pool:
        wiper = pool.submit(wipe)
        users = [pool.submit(use, 1000 * i) for i in range(4)]
        wait(users)
        done.set()
        assert all(all(user.result()) for user in users)
        assert wiper.result() > 10
    assert store.counters()["corrupt"] == 0
    assert store.put("neff", key_of(1), SECTIONS) is True
    assert store.get("neff", key_of(1)) is not None


def test_threads_share_a_store(store):
    def use(_):
        for number in range(50):
            content = key_of(number).encode() * 100
            store.put("neff", key_of(number), {"neff": content})
            assert bytes(store.get("neff", key_of(number)).section("neff")) == content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(8))) == [None] * 8
    counters = store.counters()
    assert (counters["published"], counters["existed"]) == (50, 350)


def test_exceptions_are_picklable(store, root):
    store.put("neff", key_of(1), SECTIONS)
    path_of(root, 1).chmod(0o600)
    os.truncate(path_of(root, 1), 100)
    assert store.get("neff", key_of(1)) is None
    error = pickle.loads(pickle.dumps(store.take_problems()[0].error))
    assert type(error) is StoreCorruptError
    assert (error.path, error.offset) == (str(path_of(root, 1)), 0)
    assert (error.expected, error.found) == ("at least 4096", "100")
    text = "length of the file at offset 0: expected at least 4096, found 100"
    assert str(error) == f"{path_of(root, 1)}: {text}"
