"""Committed values: when one of them changes, the version in docs/key-format.md must change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.key import graphs
from vllm_neuron import _core

GOLDEN = Path(__file__).parents[1] / "golden" / "keys"
GRAPHS = json.loads((GOLDEN / "graphs.json").read_text())
KEYS = json.loads((GOLDEN / "keys.json").read_text())


def test_every_graph_has_a_golden_value():
    assert set(GRAPHS) == set(graphs.GOLDEN)


@pytest.mark.parametrize("name", graphs.GOLDEN)
def test_graph_bytes_are_the_golden_ones(name):
    graph_module = graphs.GOLDEN[name]()
    assert _core.graph_bytes(graph_module).hex() == GRAPHS[name]["bytes"]
    assert _core.graph_digest(graph_module) == GRAPHS[name]["digest"]


@pytest.mark.parametrize("golden", KEYS, ids=lambda golden: golden["domain"])
def test_keys_are_the_golden_ones(golden):
    builder = _core.KeyBuilder(golden["domain"])
    for name, value in golden["components"]:
        builder.add(name, bytes.fromhex(value))
    key = builder.finish()
    assert key.hex == golden["key"]
    assert key.components == golden["digests"]
