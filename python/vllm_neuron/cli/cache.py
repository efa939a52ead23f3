"""`vllm-neuron cache`: look at the compile caches.

Reads entries as data: nothing in them is evaluated, and text out of them is printed with its
control characters escaped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vllm_neuron import _core, envs
from vllm_neuron.errors import ConfigurationError

__all__ = ["cache"]

#: Names in an entry's record or factors that a listing shows.
_DESCRIPTION = ("model", "bucket", "route")
#: Sections that may have them; the first one wins. Source: docs/entry-format.md, "Sections".
_DESCRIBING_SECTIONS = ("record", "factors")
_COLUMNS = ("KIND", "KEY", "SIZE", "AGE", "MODEL", "BUCKET", "ROUTE")
#: Digits of a key that a table shows: those of `Key.short`.
_KEY_DIGITS = 32


@click.group()
def cache() -> None:
    """Look at the Precompile Cache and the compilation cache."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Root of the caches instead of $VLLM_CACHE_ROOT (default ~/.cache/vllm).",
)
def ls(*, as_json: bool, root: Path | None) -> None:
    """List the entries of both caches, newest first.

    Files that are not sound entries are named on standard error; to the server they are misses.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for directory in _directories(root):
        store = _core.Store(str(directory))
        rows.extend(_describe(store, info) for info in store.entries())
        problems.extend(problem.reason for problem in store.take_problems())
    rows.sort(key=lambda row: (-row["modified_s"], row["key"]))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    for problem in problems:
        click.echo(_printable(problem), err=True)


def _directories(root: Path | None) -> Sequence[Path]:
    if root is not None:
        return (root / "neuron" / "precompile", root / "neuron" / "compile_cache")
    try:
        settings = envs.read_settings()
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    return (settings.precompile_directory, settings.compile_cache_directory)


def _describe(store: _core.Store, info: _core.EntryInfo) -> dict[str, Any]:
    """Return what is known of an entry as JSON-able values; None for what it does not say."""
    row: dict[str, Any] = {
        "kind": info.kind,
        "key": info.key,
        "path": info.path,
        "size_bytes": info.size_bytes,
        "modified_s": info.modified_s,
        "sections": info.sections,
        **dict.fromkeys(_DESCRIPTION),
    }
    names = [name for name in _DESCRIBING_SECTIONS if name in info.sections]
    entry = store.get(info.kind, info.key, verify=names)
    if entry is None:
        return row
    for name in reversed(names):
        try:
            record = json.loads(bytes(entry.section(name)))
        except (ValueError, RecursionError):
            # Sound bytes but no JSON, as another version may write: listed without a description.
            continue
        if isinstance(record, dict):
            row.update({key: record[key] for key in _DESCRIPTION if key in record})
    return row


def _print_table(entries: Sequence[dict[str, Any]]) -> None:
    now_s = time.time()
    rows = [
        _COLUMNS,
        *(
            (
                entry["kind"],
                entry["key"][:_KEY_DIGITS],
                _size(entry["size_bytes"]),
                _age(now_s - entry["modified_s"]),
                *(_text(entry[name]) for name in _DESCRIPTION),
            )
            for entry in entries
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    click.echo(f"{count}, {_size(sum(entry['size_bytes'] for entry in entries))}")


def _size(size_bytes: int) -> str:
    """Return a length in the largest binary unit that it fills, such as `3.8 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def _age(age_s: float) -> str:
    """Return a duration in its largest whole unit, such as `5 min`; `0 s` for the future."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= unit_s:
            return f"{int(age_s // unit_s)} {unit}"
    return f"{max(0, int(age_s))} s"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return _printable(value if isinstance(value, str) else json.dumps(value))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
