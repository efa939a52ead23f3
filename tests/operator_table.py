"""Write docs/operators.md: who lowers each operator of the tiny models, and which tests compare it.

    python tests/operator_table.py [--output FILE] [NAME...]

Captures the prefill and the decode step of every model of `architectures` (or of those named) in an
engine of its own and lists the ATen operators that decomposition leaves; then the parity tests of
`tests/lowering` capture their steps, without comparing them, to tell which operators each has.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import models
from tests.architectures import ARCHITECTURES
from tests.lowering import parity
from tests.run_models import OPTIONS
from tests.vllm.engine import CPU_MODE, Engine, model_runner

REPOSITORY = Path(__file__).resolve().parents[1]

_TESTS = [
    f"tests/lowering/test_{name}.py" for name in ("operators", "vision_operators", "scalar_index")
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "operators.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ARCHITECTURES))
    options = parser.parse_args(argv)
    used: dict[str, set[str]] = defaultdict(set)
    owner: dict[str, str] = {}
    names = options.names or list(ARCHITECTURES)
    with tempfile.TemporaryDirectory(prefix="vllm-neuron-operators-") as folder:
        for name in names:
            for operator, lowered_by in operators_of(name, Path(folder)).items():
                used[operator].add(name)
                owner[operator] = lowered_by
            print(f"{name}: {sum(name in users for users in used.values())} operators", flush=True)
    os.chdir(REPOSITORY)
    parity.assert_parity = lambda lowering, step, args, **_: parity.captured_step(step, args)
    # Tests that expect an error of the lowering or look at a result fail here: they get neither.
    pytest.main(
        ["-q", "--no-header", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider", *_TESTS]
    )
    options.output.write_text(page(names, used, owner, parity.COMPARED))
    return 0


def operators_of(name: str, folder: Path) -> dict[str, str]:
    """The operators of a model's steps, and who lowers each."""
    checkpoint = models.build(name, folder / name)
    with Engine(checkpoint, CPU_MODE, cache_root=folder / "cache", **OPTIONS) as engine:
        return engine.call(_capture_steps)


def _capture_steps(llm: Any) -> dict[str, str]:
    from vllm.config import set_current_vllm_config

    from vllm_neuron.capture import capture
    from vllm_neuron.lowering.graph_message import encode_graph
    from vllm_neuron.lowering.ops import own_lowering

    runner, found = model_runner(llm), {}
    with set_current_vllm_config(runner.vllm_config):
        for label, step in runner.graphs.items():
            arguments = (*runner._inputs[label].tensors, runner.kv_caches)
            message = encode_graph(
                capture(step, arguments, bucket=label), bucket=label, route="native"
            )
            for node in message.header["nodes"]:
                own = own_lowering(node)
                found[node["op"]] = "torch-mlir" if own is None else own.__module__.split(".")[-1]
    return found


def page(
    names: Sequence[str],
    used: Mapping[str, set[str]],
    owner: Mapping[str, str],
    compared: Mapping[str, set[str]],
) -> str:
    """The page in Markdown."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        "# Operators",
        "",
        f"Written by `python tests/operator_table.py {' '.join(names)}` on {date}; do not edit.",
        "",
        f"The ATen operators that decomposition leaves of the steps of {len(names)} tiny models "
        f"({', '.join(names)}), who lowers each (torch-mlir, or a file of `lowering/ops`), and the "
        "parity tests that compare it with eager. Every operator is also part of its models, whose "
        "text is compared with that of transformers, see [models](models.md).",
        "",
        "| operator | lowered by | models | compared with eager by |",
        "|---|---|---|---|",
    ]
    for operator in sorted(used):
        users = sorted(used[operator])
        shown = "all" if len(users) == len(names) else ", ".join(users)
        tests = sorted(compared.get(operator, ()))
        more = f" and {len(tests) - 2} more" if len(tests) > 2 else ""
        listed = ", ".join(f"`{test}`" for test in tests[:2]) + more
        lines.append(f"| `{operator}` | {owner[operator]} | {shown} | {listed or 'models only'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
