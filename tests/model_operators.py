"""The ATen operators of the steps of models.

    python -m tests.model_operators FOLDER NAME...

writes a line of JSON per model: its name, and who lowers each operator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.model_worker import answer_stream, checkpoint, run_child, start_worker
from tests.vllm.engine import CPU_MODE


def operators_of(names: Sequence[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return who lowers each operator of each model, from a child process."""
    lines = run_child("tests.model_operators", names, folder=folder, settings=CPU_MODE)
    return dict(map(json.loads, lines))


def _capture(model: Path, folder: Path) -> dict[str, str]:
    from vllm.config import set_current_vllm_config

    from vllm_neuron.capture import capture
    from vllm_neuron.lowering.graph_message import encode_graph
    from vllm_neuron.lowering.ops import own_lowering

    worker = start_worker(model, folder=folder, prefill=256, dtype="float32")
    runner, found = worker.model_runner, {}
    with set_current_vllm_config(worker.vllm_config):
        for label in sorted(runner.graphs):
            arguments = runner._arguments(runner._inputs[label])
            captured = capture(runner.graphs[label], arguments, bucket=label)
            for node in encode_graph(captured, bucket=label, route="native").header["nodes"]:
                own = own_lowering(node)
                found[node["op"]] = "torch-mlir" if own is None else own.__module__.split(".")[-1]
    return found


def main(folder: str, *names: str) -> None:
    place, answers = Path(folder), answer_stream()
    for name in names:
        answers.write(json.dumps([name, _capture(checkpoint(name, place), place)]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
