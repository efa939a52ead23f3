"""What is in graph bytes, and what is refused."""

from __future__ import annotations

import math
import operator
import pickle
import threading

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.key import graphs
from tests.key.decode import decode
from vllm_neuron import _core
from vllm_neuron.errors import GraphKeyError

aten = torch.ops.aten


def test_every_part_of_a_graph_is_in_its_bytes():
    assert decode(_core.graph_bytes(graphs.two_ops())) == [
        ("placeholder", ("float32", "cpu", "strided", (2, 3), (3, 1))),
        ("placeholder", ("float32", "cpu", "strided", (2, 3), (3, 1))),
        (
            "get_attr",
            (
                "constant", "float32", "cpu", "strided", (3,), (1,), 0, 0,
                _core.digest(torch.tensor([1.0, -0.0, 2.5]).numpy()),
            ),
        ),
        (
            "call_function",
            ("operator", "aten::add", "Tensor"),
            (("node", 0), ("node", 1)),
            {"alpha": 1},
        ),
        ("call_function", ("operator", "aten::mul", "Tensor"), (("node", 3), ("node", 2)), {}),
        (
            "call_function",
            ("operator", "aten::sum", "dim_IntList"),
            (("node", 4), [1]),
            {"dtype": ("dtype", "float32"), "keepdim": True},
        ),
        ("output", (("node", 4), None, ("node", 5))),
    ]  # fmt: skip


def test_every_kind_of_argument_is_exact():
    _, (_, _, arguments, _), _ = decode(_core.graph_bytes(graphs.every_argument()))
    expected = (
        ("node", 0),
        None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**70, -(2**70),
        0.0, -0.0, 1.5, float("inf"), complex(1, -2), "text \u00e9", b"\x00bytes",
        [1, [2.0]], (3, ()), (4, 5), {"a": [None], "b": 1},
        slice(None, 7, 2), ..., ("dtype", "bfloat16"), ("layout", "strided"),
        ("memory format", "channels_last"), ("device", "cpu"),
        ("operator", "aten::relu", "default"), ("function", "getitem"),
    )  # fmt: skip
    assert arguments == expected
    assert [type(found) for found in arguments] == [type(value) for value in expected]
    assert math.copysign(1, arguments[13]) == -1


def test_nested_graphs_are_written_once_per_module():
    nodes = decode(_core.graph_bytes(graphs.branches()))
    constants = [node[1] for node in nodes if node[0] == "get_attr"]
    inner = [
        ("placeholder",),
        ("call_function", ("operator", "aten::sin", "default"), (("node", 0),), {}),
        ("output", (("node", 1),)),
    ]
    assert constants[0] == ("graph", inner)
    assert [constant[0] for constant in constants[1:]] == ["graph", "graph again", "graph again"]
    assert constants[2:] == [("graph again", 0), ("graph again", 1)]
    assert nodes[4][1] == ("higher-order operator", "cond")


def test_constants_keep_sharing_and_content():
    nodes = decode(_core.graph_bytes(graphs.views()))
    head, tail, columns, again, empty = (node[1] for node in nodes[:5])
    assert (head[6], tail[6], columns[6], empty[6]) == (0, 0, 1, 2)
    assert (head[7], tail[7]) == (0, 3)
    assert again == ("constant again", 0)
    # Content is in row-major order of the elements, whatever the strides are.
    transposed = torch.arange(6, dtype=torch.int32).reshape(2, 3).t().contiguous()
    assert columns[4:6] == ((3, 2), (1, 3))
    assert columns[8] == _core.digest(transposed.numpy())
    assert empty[8] == _core.digest(b"")


@pytest.mark.parametrize(
    ("tensor", "content"),
    [
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]).numpy()),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0]).numpy()),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2).numpy()),
        (torch.ones(3, dtype=torch.bfloat16), b"\x80\x3f" * 3),
        (torch.tensor(7, dtype=torch.uint8), b"\x07"),
    ],
)
def test_content_of_a_constant_is_its_values(tensor, content):
    nodes = decode(_core.graph_bytes(graphs.two_ops(constant=tensor)))
    assert nodes[2][1][-1] == _core.digest(content)


def test_traced_graph_has_bytes():
    def step(x, w):
        y = torch.nn.functional.linear(x, w) + torch.tensor([1.0, -0.0])
        left, right = y.split(1, dim=1)
        return left.to(torch.float16), None, right.sum()

    traced = make_fx(step, tracing_mode="fake")(torch.randn(3, 4), torch.randn(2, 4))
    nodes = decode(_core.graph_bytes(traced))
    assert nodes[0] == ("placeholder", ("float32", "cpu", "strided", (3, 4), (4, 1)))
    targets = [node[1][1] for node in nodes if node[0] == "call_function"]
    assert targets[:2] == ["aten::t", "aten::mm"]
    assert targets.count("getitem") == 2
    assert _core.graph_digest(traced) == _core.digest(_core.graph_bytes(traced))


def _symbolic():
    return make_fx(lambda x: x.view(-1), tracing_mode="symbolic")(torch.randn(3, 4))


def _fake_constant():
    with FakeTensorMode():
        constant = torch.ones(3)
    return graphs.two_ops(constant=constant)


def _module_call():
    root = torch.nn.Module()
    root.inner = torch.nn.ReLU()
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = graphs.value(2)
    graph.output(graph.call_module("inner", (x,)))
    return fx.GraphModule(root, graph)


def _deep(depth):
    nested: list = []
    for _ in range(depth):
        nested = [nested]
    return graphs.call(aten.add.Tensor, (nested,))


class _Subclass(torch.Tensor):
    pass


