"""What the commands of `vllm-neuron cache` share: which directories, which entries, how to print.

Text out of entries is printed with its control characters escaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vllm_neuron import _core, envs
from vllm_neuron.errors import ConfigurationError

__all__ = [
    "Caches",
    "age",
    "count",
    "key_argument",
    "place_options",
    "print_problems",
    "printable",
    "size",
    "text",
]


@dataclass(frozen=True, slots=True)
class Caches:
    """The directories that a command works on.

    Attributes:
        root: of the caches, or None for a single directory of entries.
        directories: by name: `precompile` and `compile_cache`, or `directory`.
        settings: of the environment, or None if no variable was asked.
    """

    root: Path | None
    directories: dict[str, Path]
    settings: envs.Settings | None

    def stores(self) -> list[_core.Store]:
        """The store of each directory."""
        return [_core.Store(str(directory)) for directory in self.directories.values()]

    def entries(self) -> list[tuple[_core.Store, _core.EntryInfo]]:
        """Every entry with its store, newest first; problems go to standard error."""
        found = []
        for store in self.stores():
            found += [(store, info) for info in store.entries()]
            print_problems(store)
        found.sort(key=lambda item: (-item[1].modified_s, item[1].key))
        return found

    def of_keys(self, keys: Sequence[str]) -> list[tuple[_core.Store, _core.EntryInfo]]:
        """The entries whose keys begin with the given digits, all if there are none given.

        Raises:
            ClickException: a key finds none.
        """
        entries = self.entries()
        if not keys:
            return entries
        for key in keys:
            if not any(info.key.startswith(key.lower()) for _, info in entries):
                raise click.ClickException(f"no entry {key}")
        return [
            (store, info)
            for store, info in entries
            if any(info.key.startswith(key.lower()) for key in keys)
        ]

    def store_of(self, kind: str) -> _core.Store:
        """Where an entry of a kind belongs."""
        default = next(iter(self.directories.values()))
        name = "precompile" if kind == "trace" else "compile_cache"
        return _core.Store(str(self.directories.get(name, default)))


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options `--root` and `--directory`, as one argument `caches`."""

    def run(*, root: Path | None, directory: Path | None, **options: Any) -> Any:
        return command(caches=_caches(root, directory), **options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    path = click.Path(file_okay=False, path_type=Path)
    for option in (
        click.option(
            "--root",
            type=path,
            help="Root of the caches instead of $VLLM_CACHE_ROOT (default ~/.cache/vllm).",
        ),
        click.option(
            "--directory",
            type=path,
            help="One directory of entries, such as a remote cache, instead of both caches.",
        ),
    ):
        run = option(run)
    return run


def key_argument(*, several: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an argument of keys, in full or their first digits."""
    if several:
        return click.argument("keys", metavar="[KEY]...", nargs=-1)
    return click.argument("key", metavar="KEY")


def _caches(root: Path | None, directory: Path | None) -> Caches:
    if directory is not None:
        if root is not None:
            raise click.UsageError("--root and --directory exclude each other")
        return Caches(None, {"directory": directory}, None)
    if root is not None:
        names = ("precompile", "compile_cache")
        return Caches(root, {name: root / "neuron" / name for name in names}, None)
    try:
        settings = envs.read_settings()
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    directories = {
        "precompile": settings.precompile_directory,
        "compile_cache": settings.compile_cache_directory,
    }
    return Caches(settings.cache_root, directories, settings)


def print_problems(store: _core.Store) -> int:
    """Name on standard error what a store found wrong; returns how much that was."""
    problems = store.take_problems()
    for problem in problems:
        click.echo(printable(problem.reason), err=True)
    return len(problems)


def count(entries: int) -> str:
    """Return `1 entry`, `2 entries`."""
    return "1 entry" if entries == 1 else f"{entries} entries"


def size(size_bytes: int) -> str:
    """Return a length in the largest binary unit that it fills, such as `3.8 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    scaled = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        scaled /= 1024
        if scaled < 1024:
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1024:.1f} TiB"


def age(age_s: float) -> str:
    """Return a duration in its largest whole unit, such as `5 min`; `0 s` for the future."""
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= unit_s:
            return f"{int(age_s // unit_s)} {unit}"
    return f"{max(0, int(age_s))} s"


def text(value: Any) -> str:
    """Return a value out of an entry for a person; `-` for None."""
    if value is None:
        return "-"
    return printable(value if isinstance(value, str) else json.dumps(value))


def printable(found: str) -> str:
    """Return a text with its control characters escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in found)
