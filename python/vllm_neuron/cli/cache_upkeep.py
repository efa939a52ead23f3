"""`vllm-neuron cache`: the commands that check, copy and remove entries."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import click

from vllm_neuron import _core, envs
from vllm_neuron.cache.tiers import COMPILATION_SHARE, PRECOMPILE_SHARE
from vllm_neuron.cli.cache_places import (
    Caches,
    count,
    key_argument,
    place_options,
    print_problems,
    printable,
    size,
)
from vllm_neuron.errors import NeffError, StoreError

__all__ = ["COMMANDS"]


def _failure(error: Exception) -> click.ClickException:
    return click.ClickException(printable(str(error)))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@place_options
def verify(*, caches: Caches, as_json: bool) -> None:
    """Read every entry in full and check it, and the NEFFs as NEFFs.

    A damaged entry is set aside, as a server would do. Exit status 1 if there was one.
    """
    sound, problems = 0, []
    for store in caches.stores():
        for info in store.entries():
            entry = store.get(info.kind, info.key)
            if entry is None:
                continue
            sound += 1
            if info.kind == "neff":
                try:
                    _core.Neff.parse(entry.section("neff"), path=info.path)
                except (KeyError, NeffError) as error:
                    sound -= 1
                    problems.append(f"{info.path}: {error}")
        problems += [problem.reason for problem in store.take_problems()]
    if as_json:
        click.echo(json.dumps({"sound": sound, "problems": problems}, indent=2))
    else:
        for problem in problems:
            click.echo(printable(problem), err=True)
        click.echo(f"{count(sound)} sound, {len(problems)} problems")
    if problems:
        raise click.exceptions.Exit(1)


@click.command()
@key_argument(several=True)
@click.option(
    "--to",
    "target",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory to promote to instead of $NEURON_LIBTORCH_REMOTE_CACHE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@place_options
def promote(*, caches: Caches, keys: tuple[str, ...], target: Path | None, as_json: bool) -> None:
    """Copy entries to the remote cache: those of the keys, or all.

    May be repeated, and run on many nodes at the same time.
    """
    from vllm_neuron.cache.promotion import copy_entries

    if target is None and caches.settings is not None:
        target = caches.settings["NEURON_LIBTORCH_REMOTE_CACHE"]
    if target is None:
        raise click.UsageError("say where to: --to DIRECTORY or NEURON_LIBTORCH_REMOTE_CACHE")
    wanted = {info.key for _, info in caches.of_keys(keys)}
    promoted = existed = 0
    for store in caches.stores():
        mine = {info.key for info in store.entries()} & wanted
        try:
            done = copy_entries(store, _core.Store(str(target)), mine if keys else None)
        except (RuntimeError, OSError, StoreError) as error:
            raise _failure(error) from error
        print_problems(store)
        promoted, existed = promoted + done.promoted, existed + done.existed
    if as_json:
        click.echo(json.dumps({"promoted": promoted, "existed": existed, "to": str(target)}))
    else:
        click.echo(
            f"{count(promoted)} promoted to {printable(str(target))}, {existed} there before"
        )


@click.command("export")
@click.argument("bundle", type=click.Path(dir_okay=False, path_type=Path))
@key_argument(several=True)
@place_options
def export_(*, caches: Caches, bundle: Path, keys: tuple[str, ...]) -> None:
    """Write entries to one file, BUNDLE: those of the keys, or all."""
    from vllm_neuron.cache.bundle import export_bundle

    try:
        exported = export_bundle(bundle, caches.of_keys(keys))
    except OSError as error:
        raise _failure(error) from error
    click.echo(f"{count(exported)}, {size(bundle.stat().st_size)}, in {printable(str(bundle))}")


@click.command("import")
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@place_options
def import_(*, caches: Caches, bundle: Path) -> None:
    """Publish the entries of BUNDLE in the caches, or in the one --directory.

    Each is checked first. Exit status 1 if one was not sound.
    """
    from vllm_neuron.cache.bundle import import_bundle

    first = next(iter(caches.directories.values()))
    scratch = first if caches.root is None else first.parent
    try:
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = import_bundle(bundle, scratch=scratch, store_of=caches.store_of)
    except (OSError, StoreError, tarfile.TarError) as error:
        raise _failure(error) from error
    for reason in done.refused:
        click.echo(printable(reason), err=True)
    click.echo(f"{count(done.imported)} imported, {done.existed} there before")
    if done.refused:
        raise click.exceptions.Exit(1)


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@place_options
def clear(*, caches: Caches, yes: bool) -> None:
    """Remove every entry. Servers that run keep what they have loaded."""
    entries = caches.entries()
    if not entries:
        click.echo("0 entries removed")
        return
    places = ", ".join(printable(str(place)) for place in caches.directories.values())
    if not yes:
        click.confirm(f"Remove {count(len(entries))} from {places}?", abort=True)
    removed = 0
    for store, info in entries:
        try:
            removed += store.remove(info.kind, info.key)
        except (OSError, StoreError) as error:
            raise _failure(error) from error
    click.echo(f"{count(removed)} removed")


class _Duration(click.ParamType):
    """`90d`, `12h`, `30min` or seconds, as seconds."""

    name = "duration"
    _UNITS: ClassVar = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value)
        if found is None or found[2] not in self._UNITS:
            self.fail(f"{value!r} is no duration such as 90d, 12h, 30min or 45s", param, ctx)
        return float(found[1]) * self._UNITS[found[2]]


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if (found := envs.size_in_bytes(value)) is None:
            self.fail(f"{value!r} is no size such as 500M or 20G", param, ctx)
        return found


@click.command()
@click.option("--max-size", type=_Size(), help="Most bytes of all entries together, such as 20G.")
@click.option("--max-age", type=_Duration(), help="Longest time since the last use, such as 90d.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@place_options
def gc(
    *, caches: Caches, max_size: int | None, max_age: float | None, dry_run: bool, as_json: bool
) -> None:
    """Remove the entries that were used longest ago.

    With both caches the Precompile Cache gets a quarter of --max-size. Entries used within the last
    minute stay. Servers that run keep what they have loaded.
    """
    if max_size is None and max_age is None:
        raise click.UsageError("say what to keep: --max-size, --max-age or both")
    shares = {"precompile": PRECOMPILE_SHARE, "compile_cache": COMPILATION_SHARE}
    removed: list[_core.EvictedEntry] = []
    kept = kept_bytes = 0
    for name, place in caches.directories.items():
        store = _core.Store(str(place))
        limit = None if max_size is None else int(max_size * shares.get(name, 1.0))
        try:
            done = store.evict(max_size_bytes=limit, max_age_s=max_age, dry_run=dry_run)
        except (OSError, StoreError) as error:
            raise _failure(error) from error
        print_problems(store)
        removed += done.removed
        kept, kept_bytes = kept + done.kept, kept_bytes + done.kept_bytes
    removed_bytes = sum(entry.size_bytes for entry in removed)
    if as_json:
        report = {
            "removed": [entry.key for entry in removed],
            "removed_bytes": removed_bytes,
            "kept": kept,
            "kept_bytes": kept_bytes,
            "dry_run": dry_run,
        }
        click.echo(json.dumps(report, indent=2))
        return
    would = "would be removed" if dry_run else "removed"
    click.echo(f"{count(len(removed))} {would}, {size(removed_bytes)}")
    click.echo(f"{count(kept)} kept, {size(kept_bytes)}")


#: In the order of their definition; `cli.cache` adds them to its group.
COMMANDS = (verify, gc, promote, export_, import_, clear)
