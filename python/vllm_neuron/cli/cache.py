"""`vllm-neuron cache`: look at the compile caches.

Reads entries as data: nothing in them is evaluated. The commands that check, copy and remove
entries are in `cli.cache_upkeep`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vllm_neuron import _core
from vllm_neuron.cli import cache_upkeep
from vllm_neuron.cli.cache_places import (
    Caches,
    age,
    count,
    key_argument,
    place_options,
    print_problems,
    printable,
    size,
    text,
)

__all__ = ["cache"]

#: Names in an entry's record or factors that a listing shows.
_DESCRIPTION = ("model", "bucket", "route")
#: Sections that may have them; the first one wins. Source: docs/entry-format.md, "Sections".
_DESCRIBING_SECTIONS = ("record", "factors")
_COLUMNS = ("KIND", "KEY", "SIZE", "AGE", "USED", "MODEL", "BUCKET", "ROUTE")
#: Digits of a key that a table shows: those of `Key.short`.
_KEY_DIGITS = 32
#: What a section is called in a directory of unpacked ones, by kind of payload.
_FILE_NAMES = {
    "record": "record.json",
    "factors": "factors.json",
    "neff": "graph_{key}.neff",
    "log": "log-neuron-cc.txt",
}


@click.group()
def cache() -> None:
    """Look at and after the Precompile Cache and the compilation cache."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@place_options
