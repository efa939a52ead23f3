"""Measure what others do and what this does, interleaved in one process.

    python benches/compare/run.py [--json FILE] [--entries N] [NAME...]

NAME is one of key, small, large, put, many, neff, imports; all of them without one. Each row says
how many times as long the reference takes, and the goal. Needs `requirements/bench.txt` and a
release build of the product, which `make bench` sees to. The exit status is 1 when a goal is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benches.compare import imports, key, neff, store
from benches.compare.timing import Row

#: Entries of the store that is compared with one of 1,000, unless asked for more.
ENTRIES = 20_000


def comparisons(entries: int) -> dict[str, Callable[[Path], Iterator[Row]]]:
    """Return what can be measured, by name."""
    return {
        "imports": imports.imports,
        "small": store.small,
        "large": store.large,
        "put": store.put,
        "many": partial(store.many, count=entries),
        "neff": neff.neff,
        "key": key.key,
    }


def table(rows: list[Row]) -> str:
    """Return rows as a Markdown table."""
    head = ("operation", "reference", "ours", "reference", "ratio", "goal", "met")
    lines = [head, ("---",) * len(head), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Run the comparisons that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="size of the large store")
    parser.add_argument("--folder", type=Path, help="where the stores are made (a temporary one)")
    arguments = parser.parse_args()
    known = comparisons(arguments.entries)
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(known)}, found {', '.join(unknown)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in arguments.names or known:
            rows.extend(known[name](Path(folder)))
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} processors, load {load:.1f}\n")
    print(table(rows))
    if arguments.json is not None:
        records = [{**asdict(row), "ratio": row.ratio} for row in rows]
        arguments.json.write_text(json.dumps({"load": load, "rows": records}, indent=1))
    return int(any(row.is_met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