class _Int(int):
    pass


STATIC = "only static shapes are compiled"
NO_FORM = "it has no canonical form"
NO_NAME = "its name does not say what it does"
REFUSED = {
    "symbolic shape": (_symbolic, "x_1", "torch.SymInt", STATIC),
    "set": (lambda: graphs.call(aten.add.Tensor, ({1, 2},)), "add_tensor", "set", NO_FORM),
    "generator": (
        lambda: graphs.call(aten.rand_like.default, (), {"generator": torch.Generator()}),
        "rand_like_default", "torch._C.Generator", NO_FORM,
    ),
    "subclass of int": (
        lambda: graphs.call(aten.add.Tensor, (_Int(1),)),
        "add_tensor", f"{__name__}._Int", NO_FORM,
    ),
    "tensor argument": (
        lambda: graphs.call(aten.add.Tensor, (torch.ones(1),)),
        "add_tensor", "torch.Tensor", NO_FORM,
    ),
    "too deep": (lambda: _deep(70), "add_tensor", "torch.fx.immutable_collections.immutable_list",
                 "the argument is nested too deeply"),
    "python function": (lambda: graphs.call(max, (1,)), "max_1", "builtin_function_or_method",
                        NO_NAME),
    "lambda": (lambda: graphs.call(lambda x: x), "_lambda_", "function", NO_NAME),
    "packet without overload": (lambda: graphs.call(aten.add, (1,)), "add",
                                "torch._ops.OpOverloadPacket", NO_NAME),
    "index into a table of the process": (
        lambda: graphs.call(torch.ops.higher_order.triton_kernel_wrapper_functional, (0,)),
        "triton_kernel_wrapper_functional",
        "torch._higher_order_ops.triton_kernel_wrap.TritonKernelWrapperFunctional", NO_NAME,
    ),
    "call_module": (_module_call, "inner", "str", "nodes of this kind are not ATen operators"),
    "fake constant": (_fake_constant, "constant", "torch._subclasses.fake_tensor.FakeTensor",
                      "only plain tensors and graphs can be constants"),
    "sparse input": (lambda: graphs.two_ops(x=torch.ones(2).to_sparse()), "x", "torch.Tensor",
                     "only strided tensors have a canonical form"),
    "nested constant": (
        lambda: graphs.two_ops(constant=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "constant", "torch.Tensor", "only strided tensors have a canonical form",
    ),
    "text that is no Unicode": (
        lambda: graphs.call(aten.add.Tensor, ("\ud800",)), "add_tensor", "str",
        "a str with a lone surrogate is no Unicode text",
    ),
    "name that is no Unicode": (
        lambda: graphs.call(aten.add.Tensor, ({"\ud800": 1},)), "add_tensor", "str",
        "a str with a lone surrogate is no Unicode text",
    ),
    "subclass as input": (
        lambda: graphs.two_ops(x=torch.ones(2).as_subclass(_Subclass)),
        "x", f"{__name__}._Subclass", "a tensor subclass has a meaning of its own",
    ),
    "object as input": (lambda: graphs.two_ops(x=object()), "x", "object",
                        "only tensors and constants can be inputs of a static graph"),
    "constant without content": (
        lambda: graphs.two_ops(constant=torch.ones(3, device="meta")),
        "constant", "torch.Tensor", "the constant has no plain content",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*")
def test_what_cannot_be_keyed_is_refused_by_name(case):
    build, node, type_name, reason = REFUSED[case]
    graph_module = build()
    for function in (_core.graph_bytes, _core.graph_digest):
        with pytest.raises(GraphKeyError) as caught:
            function(graph_module)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.node, error.type_name, error.reason) == (node, type_name, reason)
        assert str(error).startswith(f"node {node}: ")
        assert type_name in str(error)
        assert " object at 0x" not in str(error)


def test_placeholder_without_value_is_refused():
    graph_module = graphs.two_ops()
    del next(iter(graph_module.graph.nodes)).meta["val"]
    with pytest.raises(GraphKeyError, match=r"the placeholder has no meta\['val'\]"):
        _core.graph_bytes(graph_module)


def test_only_graph_modules_are_taken():
    with pytest.raises(TypeError, match=r"expected a torch.fx.GraphModule, found torch.nn"):
        _core.graph_bytes(torch.nn.ReLU())


def test_constants_made_on_access_do_not_share_a_number():
    class Made(fx.GraphModule):
        @property
        def one(self):
            return torch.ones(1)

        @property
        def two(self):
            return torch.full((1,), 2.0)

    graph = fx.Graph()
    graph.output((graph.get_attr("one"), graph.get_attr("two")))
    root = torch.nn.Module()
    root.one, root.two = torch.zeros(1), torch.zeros(1)
    graph_module = fx.GraphModule(root, graph)
    graph_module.__class__ = Made
    first, second, _ = decode(_core.graph_bytes(graph_module))
    assert (first[1][0], second[1][0]) == ("constant", "constant")
    assert first[1][-1] != second[1][-1]


def test_hashing_a_large_constant_lets_other_threads_run():
    graph_module = graphs.two_ops(constant=torch.zeros(1 << 28, dtype=torch.uint8))
    _core.graph_digest(graphs.two_ops())
    ticks, done = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    _core.graph_digest(graph_module)
    during = ticks - before
    done.set()
    thread.join()
    # Tens of milliseconds of hashing; with the GIL held the thread would run once at most.
    assert during >= 3


def test_getitem_is_named_by_identity():
    imposter = graphs.call(aten.add.Tensor, (operator.getitem,))
    assert ("function", "getitem") in decode(_core.graph_bytes(imposter))[1][2]
