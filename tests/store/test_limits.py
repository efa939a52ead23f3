"""Read-only directories, full disks, other file systems, containers."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.store.places import files_below, key_of, path_of
from tests.store.processes import finish, forked, start
from vllm_neuron import _core
from vllm_neuron.errors import StoreReadOnlyError

SECTIONS = {"record": b"{}", "neff": b"x" * 5000}
STRANGER = 54321
IS_ROOT = os.geteuid() == 0

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can mount and make namespaces")


@contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    """Mount a file system for the body of the `with`."""
    subprocess.run(["mount", *arguments, str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def assert_read_only(root: Path, code: int) -> None:
    """Check that the entry is served and that nothing can be written."""
    store = _core.Store(str(root))
    assert bytes(store.get("neff", key_of(1)).section("neff")) == SECTIONS["neff"]
    assert store.get("neff", key_of(2)) is None
    assert store.take_problems() == []
    calls = [
        lambda: store.put("neff", key_of(2), SECTIONS),
        lambda: store.lock(key_of(2)).acquire(0),
        lambda: store.remove("neff", key_of(1)),
        lambda: store.evict(max_size_bytes=0, min_age_s=0),
    ]
    for call in calls:
        with pytest.raises(StoreReadOnlyError) as caught:
            call()
        assert caught.value.errno == code
        assert caught.value.path.startswith(str(root))
    assert [info.key for info in store.entries()] == [key_of(1)]


@needs_root
def test_read_only_mount_is_read(store, root):
    """bugs D13, E01."""
    store.put("neff", key_of(1), SECTIONS)
    with mounted("--bind", "--options", "ro", str(root), at=root):
        assert_read_only(root, errno.EROFS)
        # A damaged entry stays where it is, and stays a miss.
    path_of(root, 1).chmod(0o600)
    path_of(root, 1).write_bytes(b"damaged")
    with mounted("--bind", "--options", "ro", str(root), at=root):
        reader = _core.Store(str(root))
        assert [reader.get("neff", key_of(1)) for _ in range(2)] == [None, None]
        assert reader.counters()["corrupt"] == 2
        assert reader.counters()["set_aside"] == 0
    assert files_below(root) == [path_of(root, 1)]


def test_directory_without_write_permission_is_read():
    root = Path(tempfile.mkdtemp(dir="/tmp")) / "store"
    user = STRANGER if IS_ROOT else None
    try:
        if IS_ROOT:
            os.chown(root.parent, STRANGER, STRANGER)
        forked(lambda: _core.Store(str(root)).put("neff", key_of(1), SECTIONS), user=user)
        directories = [root, *(path for path in root.rglob("*") if path.is_dir())]
        for directory in directories:
            directory.chmod(0o500)
        forked(lambda: assert_read_only(root, errno.EACCES), user=user)
        for directory in directories:
            directory.chmod(0o700)
    finally:
        shutil.rmtree(root.parent)


def test_root_that_cannot_be_made_is_read_only(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755 if IS_ROOT else 0o500)

        def use():
            store = _core.Store(str(folder / "vllm" / "neuron"))
            assert store.get("neff", key_of(1)) is None
            with pytest.raises(StoreReadOnlyError, match="cannot make a directory"):
                store.put("neff", key_of(1), SECTIONS)

        forked(use, user=STRANGER if IS_ROOT else None)
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


@needs_root
def test_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    """bugs E04."""
    tmp_path.chmod(0o700)
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", at=disk):
        root = disk / "store"
        store = _core.Store(str(root))
        published = 0
        with pytest.raises(OSError, match="cannot reserve space") as caught:
            for number in range(100):
                store.put("neff", key_of(number), {"neff": bytes(200_000)})
                published += 1
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(root / "v1")
        assert published == 5  # of 53 pages each; 256 pages in all
        assert len(files_below(root)) == published
        for number in range(published):
            assert len(store.get("neff", key_of(number)).section("neff")) == 200_000
        store.remove("neff", key_of(0))
        assert store.put("neff", key_of(50), {"neff": bytes(200_000)}) is True


def test_limit_on_file_size_is_an_error_and_leaves_nothing(root):
    def use():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        store = _core.Store(str(root))
        assert store.put("neff", key_of(1), {"neff": bytes(90_000)}) is True
        with pytest.raises(OSError, match="cannot") as caught:
            store.put("neff", key_of(2), {"neff": bytes(110_000)})
        assert caught.value.errno == errno.EFBIG
        assert store.get("neff", key_of(2)) is None

    forked(use)
    assert files_below(root) == [path_of(root, 1)]


def test_running_out_of_descriptors_is_a_counted_miss(store, root):
    store.put("neff", key_of(1), SECTIONS)

    def use():
        # Above every open descriptor, with room for what one read of an entry needs.
        limit = max(int(link.name) for link in Path("/proc/self/fd").iterdir()) + 16
        limit = min(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        taken = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        assert store.get("neff", key_of(1)) is None
        (problem,) = store.take_problems()
        assert problem.error.errno == errno.EMFILE
        with pytest.raises(OSError, match="Too many open files"):
            store.put("neff", key_of(2), SECTIONS)
        for descriptor in taken:
            os.close(descriptor)
        assert store.get("neff", key_of(1)) is not None
        assert store.counters()["errors"] == 1

    forked(use)


def pages_are_mapped(view: memoryview) -> bool:
    """Whether a view is on pages of a file rather than in memory of this process."""
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            return len(line.split()) > 5 and "/" in line.split()[5]
    raise AssertionError("the view is nowhere")


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_local_file_systems_are_mapped(tmp_path, kind):
    tmp_path.chmod(0o700)
    disk, lower, upper, work = (tmp_path / name for name in ("disk", "lower", "upper", "work"))
    for directory in (disk, lower, upper, work):
        directory.mkdir(mode=0o700)
    options = {
        "tmpfs": ("-t", "tmpfs", "-o", "mode=0700", "tmpfs"),
        "overlay": (
            "-t", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", "overlay",
        ),
    }[kind]  # fmt: skip
    with mounted(*options, at=disk):
        store = _core.Store(str(disk / "store"))
        assert store.put("neff", key_of(1), {"neff": b"x" * 100_000}) is True
        view = store.get("neff", key_of(1)).section("neff")
        assert pages_are_mapped(view)
        assert bytes(view) == b"x" * 100_000
        del view


@needs_root
def test_entries_of_a_container_image_are_read_replaced_and_evicted(tmp_path):
    """The lower layer has entries, one of them damaged; nothing that happens changes it."""
    tmp_path.chmod(0o700)
    disk, lower, upper, work = (tmp_path / name for name in ("disk", "lower", "upper", "work"))
    for directory in (disk, lower, upper, work):
        directory.mkdir(mode=0o700)
    image = _core.Store(str(lower / "store"))
    contents = {number: bytes([number]) * 100_000 for number in range(20)}
    for number, content in contents.items():
        image.put("neff", key_of(number), {"neff": content})
    damaged = path_of(lower / "store", 0)
    damaged.chmod(0o600)
    damaged.write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in files_below(lower)}
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    with mounted("-t", "overlay", "-o", layers, "overlay", at=disk):
        store = _core.Store(str(disk / "store"))
        held = {}
        for number, content in contents.items():
            entry = store.get("neff", key_of(number))
            assert (entry is None) == (number == 0)
            if entry is None:
                assert store.put("neff", key_of(number), {"neff": content}) is True
                entry = store.get("neff", key_of(number))
            held[number] = entry.section("neff")
            del entry
        assert store.counters()["corrupt"] == store.counters()["published"] == 1
        assert store.put("neff", key_of(1), {"neff": b"equal keys, equal work"}) is False
        assert len(store.evict(max_size_bytes=0, min_age_s=0).removed) == 20
        assert store.entries() == []
        assert all(held[number] == content for number, content in contents.items())
        assert store.put("neff", key_of(1), {"neff": b"again"}) is True
        assert _core.Store(str(disk / "store")).get("neff", key_of(1)).section("neff") == b"again"
        held.clear()
    assert {path: path.read_bytes() for path in files_below(lower)} == before


@needs_root
def test_containers_with_equal_process_ids_share_a_store(root):
    """Two PID namespaces, both processes are number 1: they never hold one lock at a time."""
    work = """
store = _core.Store(sys.argv[1])
assert os.getpid() == 1
for number in range(20):
    key = "%064x" % number
    with store.lock(key, note=sys.argv[2]):
        inside = os.open(sys.argv[1] + key, os.O_CREAT | os.O_EXCL)
        entry = store.get("neff", key)
        if entry is None:
            store.put("neff", key, {"record": sys.argv[2].encode(), "neff": bytes(50000)})
        os.close(inside)
        os.unlink(sys.argv[1] + key)
print(store.counters()["published"])
"""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    children = [start(work, root, name, prefix=unshare) for name in ("a", "b")]
    published = [int(finish(child)) for child in children]
    assert sum(published) == 20
    assert len(_core.Store(str(root)).entries()) == 20
