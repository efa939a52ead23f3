"""Attacks on the directory: what somebody else could have written is not used."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest

from tests.store.places import files_below, key_of, path_of
from tests.store.processes import forked
from vllm_neuron import _core
from vllm_neuron.errors import StoreCorruptError, StoreUntrustedError

SECTIONS = {"record": b"{}", "neff": b"x" * 5000}
#: A user that is neither root nor the one who runs the tests.
STRANGER = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def assert_refused(root: Path, at: Path, reason: str) -> None:
    """Check that a store neither reads nor writes, and says why, wherever the fault is."""
    store = _core.Store(str(root))
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    calls = [
        lambda: store.put("neff", key_of(1), SECTIONS),
        lambda: store.put("neff", key_of(2), SECTIONS),
        lambda: store.lock(key_of(1)).acquire(0),
    ]
    errors = [problem.error]
    for call in calls:
        with pytest.raises(StoreUntrustedError) as caught:
            call()
        errors.append(pickle.loads(pickle.dumps(caught.value)))
    for error in errors:
        assert type(error) is StoreUntrustedError
        assert error.path == str(at)
        assert error.reason.startswith(reason)
    assert store.entries() == []
    assert store.counters()["untrusted"] == 1


@pytest.fixture
def filled(root) -> Path:
    """Return the root of a store with one entry."""
    _core.Store(str(root)).put("neff", key_of(1), SECTIONS)
    return root


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770, 0o1777, 0o722])
def test_root_that_others_can_write_is_refused(filled, mode):
    filled.chmod(mode)
    reason = "the cache directory is writable by group or others (mode "
    assert_refused(filled, filled, f"{reason}{mode:04o})")


def test_root_that_others_can_read_is_used(filled):
    filled.chmod(0o755)
    assert _core.Store(str(filled)).get("neff", key_of(1)) is not None


def test_symlinked_root_is_refused(filled, tmp_path):
    """bugs F01."""
    link = tmp_path / "link"
    link.symlink_to(filled)
    assert_refused(link, link, "the cache directory is a symbolic link")


def test_symlink_above_the_root_is_followed(filled, tmp_path):
    (tmp_path / "absolute").symlink_to(tmp_path)
    (tmp_path / "relative").symlink_to("absolute/../" + tmp_path.name)
    for link in ("absolute", "relative", "relative/absolute/relative"):
        store = _core.Store(str(tmp_path / link / filled.name))
        assert store.get("neff", key_of(1)) is not None


def test_loop_of_symlinks_ends(tmp_path):
    (tmp_path / "loop").symlink_to("loop/loop")
    store = _core.Store(str(tmp_path / "loop" / "store"))
    assert store.get("neff", key_of(1)) is None
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        store.put("neff", key_of(1), SECTIONS)


def test_directory_above_the_root_that_others_can_write_is_refused(filled, tmp_path):
    """bugs F02."""
    tmp_path.chmod(0o777)
    reason = "the directory above the cache directory is writable by others without the sticky bit"
    assert_refused(filled, tmp_path, reason)
    tmp_path.chmod(0o1777)
    assert _core.Store(str(filled)).get("neff", key_of(1)) is not None


def test_directory_above_the_root_may_be_writable_by_an_own_group(filled, tmp_path):
    tmp_path.chmod(0o770)
    assert _core.Store(str(filled)).get("neff", key_of(1)) is not None


@needs_root
def test_directory_above_the_root_that_a_foreign_group_can_write_is_refused(filled, tmp_path):
    os.chown(tmp_path, -1, STRANGER)
    tmp_path.chmod(0o770)
    reason = "the directory above the cache directory is writable by a foreign group"
    assert_refused(filled, tmp_path, reason)


@needs_root
def test_foreign_root_is_refused(filled):
    """bugs F01."""
    os.chown(filled, STRANGER, -1)
    user = f"the cache directory is owned by user {STRANGER}, expected user 0 or root"
    assert_refused(filled, filled, user)


@needs_root
def test_foreign_directory_or_symlink_above_the_root_is_refused(filled, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    assert_refused(link / filled.name, link, f"the symbolic link is owned by user {STRANGER}")
    os.chown(tmp_path, STRANGER, -1)
    reason = f"the directory above the cache directory is owned by user {STRANGER}"
    assert_refused(filled, tmp_path, reason)


@needs_root
def test_entries_of_root_are_used_by_others():
    """An image or a shared disk filled by root; nothing is written to it."""
    root = Path(tempfile.mkdtemp(dir="/tmp")) / "store"
    try:
        root.parent.chmod(0o755)
        _core.Store(str(root)).put("neff", key_of(1), SECTIONS)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o444)

        def read():
            store = _core.Store(str(root))
            entry = store.get("neff", key_of(1))
            assert bytes(entry.section("neff")) == SECTIONS["neff"]
            assert store.get("neff", key_of(2)) is None
            assert store.take_problems() == []

        forked(read, user=STRANGER)
    finally:
        shutil.rmtree(root.parent)


def test_directories_inside_are_checked_too(filled):
    inner = path_of(filled, 1).parent
    reason = "the directory is writable by group or others"
    for directory in (inner, filled / "v1"):
        directory.chmod(0o777)
        store = _core.Store(str(filled))
        assert store.get("neff", key_of(1)) is None
        (problem,) = store.take_problems()
        assert problem.error.path == str(directory)
        assert problem.error.reason.startswith(reason)
        with pytest.raises(StoreUntrustedError, match=reason):
            store.put("neff", key_of(1), SECTIONS)
        directory.chmod(0o700)
    assert _core.Store(str(filled)).get("neff", key_of(1)) is not None


def test_entry_that_others_can_write_is_not_used_and_is_replaced(filled):
    store = _core.Store(str(filled))
    path_of(filled, 1).chmod(0o666)
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    reason = "the entry is writable by group or others (mode 0666)"
    assert (type(problem.error), problem.error.reason) == (StoreUntrustedError, reason)
    assert path_of(filled, 1).exists()
    assert store.put("neff", key_of(1), SECTIONS) is True
    assert stat.S_IMODE(path_of(filled, 1).stat().st_mode) == 0o400


@needs_root
def test_foreign_entry_is_not_used_and_is_replaced(filled):
    store = _core.Store(str(filled))
    os.chown(path_of(filled, 1), STRANGER, -1)
    assert store.get("neff", key_of(1)) is None
    assert f"the entry is owned by user {STRANGER}" in store.take_problems()[0].reason
    assert store.put("neff", key_of(1), SECTIONS) is True
    assert path_of(filled, 1).stat().st_uid == 0


FOUND = {
    "symlink to an entry": "symbolic link",
    "symlink to a secret": "symbolic link",
    "dangling symlink": "symbolic link",
    "directory": "directory",
    "full directory": "directory",
    "fifo": "FIFO",
    "socket": "socket",
}


@pytest.mark.parametrize("what", FOUND)
def test_something_else_in_the_place_of_an_entry(filled, tmp_path, what):
    path, secret = path_of(filled, 1), tmp_path / "secret"
    secret.write_bytes(b"precious")
    copy = tmp_path / "copy"
    shutil.copy(path, copy)
    path.unlink()
    match what:
        case "symlink to an entry":
            path.symlink_to(copy)
        case "symlink to a secret":
            path.symlink_to(secret)
        case "dangling symlink":
            path.symlink_to(tmp_path / "new")
        case "directory":
            path.mkdir()
        case "full directory":
            (path / "inner").mkdir(parents=True)
        case "fifo":
            os.mkfifo(path, 0o600)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
    store = _core.Store(str(filled))
    start_s = time.monotonic()
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    assert type(problem.error) is StoreCorruptError
    assert (problem.error.expected, problem.error.found) == ("regular file", FOUND[what])
    assert store.put("neff", key_of(1), SECTIONS) is True
    assert bytes(store.get("neff", key_of(1)).section("neff")) == SECTIONS["neff"]
    assert time.monotonic() - start_s < 5
    assert secret.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", ["file", "symlink", "fifo"])
def test_something_else_in_the_place_of_a_directory(filled, tmp_path, what):
    inner, elsewhere = path_of(filled, 1).parent, tmp_path / "elsewhere"
    shutil.move(inner, elsewhere)
    {
        "file": lambda: inner.write_bytes(b""),
        "symlink": lambda: inner.symlink_to(elsewhere),
        "fifo": lambda: os.mkfifo(inner),
    }[what]()
    store = _core.Store(str(filled))
    assert store.get("neff", key_of(1)) is None
    (problem,) = store.take_problems()
    assert problem.error.expected == "directory"
    assert store.put("neff", key_of(1), SECTIONS) is True
    assert store.get("neff", key_of(1)) is not None
    assert len(files_below(elsewhere)) == 1


def test_file_in_the_place_of_the_root_or_layout_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store" / "v1").write_bytes(b"")
    for root in ("file", "file/store", "store"):
        store = _core.Store(str(tmp_path / root))
        assert store.get("neff", key_of(1)) is None
        with pytest.raises((StoreCorruptError, StoreUntrustedError, NotADirectoryError)):
            store.put("neff", key_of(1), SECTIONS)


def test_pickle_in_an_entry_is_never_loaded(filled, tmp_path):
    """bugs F04, F05."""
    owned = tmp_path / "owned"

    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(owned),))

    path = path_of(filled, 1)
    path.unlink()
    path.write_bytes(pickle.dumps(Payload()))
    path.chmod(0o600)
    store = _core.Store(str(filled))
    assert store.get("neff", key_of(1)) is None
    store.put(
        "neff", key_of(1), dict.fromkeys(["record", "factors", "neff"], pickle.dumps(Payload()))
    )
    entry = store.get("neff", key_of(1))
    for name in entry.sections:
        bytes(entry.section(name))
    store.entries()
    assert not owned.exists()


def test_the_root_of_the_file_system_is_no_cache():
    store = _core.Store("/")
    assert store.get("neff", key_of(1)) is None
    with pytest.raises(StoreUntrustedError, match="cannot be a cache directory"):
        store.put("neff", key_of(1), SECTIONS)
