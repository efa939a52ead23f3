"""The name of a keyword argument is Python: torch.fx prints a graph as source and runs that."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.key.test_canonical_graph import ADD, OUTPUT, call, stream, text
from vllm_neuron.canonical_graph import decode_graph_module
from vllm_neuron.errors import GraphFormatError


def test_attack(tmp_path):
    owned = tmp_path / "owned"
    name = f"a=__import__('os').mkdir({str(owned)!r}), b"
    graph = fx.Graph()
    graph.output(graph.call_function(dict, (), {name: 1}))
    fx.GraphModule(torch.nn.Module(), graph)()
    assert owned.exists()
    owned.rmdir()
    hostile = call(ADD, keywords=b"\1\0\0\0" + text(name) + b"\x10")
    with pytest.raises(GraphFormatError, match="name of a keyword argument"):
        decode_graph_module(stream(hostile, OUTPUT))
    assert not owned.exists()