def ls(*, caches: Caches, as_json: bool) -> None:
    """List the entries of both caches, newest first.

    Files that are not sound entries are named on standard error; to the server they are misses.
    """
    rows = [_describe(store, info) for store, info in caches.entries()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


@cache.command()
@key_argument(several=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--unpack",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the sections to files in this directory.",
)
@place_options
def show(*, caches: Caches, key: str, as_json: bool, unpack: Path | None) -> None:
    """Show one entry: what it holds, what it was made for, the factors of its key."""
    store, info = _one(caches, key)
    entry = store.get(info.kind, info.key)
    print_problems(store)
    if entry is None:
        raise click.ClickException(f"the entry {info.key} is damaged")
    row = _describe(store, info)
    for name in _DESCRIBING_SECTIONS:
        row[name] = _json_of(entry, name)
    if unpack is not None:
        unpack.mkdir(parents=True, exist_ok=True)
        for name in entry.sections:
            (unpack / _file_name(entry, name)).write_bytes(entry.section(name))
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    for name in ("kind", "key", "path", *_DESCRIPTION):
        click.echo(f"{name + ':':<10}{text(row[name])}")
    click.echo(f"{'size:':<10}{size(row['size_bytes'])}")
    click.echo(f"{'age:':<10}{age(time.time() - row['modified_s'])}")
    click.echo(f"{'used:':<10}{age(time.time() - row['last_used_s'])} ago")
    for name, length in info.sections.items():
        click.echo(f"section   {name}: {size(length)}")
    for name, value in (row["factors"] or {}).items():
        click.echo(f"factor    {printable(name)}: {_shortened(value)}")


@cache.command()
@click.argument("first", metavar="KEY")
@click.argument("second", metavar="KEY")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@place_options
def diff(*, caches: Caches, first: str, second: str, as_json: bool) -> None:
    """Compare the keys of two entries of one kind, factor by factor."""
    from vllm_neuron.cache.keys import differing_factors

    (_, old), (_, new) = found = [_one(caches, key) for key in (first, second)]
    if old.kind != new.kind:
        raise click.ClickException(
            f"{first} is of kind {old.kind}, {second} of kind {new.kind}: they have other factors"
        )
    factors = []
    for store, info in found:
        entry = store.get(info.kind, info.key, verify=["factors"])
        known = _json_of(entry, "factors") if entry is not None else None
        if known is None:
            print_problems(store)
            raise click.ClickException(f"the entry {info.key[:_KEY_DIGITS]} has no factors")
        factors.append(known)
    differences = differing_factors(*factors)
    if as_json:
        click.echo(json.dumps(differences, indent=2))
        return
    for difference in differences or ["no factor differs"]:
        click.echo(printable(difference))


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as it is.")
@place_options
def why(*, caches: Caches, as_json: bool) -> None:
    """Explain what the last start missed, factor by factor against the nearest entry."""
    from vllm_neuron.cache.start_report import read_report, report_path

    if caches.root is None:
        raise click.ClickException("a report belongs to a root: use --root, not --directory")
    path = report_path(caches.root)
    try:
        report = read_report(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if report is None:
        raise click.ClickException(f"no start has left a report at {path}")
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    begun = age(time.time() - float(report.get("time_s", 0)))
    graphs = report.get("counters", {}).get("graphs")
    click.echo(f"The last start ({text(report.get('model'))}, {begun} ago): {text(graphs)} graphs")
    if report.get("error"):
        click.echo(f"It failed: {text(report['error'])}")
    if not report["misses"]:
        click.echo("Nothing was missed.")
    for miss in report["misses"]:
        what = {"trace": "traced", "neff": "compiled"}.get(miss.get("kind"), "made")
        key = text(miss.get("key"))[:_KEY_DIGITS]
        click.echo(f"{text(miss.get('bucket'))} was {what}, key {key}:")
        for reason in miss.get("reasons", ()):
            click.echo(f"  {text(reason)}")


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@place_options
def path(*, caches: Caches, as_json: bool) -> None:
    """Print the directories of the caches."""
    found = dict(caches.directories)
    if caches.settings is not None:
        for name, variable in (
            ("artifacts", "NEURON_COMPILED_ARTIFACTS"),
            ("remote", "NEURON_LIBTORCH_REMOTE_CACHE"),
        ):
            if (place := caches.settings[variable]) is not None:
                found[name] = place
    if as_json:
        click.echo(json.dumps({name: str(place) for name, place in found.items()}))
        return
    for name, place in found.items():
        click.echo(f"{name:<14}{printable(str(place))}")


def _json_of(entry: _core.Entry, name: str) -> dict[str, Any] | None:
    """The JSON object of a section; None if it has none, as another version may write."""
    if name not in entry.sections:
        return None
    try:
        record = json.loads(bytes(entry.section(name)))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _file_name(entry: _core.Entry, section: str) -> str:
    if section == "module":
        # The magic number of MLIR bytecode; anything else is an HLO protobuf.
        is_mlir = bytes(entry.section(section)[:4]) == b"ML\xefR"
        return "module.mlir" if is_mlir else "graph.hlo"
    # Section names are printable ASCII, so a slash could be in one.
    name = section.replace("/", "_")
    return _FILE_NAMES.get(section, f"section-{name}").format(key=entry.key[:_KEY_DIGITS])


def _one(caches: Caches, key: str) -> tuple[_core.Store, _core.EntryInfo]:
    found = caches.of_keys([key])
    if len(found) > 1:
        names = ", ".join(info.key[:_KEY_DIGITS] for _, info in found[:4])
        raise click.ClickException(f"{key} is the beginning of several keys: {names}")
    return found[0]


def _describe(store: _core.Store, info: _core.EntryInfo) -> dict[str, Any]:
    """Return what is known of an entry as JSON-able values; None for what it does not say."""
    row: dict[str, Any] = {
        "kind": info.kind,
        "key": info.key,
        "path": info.path,
        "size_bytes": info.size_bytes,
        "modified_s": info.modified_s,
        "last_used_s": info.last_used_s,
        "sections": info.sections,
        **dict.fromkeys(_DESCRIPTION),
    }
    names = [name for name in _DESCRIBING_SECTIONS if name in info.sections]
    entry = store.get(info.kind, info.key, verify=names)
    if entry is None:
        return row
    for name in reversed(names):
        record = _json_of(entry, name) or {}
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
                size(entry["size_bytes"]),
                age(now_s - entry["modified_s"]),
                age(now_s - entry["last_used_s"]),
                *(text(entry[name]) for name in _DESCRIPTION),
            )
            for entry in entries
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    click.echo(f"{count(len(entries))}, {size(sum(entry['size_bytes'] for entry in entries))}")


def _shortened(value: Any) -> str:
    found = text(value)
    return found if len(found) <= 100 else found[:97] + "..."


for command in cache_upkeep.COMMANDS:
    cache.add_command(command)
