"""Bundles: cache entries in one tar file, for a container image or another machine.

docs/how-to-precompile-cache.md, "Bundles". A bundle is an uncompressed tar (POSIX.1-2001) whose
members are entry files, each named by its key; equal caches give equal bundles. Reading one trusts
nothing: only members so named are looked at, each is checked as an entry before it is published,
and its name leads nowhere. Imports neither torch nor vllm.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_neuron import _core
from vllm_neuron.cache.promotion import copy_entries

__all__ = ["Imported", "export_bundle", "import_bundle"]

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class Imported:
    """What an import did, in entries.

    Attributes:
        imported: published.
        existed: there already.
        refused: names of members that are no sound entries, and why.
    """

    imported: int = 0
    existed: int = 0
    refused: list[str] = field(default_factory=list)


def export_bundle(path: Path, entries: Iterable[tuple[_core.Store, _core.EntryInfo]]) -> int:
    """Write entries to a bundle; damaged ones are left out.

    Args:
        path: of the bundle; appears when it is complete, replacing what is there.
        entries: each with the store that it is in.

    Returns:
        How many it holds.
    """
    count = 0
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as bundle:
            for store, info in sorted(entries, key=lambda item: item[1].key):
                # Also holds the file, should somebody remove it meanwhile.
                entry = store.get(info.kind, info.key)
                if entry is None:
                    continue
                member = tarfile.TarInfo(info.key)
                member.mode, member.size = 0o444, entry.size_bytes
                with Path(entry.path).open("rb") as content:
                    bundle.addfile(member, content)
                count += 1
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def import_bundle(path: Path, *, scratch: Path, store_of: Callable[[str], _core.Store]) -> Imported:
    """Publish the entries of a bundle.

    Args:
        path: of the bundle.
        scratch: an existing directory; a private one is made in it and removed again.
        store_of: the store for entries of a kind.

    Raises:
        tarfile.TarError: it is no tar file.
        StoreError, OSError: a store takes no writes.
    """
    done = Imported()
    place = Path(tempfile.mkdtemp(prefix=".import-", dir=scratch))
    try:
        with tarfile.open(path, "r:") as bundle:
            for member in bundle:
                if not _KEY.fullmatch(member.name) or not member.isreg():
                    done.refused.append(f"{member.name!r} is not named as an entry")
                    continue
                _import_member(bundle, member, place, store_of, done)
    finally:
        shutil.rmtree(place)
    return done


def _import_member(
    bundle: tarfile.TarFile,
    member: tarfile.TarInfo,
    place: Path,
    store_of: Callable[[str], _core.Store],
    done: Imported,
) -> None:
    file = place / "v1" / member.name[:2] / member.name
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.parent.parent.chmod(0o700)
    source = bundle.extractfile(member)
    assert source is not None
    with file.open("wb") as target:
        shutil.copyfileobj(source, target)
    file.chmod(0o400)
    store = _core.Store(str(place))
    found = [info for info in store.entries() if info.key == member.name]
    try:
        promotion = copy_entries(store, store_of(found[0].kind), {member.name}) if found else None
    except RuntimeError:
        promotion = None
    if promotion is None:
        done.refused += [problem.reason for problem in store.take_problems()] or [
            f"{member.name} is no sound entry"
        ]
    else:
        done.imported += promotion.promoted
        done.existed += promotion.existed
    file.unlink(missing_ok=True)
