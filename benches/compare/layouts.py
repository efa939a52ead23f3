"""Stores to compare with: the file layouts of other compile caches, and general-purpose stores.

The layouts are written after their descriptions, small enough to read: what is compared is the
protocol (files touched, copies, locks, synchronisation), not the code around it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import diskcache
import lmdb


class Layout(Protocol):
    """A store of bytes below one folder."""

    def put(self, key: str, value: bytes) -> None:
        """Keep a value."""

    def get(self, key: str) -> object:
        """Return the value, or None."""


class Inductor:
    """FxGraphCache of torch: a folder per key, a file per artifact named by its digest.

    Written to a temporary name and renamed, without synchronisation; read whole into memory.
    """

    def __init__(self, folder: Path, *, is_synced: bool = False) -> None:
        self.folder, self.is_synced = folder, is_synced

    def put(self, key: str, value: bytes) -> None:
        folder = self.folder / key[1:3] / key
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{os.getpid()}.tmp"
        with temporary.open("wb") as file:
            file.write(value)
            if self.is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(folder / hashlib.sha256(value).hexdigest()[:52])
        if self.is_synced:
            sync_folder(folder)

    def get(self, key: str) -> bytes | None:
        folder = self.folder / key[1:3] / key
        if not folder.exists():
            return None
        for path in sorted(folder.iterdir()):
            if not path.name.startswith("."):
                return path.read_bytes()
        return None


class Neuronxla:
    """The cache of libneuronxla: a folder per module, `model.neff` and a `model.done` sentinel.

    One lock file is taken around each look and each write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def put(self, key: str, value: bytes) -> None:
        module = self.folder / f"MODULE_{key}"
        with self._locked():
            module.mkdir(exist_ok=True)
            (module / "model.neff").write_bytes(value)
            (module / "model.done").touch()

    def get(self, key: str) -> bytes | None:
        module = self.folder / f"MODULE_{key}"
        with self._locked():
            is_done = (module / "model.done").exists()
        if not is_done:
            return None
        with self._locked():
            return (module / "model.neff").read_bytes()


class JaxLru:
    """JAX's LRU cache: `<key>-cache` beside `<key>-atime`, under one lock, written in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lockfile").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _touch(self, key: str) -> None:
        now = time.time_ns().to_bytes(8, "little")
        (self.folder / f"{key}-atime").write_bytes(now)

    def put(self, key: str, value: bytes) -> None:
        with self._locked():
            path = self.folder / f"{key}-cache"
            if not path.exists():
                path.write_bytes(value)
                self._touch(key)

    def get(self, key: str) -> bytes | None:
        with self._locked():
            path = self.folder / f"{key}-cache"
            if not path.exists():
                return None
            value = path.read_bytes()
            self._touch(key)
            return value


class Lmdb:
    """LMDB, values as pages of its map, durable."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = lmdb.open(str(folder), map_size=4 << 30, max_readers=512)

    def put(self, key: str, value: bytes) -> None:
        with self.environment.begin(write=True) as transaction:
            transaction.put(key.encode(), value)

    def get(self, key: str) -> int | None:
        with self.environment.begin(buffers=True) as transaction:
            value = transaction.get(key.encode())
            return None if value is None else len(value)


class Sqlite:
    """SQLite in WAL mode, one table of blobs, durable at checkpoints."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(folder / "db", isolation_level=None)
        self.connection.execute("pragma journal_mode=wal")
        self.connection.execute("pragma synchronous=normal")
        self.connection.execute("create table kept(key text primary key, value blob) without rowid")

    def put(self, key: str, value: bytes) -> None:
        self.connection.execute("insert or replace into kept values(?, ?)", (key, value))

    def get(self, key: str) -> bytes | None:
        query = "select value from kept where key = ?"
        row = self.connection.execute(query, (key,)).fetchone()
        return row and row[0]


class Diskcache:
    """The diskcache package: an SQLite index and a file per large value."""

    def __init__(self, folder: Path) -> None:
        self.cache = diskcache.Cache(str(folder), size_limit=1 << 40, eviction_policy="none")

    def put(self, key: str, value: bytes) -> None:
        self.cache.set(key, value)

    def get(self, key: str) -> object:
        return self.cache.get(key)


class Floor:
    """The least that a durable, mapped store of files does, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: str, value: bytes) -> None:
        folder = self.folder / key[:2]
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        file = os.open(folder / f".{key}", flags, 0o400)
        rest = memoryview(value)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fdatasync(file)
        os.close(file)
        (folder / f".{key}").rename(folder / key)
        sync_folder(folder)

    def get(self, key: str) -> mmap.mmap | None:
        try:
            file = os.open(self.folder / key[:2] / key, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


REFERENCES: dict[str, type[Layout]] = {
    "inductor's layout": Inductor,
    "libneuronxla's layout": Neuronxla,
    "JAX's LRU layout": JaxLru,
    "LMDB": Lmdb,
    "SQLite": Sqlite,
    "diskcache": Diskcache,
}
