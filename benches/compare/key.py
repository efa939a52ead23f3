"""The graph key beside torch's: FxGraphCache's key, and the pickler alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx
from torch._inductor.codecache import (
    FxGraphCachePickler,
    FxGraphHashDetails,
    compiled_fx_graph_hash,
)
from torch._subclasses import FakeTensorMode

from benches.compare.timing import Row, faster, interleaved, within
from vllm_neuron import _core

aten = torch.ops.aten
ROWS, WIDTH = 16, 4096


def layers(count: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return a graph of about `count` nodes, shaped like layers of a model, and its inputs."""
    graph = fx.Graph()
    with FakeTensorMode():
        hidden = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
        weight = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
        heads = hidden.view(ROWS, 32, 128)
        turned = heads.transpose(0, 1)

    def add(target: object, args: tuple[object, ...], value: torch.Tensor) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    current = graph.placeholder("x")
    current.meta["val"] = hidden
    weights = [graph.placeholder(f"w{index}") for index in range(max(1, count // 10))]
    for node in weights:
        node.meta["val"] = weight
    for index in range((count - len(graph.nodes)) // 5):
        product = add(aten.mm.default, (current, weights[index % len(weights)]), hidden)
        total = add(aten.add.Tensor, (product, current), hidden)
        split = add(aten.view.default, (total, [ROWS, 32, 128]), heads)
        swapped = add(aten.transpose.int, (split, 0, 1), turned)
        current = add(aten.reshape.default, (swapped, [ROWS, WIDTH]), hidden)
    graph.output((current,))
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return fx.GraphModule(torch.nn.Module(), graph), inputs


def key(_folder: Path) -> Iterator[Row]:
    """Graphs of 100 to 10,000 nodes."""
    logging.disable(logging.CRITICAL)
    per_node = {}
    options = {"cudagraphs": False}
    for count, rounds in ((100, 20), (1000, 7), (10_000, 3)):
        graph_module, inputs = layers(count)
        details = FxGraphHashDetails(graph_module, inputs, options, [])
        taken = interleaved(
            {
                "ours": lambda g=graph_module: _core.graph_digest(g),
                "whole": lambda g=graph_module, i=inputs: compiled_fx_graph_hash(g, i, options, []),
                "pickler": lambda g=graph_module, d=details: FxGraphCachePickler(g).get_key(d),
            },
            rounds=rounds,
        )
        per_node[count] = taken["ours"] / count
        name = f"graph key, {count:,} nodes"
        goals = (50, 25) if count == 10_000 else (None, None)
        yield faster(name, "compiled_fx_graph_hash", taken["ours"], taken["whole"], goals[0])
        yield faster(name, "FxGraphCachePickler.get_key", taken["ours"], taken["pickler"], goals[1])
    what = "graph key per node of 10,000"
    yield within(what, "per node of 1,000", per_node[10_000], per_node[1000], 1.5)
    logging.disable(logging.NOTSET)
