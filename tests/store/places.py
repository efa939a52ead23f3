"""Keys by number, and where their files are (docs/entry-format.md, "Directory")."""

from __future__ import annotations

import hashlib
from pathlib import Path


def key_of(number: int) -> str:
    """Return the key with a number."""
    return hashlib.sha256(number.to_bytes(8, "little")).hexdigest()


def path_of(root: Path, number: int) -> Path:
    """Return the file of the entry of a key with a number."""
    name = key_of(number)
    return root / "v1" / name[:2] / name


def lock_of(root: Path, number: int) -> Path:
    """Return the lock file of a key with a number."""
    name = key_of(number)
    return root / "v1" / "locks" / name[:2] / name


def files_below(root: Path) -> list[Path]:
    """Return everything below a directory that is not a directory, sorted."""
    return sorted(path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
