"""Write docs/operators.md: who lowers each operator of the tiny models, and which tests compare it.

    python tests/operator_table.py [--output FILE] [NAME...]

Captures the steps of every model of `model_worker` (or of those named) and lists the ATen
operators that decomposition leaves; then the parity tests of `tests/lowering` capture their steps,
without comparing them, to tell which operators each has.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lowering import parity
from tests.model_operators import operators_of
from tests.model_worker import NAMES

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "operators.md"

_TESTS = [
    f"tests/lowering/test_{name}.py" for name in ("operators", "vision_operators", "scalar_index")
]
_HEADER = ["operator", "lowered by", "models", "compared with eager by"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    options = parser.parse_args(argv)
    names = options.names or list(NAMES)
    with tempfile.TemporaryDirectory(prefix="vllm-neuron-operators-") as folder:
        operators = operators_of(names, Path(folder))
    for name, found in operators.items():
        print(f"{name}: {len(found)} operators", flush=True)
    os.chdir(REPOSITORY)
    parity.assert_parity = lambda lowering, step, args, **_: parity.captured_step(step, args)
    # Tests that expect an error of the lowering or look at a result fail here: they get neither.
    pytest.main(
        ["-q", "--no-header", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider", *_TESTS]
    )
    options.output.write_text(page(operators, parity.COMPARED))
    return 0


def page(operators: Mapping[str, Mapping[str, str]], compared: Mapping[str, set[str]]) -> str:
    """The page in Markdown.

    Args:
        operators: by model, who lowers each operator.
        compared: the tests that compare each operator.
    """
    names = list(operators)
    command = " ".join(["python tests/operator_table.py", *_subset(names)])
    lines = [
        "# Operators",
        "",
        f"Written by `{command}`; do not edit.",
        "",
        f"The ATen operators that decomposition leaves of the steps of {len(names)} models "
        f"({', '.join(names)}), who lowers each (torch-mlir, or a file of `lowering/ops`), and the "
        "parity tests that compare it with eager. Every operator is also part of its models, whose "
        "answers are compared with those of transformers, see [models](models.md).",
        "",
        f"| {' | '.join(_HEADER)} |",
        "|---|---|---|---|",
    ]
    owner = {operator: by for found in operators.values() for operator, by in found.items()}
    for operator in sorted(owner):
        tests = sorted(compared.get(operator, ()))
        more = f" and {len(tests) - 2} more" if len(tests) > 2 else ""
        listed = ", ".join(f"`{test}`" for test in tests[:2]) + more
        users = _users([name for name in names if operator in operators[name]], names)
        lines.append(f"| `{operator}` | {owner[operator]} | {users} | {listed or 'models only'} |")
    return "\n".join(lines) + "\n"


def operators_on(text: str, name: str) -> dict[str, str]:
    """Who lowers each operator of a model, according to a page."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `aten"):
            continue
        kind, _, listed = (
            cells[2].partition(" but ") if cells[2].startswith("all") else ("", "", cells[2])
        )
        if (name in listed.split(", ")) != (kind == "all"):
            found[cells[0].strip("`")] = cells[1]
    return found


def _users(users: Sequence[str], names: Sequence[str]) -> str:
    others = [name for name in names if name not in users]
    if not others:
        return "all"
    return ", ".join(users) if len(users) <= len(others) else f"all but {', '.join(others)}"


def _subset(names: Sequence[str]) -> Sequence[str]:
    return () if tuple(names) == NAMES else names


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
