"""Equal graphs have one key, different graphs have different keys."""

from __future__ import annotations

import operator
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.key import graphs
from tests.key.graphs import branches, two_ops, value, views
from tests.scale import scaled
from vllm_neuron import _core

aten = torch.ops.aten
REPOSITORY = Path(__file__).parents[2]


def nan(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def _renamed():
    names = ["x", "w", "constant", "added", "total", "sum"]
    return two_ops(names={name: f"layer_{index}_{name}" for index, name in enumerate(names)})


def _with_metadata():
    graph_module = two_ops()
    for node in graph_module.graph.nodes:
        node.meta.update(stack_trace="/home/a/model.py:3", nn_module_stack={}, seq_nr=7)
    return graph_module


def _with_dead_meta():
    graph_module = two_ops()
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = value(9, 9)
    graph_module.graph._codegen = torch.fx.graph.CodeGen()
    graph_module.training = False
    return graph_module


EQUAL = {
    "renamed": _renamed,
    "metadata": _with_metadata,
    "values of inner nodes": _with_dead_meta,
    "keyword order": lambda: two_ops(keywords=(("dtype", torch.float32), ("keepdim", True))),
    "input requires grad": lambda: two_ops(x=value(2, 3).requires_grad_()),
    "input is a parameter": lambda: two_ops(x=torch.nn.Parameter(value(2, 3))),
    "other values of inputs": lambda: two_ops(x=torch.ones(2, 3)),
    "constant computed": lambda: two_ops(constant=torch.tensor([0.5, -0.0, 1.25]) * 2),
}


@pytest.mark.parametrize("change", EQUAL)
def test_what_does_not_change_the_graph_does_not_change_its_key(change):
    assert _core.graph_digest(EQUAL[change]()) == _core.graph_digest(two_ops())


def test_device_index_is_not_in_the_key():
    def on(device):
        return graphs.call(aten.zeros.default, ([2],), {"device": torch.device(device)})

    assert _core.graph_digest(on("cuda:0")) == _core.graph_digest(on("cuda:7"))
    assert _core.graph_digest(on("cuda:0")) != _core.graph_digest(on("cpu"))


DIFFERENT = {
    "operator": lambda: two_ops(first=aten.sub.Tensor),
    "overload": lambda: two_ops(first=aten.add.Scalar),
    "operand order": lambda: two_ops(operands=("w", "x")),
    "operand twice": lambda: two_ops(operands=("x", "x")),
    "int argument": lambda: two_ops(scale=2),
    "int to float": lambda: two_ops(scale=1.0),
    "int to bool": lambda: two_ops(scale=True),
    "int to none": lambda: two_ops(scale=None),
    "int to str": lambda: two_ops(scale="1"),
    "zero": lambda: two_ops(scale=0.0),
    "negative zero": lambda: two_ops(scale=-0.0),
    "next float": lambda: two_ops(scale=1.0000000000000002),
    "nan": lambda: two_ops(scale=nan(0x7FF8000000000000)),
    "other nan": lambda: two_ops(scale=nan(0x7FF8000000000001)),
    "negative nan": lambda: two_ops(scale=nan(0xFFF8000000000000)),
    "huge int": lambda: two_ops(scale=2**64),
    "list item": lambda: two_ops(dims=(0,)),
    "list length": lambda: two_ops(dims=(1, 0)),
    "list nesting": lambda: two_ops(dims=((1,),)),
    "keyword value": lambda: two_ops(keywords=(("keepdim", False), ("dtype", torch.float32))),
    "keyword dtype": lambda: two_ops(keywords=(("keepdim", True), ("dtype", torch.float64))),
    "keyword absent": lambda: two_ops(keywords=(("keepdim", True),)),
    "keyword name": lambda: two_ops(keywords=(("keepdim", True), ("type", torch.float32))),
    "input dtype": lambda: two_ops(x=value(2, 3, dtype=torch.float16)),
    "input shape": lambda: two_ops(x=value(3, 2)),
    "input rank": lambda: two_ops(x=value(1, 2, 3)),
    "input stride": lambda: two_ops(x=value(2, 3, stride=(1, 2))),
    "input device": lambda: two_ops(x=value(2, 3, device="meta")),
    "input is a constant": lambda: two_ops(x=3),
    "input is none": lambda: two_ops(x=None),
    "second input": lambda: two_ops(w=value(2, 3, dtype=torch.float64)),
    "input more": lambda: two_ops(extra_placeholder=True),
    "output order": lambda: two_ops(results=("sum", None, "total")),
    "output none": lambda: two_ops(results=("total", "sum", None)),
    "output twice": lambda: two_ops(results=("total", "total", "sum")),
    "output is an input": lambda: two_ops(results=("x", None, "sum")),
    "constant bit": lambda: two_ops(constant=torch.tensor([1.0, 0.0, 2.5])),
    "constant dtype": lambda: two_ops(constant=torch.tensor([1.0, -0.0, 2.5]).double()),
    "constant shape": lambda: two_ops(constant=torch.tensor([[1.0, -0.0, 2.5]])),
    "constant stride": lambda: two_ops(constant=torch.tensor([1.0, 0, -0.0, 0, 2.5])[::2]),
    "nested graph": branches,
    "nested graph twice": lambda: branches(same=False),
    "nested operator": lambda: branches(inner=aten.tan.default),
    "views": views,
    "arguments": graphs.every_argument,
}


def test_every_change_of_the_graph_changes_its_key():
    digests = {"unchanged": _core.graph_digest(two_ops())}
    digests |= {change: _core.graph_digest(build()) for change, build in DIFFERENT.items()}
    by_digest: dict[str, str] = {}
    for change, digest in digests.items():
        assert digest not in by_digest, f"{change!r} has the key of {by_digest[digest]!r}"
        by_digest[digest] = change
    assert len(by_digest) == len(DIFFERENT) + 1


def test_random_graphs_differ_by_one_random_mutation():
    """A chain of operators; one operator, operand or number of it is changed."""
    operators = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default)
    generator = random.Random(20261130)

    def build(steps):
        graph = torch.fx.Graph()
        nodes = [graph.placeholder(f"p{index}") for index in range(2)]
        for node in nodes:
            node.meta["val"] = value(2)
        for op, left, right in steps:
            operands = tuple(nodes[i] if isinstance(i, int) else i for i in (left, right))
            nodes.append(graph.call_function(operators[op], operands))
        graph.output(nodes[-1])
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    for _ in range(scaled(1000)):
        steps = [
            (generator.randrange(4), generator.randrange(2 + i), generator.random())
            for i in range(generator.randrange(1, 12))
        ]
        mutated = list(steps)
        place = generator.randrange(len(steps))
        op, left, right = steps[place]
        mutated[place] = generator.choice(
            [
                ((op + 1) % 4, left, right),
                (op, (left + 1) % (2 + place), right),
                (op, left, right + 1),
                (op, left, left),
            ]
        )
        assert _core.graph_digest(build(steps)) == _core.graph_digest(build(list(steps)))
        assert _core.graph_digest(build(steps)) != _core.graph_digest(build(mutated))


def test_key_does_not_depend_on_what_was_traced_before():
    """bugs B11."""
    expected = _core.graph_digest(two_ops())
    torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    operator.add(1, 1)
    assert _core.graph_digest(two_ops()) == expected


@pytest.mark.parametrize("seed", ["0", "4294967295", *(str(n + 1) for n in range(scaled(2)))])
def test_key_does_not_depend_on_the_process(seed, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from tests.key import graphs;"
        "from vllm_neuron import _core;"
        "print(*[_core.graph_digest(build()) for build in graphs.GOLDEN.values()])"
    )
    environment = {"PYTHONHASHSEED": seed, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert child.stdout.split() == [_core.graph_digest(build()) for build in graphs.GOLDEN.values()]
