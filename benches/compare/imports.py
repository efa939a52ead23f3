"""What importing the extension module costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benches.compare.timing import Row, at_most

_CODE = """
import time, sys
import vllm_neuron.errors
start = time.perf_counter()
import vllm_neuron._core
print(time.perf_counter() - start)
assert not {"torch", "vllm", "jax"} & set(sys.modules)
"""


def imports(_folder: Path) -> Iterator[Row]:
    """Fresh interpreters; the package itself is imported first."""
    times = []
    for _ in range(11):
        command = [sys.executable, "-c", _CODE]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append(float(child.stdout))
    yield at_most("import vllm_neuron._core", statistics.median(times), 2e-3)
