"""`vllm-neuron neff`: show and validate NEFF files.

Files may come from anywhere: every text out of them is printed with its control characters
escaped.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_neuron import _core
from vllm_neuron.errors import NeffError

__all__ = ["neff"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NO_HASH = click.option(
    "--no-hash", is_flag=True, help="Do not compare the payload with the digest in the header."
)


@click.group()
def neff() -> None:
    """Show and validate NEFF files.

    The checks and their order are in docs/neff-format.md.
    """


@neff.command()
@click.argument("file", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--members", is_flag=True, help="List the files of the archive, too.")
@_NO_HASH
def info(file: Path, *, as_json: bool, members: bool, no_hash: bool) -> None:
    """Show what a NEFF says of itself.

    The exit code is 0 if it is sound, 1 if not, 2 if FILE cannot be read.
    """
    report = _examine(file, verify_hash=not no_hash)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    elif report.description is None:
        click.echo(_printable(report.line()), err=True)
    else:
        _print_pairs(_info_pairs(report.description, members=members))
    sys.exit(0 if report.is_sound else 1)


@neff.command()
@click.argument("files", metavar="FILE...", type=_FILE, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@_NO_HASH
def validate(files: tuple[Path, ...], *, as_json: bool, no_hash: bool) -> None:
    """Tell of each NEFF whether it is sound, and if not, what is wrong and where.

    The exit code is 0 if all are sound (warnings allowed), 1 if one is not, 2 if one cannot be
    read.
    """
    reports = []
    for path in files:
        report = _examine(path, verify_hash=not no_hash)
        reports.append(report)
        if not as_json:
            click.echo(_printable(report.line()))
            for warning in report.warnings:
                click.echo(_printable(f"      warning: {warning}"))
    if as_json:
        click.echo(json.dumps([report.to_dict() for report in reports], indent=2))
    sys.exit(0 if all(report.is_sound for report in reports) else 1)


@dataclass(frozen=True, slots=True)
class _Report:
    """What is known of one file: its description, or why it is not sound."""

    path: str
    description: dict[str, Any] | None
    error: NeffError | None

    @property
    def is_sound(self) -> bool:
        return self.error is None

    @property
    def warnings(self) -> list[str]:
        return [] if self.description is None else self.description["warnings"]

    def line(self) -> str:
        if self.error is not None:
            return f"FAIL  {self.error} (status {self.error.details['status']})"
        return f"ok    {self.path}: {_summary(self.description or {})}"

    def to_dict(self) -> dict[str, Any]:
        error = None
        if self.error is not None:
            error = {
                "type": type(self.error).__name__,
                "message": str(self.error),
                **{key: value for key, value in self.error.details.items() if key != "path"},
            }
        return {
            **(self.description or {"path": self.path, "warnings": []}),
            "ok": self.is_sound,
            "error": error,
        }


def _examine(path: Path, *, verify_hash: bool) -> _Report:
    data = _read_regular_file(path)
    # A file name need not be UTF-8; in a message and in JSON it has to be.
    name = os.fsencode(path).decode(errors="backslashreplace")
    try:
        parsed = _core.Neff.parse(data, path=name, verify_hash=verify_hash)
    except NeffError as error:
        return _Report(name, None, error)
    return _Report(name, parsed.to_dict(), None)


def _read_regular_file(path: Path) -> bytes:
    """Read a file whole: a map would let another process change it while it is checked.

    Raises:
        click.UsageError: the path is not a regular file (a pipe would block), or unreadable.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise click.UsageError(f"{path}: expected a regular file")
        return path.read_bytes()
    except OSError as error:
        raise click.UsageError(f"{path}: {error.strerror}") from error


def _summary(description: dict[str, Any]) -> str:
    return ", ".join(
        [
            f"target {description['target'] or 'unknown'}",
            f"compiler {description['compiler_version'] or 'unknown'}",
            f"LNC {description['lnc_size']}",
            _count(len(description["inputs"]), "input"),
            _count(len(description["outputs"]), "output"),
            _digest(description),
        ]
    )


def _digest(description: dict[str, Any]) -> str:
    algorithm = {1: "SHA-256", 2: "MD5"}[description["package_version"]]
    if description["digest_order"] is None:
        return f"{algorithm} not verified"
    return f"{algorithm} verified ({description['digest_order']} order)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _info_pairs(description: dict[str, Any], *, members: bool) -> list[tuple[str, str]]:
    files = description["members"]
    inflated = sum(member["size_bytes"] for member in files)
    features = ", ".join(description["features"]) or "none"
    pairs = [
        ("file", f"{description['path']} ({description['size_bytes']} bytes)"),
        ("name", description["name"]),
        ("uuid", description["uuid"]),
        ("target", description["target"] or "unknown"),
        ("compiler", description["compiler_version"] or "unknown"),
        (
            "version",
            f"NEFF {description['neff_version']}, package {description['package_version']}",
        ),
        ("features", f"{description['feature_bits']:#x} ({features})"),
        (
            "cores",
            f"{description['requested_tpb_count']} requested, {description['num_tpb']} for "
            f"efficient execution, LNC {description['lnc_size']}",
        ),
        (
            "payload",
            f"{description['data_size']} bytes, compression {description['compression']}, "
            f"{_digest(description)}",
        ),
        ("archive", f"{_count(len(files), 'file')}, {inflated} bytes"),
    ]
    for kind in ("input", "output"):
        pairs += [
            (kind, f"{tensor['name']}: {tensor['dtype']} {tensor['shape']}")
            for tensor in description[f"{kind}s"]
        ]
    if members:
        pairs += [
            ("member", f"{member['name']} ({member['size_bytes']} bytes)") for member in files
        ]
    pairs += [("warning", warning) for warning in description["warnings"]]
    return pairs


def _print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print a table: by rich on a terminal, else plain lines that scripts can cut."""
    rows = [(label, _printable(value)) for label, value in pairs]
    if sys.stdout.isatty():
        # Imported here: it takes longer than everything else of this command.
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for label, value in rows:
            # Text, not str: rich would read markup out of it.
            table.add_row(label, Text(value, style="yellow" if label == "warning" else ""))
        Console().print(table)
        return
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        click.echo(f"{label:<{width}}  {value}")


def _printable(text: str) -> str:
    """Escape what a terminal would obey."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
