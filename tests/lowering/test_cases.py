"""The collection of module cases on the native route, when it is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.run_cases import collect, run_all

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("VLLM_NEURON_SHARED", REPOSITORY.parent / "shared"))
CASES = SHARED / "cases"


@pytest.mark.skipif(not CASES.is_dir(), reason="the case collection is not on this machine")
@pytest.mark.cases
@pytest.mark.parametrize("chain", ["compile", "capture"])
def test_every_case_equals_eager_or_is_refused_where_it_may_be(chain):
    rows = run_all(collect([CASES]), route="native", chain=chain, timeout_s=300, jobs=2)
    assert len(rows) >= 50
    faults = [row for row in rows if row["status"] in ("wrong", "died")]
    refused = {row["case"] for row in rows if row["status"] == "refused" and not row["allowed"]}
    assert faults == []
    # The server's chain draws no random numbers in a graph.
    beyond = {"75-rng-inside-graph"} if chain == "capture" else set()
    assert refused == beyond
