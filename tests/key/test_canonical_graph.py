"""Canonical bytes become a graph again: equal bytes, equal results, typed errors."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.key import graphs
from vllm_neuron import _core
from vllm_neuron.canonical_graph import constant_contents, decode_graph_module
from vllm_neuron.errors import GraphFormatError

aten = torch.ops.aten


def round_trip(graph_module: fx.GraphModule) -> fx.GraphModule:
    data = _core.graph_bytes(graph_module)
    decoded = decode_graph_module(data, constant_contents(graph_module))
    assert _core.graph_bytes(decoded) == data
    return decoded


@pytest.mark.parametrize("name", graphs.GOLDEN)
def test_decoded_graph_has_equal_bytes(name):
    round_trip(graphs.GOLDEN[name]())


def _attention(x, w, mask):
    q = torch.nn.functional.linear(x, w).reshape(2, 4, 8).transpose(0, 1)
    scores = torch.softmax(q @ q.transpose(1, 2) / 8**0.5 + mask, dim=-1)
    table = torch.tensor([[0.5, -0.0], [float("inf"), 2.0]])
    top = torch.topk(scores.to(torch.bfloat16), 2, dim=-1)
    return (scores @ q)[..., 1:7:2], top.values * table.clamp(max=3.0), top.indices


def test_decoded_graph_computes_the_same():
    generator = torch.Generator().manual_seed(1)
    inputs = (
        torch.randn(2, 32, generator=generator),
        torch.randn(32, 32, generator=generator),
        torch.full((2, 2), float("-inf")).triu(1),
    )
    graph_module = make_fx(_attention)(*inputs)
    for node, value in zip(graph_module.graph.nodes, inputs, strict=False):
        node.meta["val"] = value
    decoded = round_trip(graph_module)
    for result, expected in zip(decoded(*inputs), graph_module(*inputs), strict=True):
        assert torch.equal(result, expected)
        assert result.dtype == expected.dtype
        assert result.stride() == expected.stride()


@pytest.mark.parametrize("predicate", [True, False])
def test_nested_graphs_compute_the_same(predicate):
    graph_module = graphs.branches()
    decoded = round_trip(graph_module)
    inputs = (torch.tensor(predicate), torch.tensor([[0.5, 1.0], [2.0, 3.0]]))
    expected = torch.sin(inputs[1]) if predicate else torch.cos(inputs[1])
    assert all(torch.equal(result, expected) for result in decoded(*inputs))


def _constants(*tensors: torch.Tensor) -> fx.GraphModule:
    root, graph = torch.nn.Module(), fx.Graph()
    for index, tensor in enumerate(tensors):
        setattr(root, f"c{index}", tensor)
    graph.output(tuple(graph.get_attr(f"c{index}") for index in range(len(tensors))))
    return fx.GraphModule(root, graph)


BASE = torch.arange(24, dtype=torch.float32)
CONSTANTS = {
    "two views": (BASE[3:7], BASE[5:]),
    "views of two types": (BASE, BASE.view(torch.int32)[4:8]),
    "expanded": (torch.ones(1, 3).expand(1000, 3),),
    "overlapping": (BASE.as_strided((4, 5), (2, 1), 1),),
    "transposed": (BASE.reshape(4, 6).t(), BASE),
    "with gaps": (BASE[::5],),
    "scalar": (torch.tensor(3.5),),
    "empty": (torch.empty(0, 7), BASE[2:2], BASE),
    "bool": (torch.tensor([True, False]),),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16),),
    "float8": (torch.ones(3).to(torch.float8_e4m3fn),),
    "conjugate": (torch.tensor([1 + 2j, 3 - 4j]).conj(),),
    "negated": (torch.tensor([1 + 2j]).conj().imag,),
    "parameter": (torch.nn.Parameter(torch.ones(2)),),
    "one object twice": (BASE, BASE),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_constants_keep_content_and_sharing(case):
    tensors = CONSTANTS[case]
    results = round_trip(_constants(*tensors))()
    for result, tensor in zip(results, tensors, strict=True):
        assert torch.equal(result.to(torch.complex128), tensor.detach().to(torch.complex128))
        assert result.stride() == tensor.stride()


def test_placeholder_values_take_no_memory():
    graph_module = graphs.two_ops(x=graphs.value(1 << 20, 1 << 18, device="meta"))
    data, contents = _core.graph_bytes(graph_module), constant_contents(graph_module)
    decoded = decode_graph_module(data, contents)
    x, w = (node.meta["val"] for node in decoded.graph.nodes if node.op == "placeholder")
    assert (x.shape, x.device.type) == ((1 << 20, 1 << 18), "meta")
    assert (w.shape, w.dtype, w.device.type) == ((2, 3), torch.float32, "cpu")


def test_placeholder_values_can_be_scalars():
    for value in (None, True, 7, 2**70, 1.5, 1 + 2j, "text", b"bytes"):
        decoded = round_trip(graphs.two_ops(w=value))
        _, w = (node for node in decoded.graph.nodes if node.op == "placeholder")
        assert w.meta["val"] == value


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def stream(*nodes: bytes, count: int | None = None) -> bytes:
    return b"VNGRAPH\0" + struct.pack("<II", 1, count or len(nodes)) + b"".join(nodes)


SPEC = text("float32") + text("cpu") + text("strided") + struct.pack("<Iqq", 1, 4, 1)
OUTPUT = b"\x04\x10"
DIGEST = bytes(32)


def call(target: bytes, arguments: bytes = bytes(4), keywords: bytes = bytes(4)) -> bytes:
    return b"\x03" + target + arguments + keywords


ADD = b"\x24" + text("aten::add") + text("Tensor")
DEEP = b"\x1a\1\0\0\0" * 65 + b"\x1a\0\0\0\0"
REFUSED = {
    "nothing": (b"", 0, "8 bytes", "0 until the end"),
    "other magic": (b"VNGRAPH\1" + bytes(8), 0, "56 4e", "48 01"),
    "other version": (b"VNGRAPH\0" + struct.pack("<II", 2, 1) + OUTPUT, 8, "1", "2"),
    "no nodes": (stream(), 16, "at least 1, the output", "0"),
    "count of nodes": (stream(OUTPUT, count=2**32 - 1), 12, "at most 2,", "4294967295"),
    "bytes behind": (stream(OUTPUT) + b"x", 18, "nothing more", "1 bytes"),
    "no output": (stream(b"\x01\x10"), 16, "the output as the last node", "another node"),
    "two outputs": (stream(OUTPUT, OUTPUT), 16, "one output", "an output before it"),
    "node tag": (stream(b"\x05"), 16, "tag 01 to 04", "05"),
    "argument tag": (stream(b"\x04\x27"), 17, "tag 10 to 26", "27"),
    "value tag": (stream(b"\x01\x1a", OUTPUT), 17, "tag 40, 10 to 18 or 1e", "1a"),
    "constant tag": (stream(b"\x02\x34", OUTPUT), 17, "tag 30 to 33", "34"),
    "target tag": (stream(call(b"\x10"), OUTPUT), 17, "tag 24 to 26", "10"),
    "later node": (stream(b"\x04\x19" + bytes(4)), 18, "less than 0", "0"),
    "itself": (
        stream(b"\x01\x10", call(ADD, b"\1\0\0\0\x19\1\0\0\0"), OUTPUT), 48, "less than 1", "1",
    ),
    "not UTF-8": (stream(b"\x04\x17\1\0\0\0\xff"), 22, "UTF-8", "bytes that are none"),
    "length of a str": (stream(b"\x04\x17\xff\xff\xff\xff"), 18, "at most 0", "4294967295"),
    "small big int": (stream(b"\x04\x14\1\0\0\0\1"), 18, "more than 8", "1 bytes"),
    "long big int": (
        stream(b"\x04\x14\x0a\0\0\0" + b"\xff" * 8 + bytes(2)), 18, "the fewest", "10 bytes",
    ),
    "keywords out of order": (
        stream(call(ADD, keywords=b"\2\0\0\0" + text("b") + b"\x10" + text("a") + b"\x10"), OUTPUT),
        55, 'a name after "b"', '"a"',
    ),
    "keyword twice": (
        stream(call(ADD, keywords=b"\2\0\0\0" + (text("b") + b"\x10") * 2), OUTPUT),
        55, 'a name after "b"', '"b"',
    ),
    "keyword is code": (
        stream(call(ADD, keywords=b"\1\0\0\0" + text("a=1);exit(") + b"\x10"), OUTPUT),
        49, "a name", '"a=1);exit("',
    ),
    "too deep": (stream(b"\x04" + DEEP), 17 + 64 * 5, "at most 64 deep", "a deeper one"),
    "graphs too deep": (
        stream(b"\x02\x32\1\0\0\0" * 17 + OUTPUT), 17 + 16 * 6, "at most 16 deep", "a deeper one",
    ),
    "triton kernel": (
        stream(call(b"\x25" + text("triton_kernel_wrapper_functional")), OUTPUT),
        18, "one of associative_scan", '"triton_kernel_wrapper_functional"',
    ),
    "sparse": (
        stream(b"\x01\x40" + SPEC.replace(text("strided"), text("sparse")), OUTPUT),
        36, "strided", '"sparse"',
    ),
    "negative size": (
        stream(b"\x01\x40" + SPEC[:-16] + struct.pack("<qq", -1, 1), OUTPUT),
        51, "0 or more", "-1",
    ),
    "too many elements": (
        stream(b"\x01\x40" + SPEC[:-16] + struct.pack("<qq", 2**62, 1), OUTPUT),
        51, "a tensor of at most", "shape [4611686018427387904], stride [1]",
    ),
    "rank": (
        stream(b"\x01\x40" + SPEC[:-20] + b"\xff\xff\xff\xff", OUTPUT),
        47, "at most 0", "4294967295",
    ),
    "storage number": (
        stream(b"\x02\x30" + SPEC + b"\1\0\0\0" + bytes(8) + DIGEST, OUTPUT),
        67, "at most 0, the next one", "1",
    ),
    "storage offset": (
        stream(b"\x02\x30" + SPEC + bytes(4) + struct.pack("<q", -1) + DIGEST, OUTPUT),
        71, "an element of a storage", "-1",
    ),
    "constant number": (stream(b"\x02\x31" + bytes(4), OUTPUT), 18, "less than 0", "0"),
    "graph number": (stream(b"\x02\x33" + bytes(4), OUTPUT), 18, "less than 0", "0"),
    # What only torch can tell; the offset is the node's.
    "operator": (
        stream(call(b"\x24" + text("aten::addd") + text("Tensor")), OUTPUT),
        16, f"one that torch {torch.__version__} has", "'aten::addd.Tensor'",
    ),
    "attribute of a class": (
        stream(call(b"\x24" + text("aten::__class__") + text("__init__")), OUTPUT),
        16, "one that torch", "'aten::__class__.__init__'",
    ),
    "class of the operator module": (
        stream(call(b"\x26" + text("attrgetter")), OUTPUT), 16, "one that torch", "'attrgetter'",
    ),
    "dtype": (stream(b"\x04\x20" + text("load")), 16, "one that torch", "'load'"),
    "layout": (stream(b"\x04\x21" + text("save")), 16, "one that torch", "'save'"),
    "memory format": (stream(b"\x04\x22" + text("hub")), 16, "one that torch", "'hub'"),
    "device": (stream(b"\x04\x23" + text("toaster")), 16, "one that torch", "'toaster'"),
    "keyword is a word of Python's": (
        stream(call(ADD, keywords=b"\1\0\0\0" + text("lambda") + b"\x10"), OUTPUT),
        16, "no word of Python's", "'lambda'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bytes_that_are_no_graph_are_refused_with_their_place(case):
    data, offset, expected, found = REFUSED[case]
    with pytest.raises(GraphFormatError) as caught:
        decode_graph_module(data)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.offset == offset
    assert expected in error.expected
    assert found in error.found
    assert str(error).endswith(f"expected {error.expected}, found {error.found}")


def _constant(*, digest: str, shape=(4,), stride=(1,), offset=0, device="cpu") -> bytes:
    spec = text("uint8") + text(device) + text("strided") + struct.pack("<I", len(shape))
    sizes = struct.pack(f"<{2 * len(shape)}q", *shape, *stride)
    place = struct.pack("<Iq", 0, offset)
    return b"\x02\x30" + spec + sizes + place + bytes.fromhex(digest)


FOUR = b"four"
NAMED = _core.digest(FOUR)
UNBUILDABLE = {
    "no content": ([_constant(digest=NAMED)], {}, "its content", "none"),
    "short content": ([_constant(digest=NAMED)], {NAMED: b"for"}, "4 bytes of content", "3"),
    "other content": (
        [_constant(digest=NAMED)], {NAMED: b"fake"}, f"content with digest {NAMED}",
        _core.digest(b"fake"),
    ),
    "huge storage": (
        [_constant(digest=NAMED, stride=(2**40,))], {NAMED: FOUR}, "at most 4294967296 bytes",
        str(3 * 2**40 + 1),
    ),
    "far away": (
        [_constant(digest=NAMED, offset=2**40)], {NAMED: FOUR}, "at most 4294967296 bytes",
        str(2**40 + 4),
    ),
    "huge but for no content": (
        [_constant(digest=NAMED, shape=(2**40,), stride=(0,))], {NAMED: FOUR},
        f"{2**40} bytes of content", "4",
    ),
    "two contents in one place": (
        [_constant(digest=NAMED), _constant(digest=_core.digest(b"five"))],
        {NAMED: FOUR, _core.digest(b"five"): b"five"}, "one content of storage 0",
        "another one by a second view",
    ),
    "on another device": (
        [_constant(digest=NAMED, device="cuda")], {NAMED: FOUR}, "cpu", "cuda",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNBUILDABLE)
def test_constants_that_cannot_be_built_are_refused(case):
    nodes, contents, expected, found = UNBUILDABLE[case]
    with pytest.raises(GraphFormatError) as caught:
        decode_graph_module(stream(*nodes, OUTPUT), contents)
    assert (caught.value.offset, caught.value.found) == (16, found)
    assert expected in caught.value.expected


def test_decoding_takes_a_small_multiple_of_the_bytes():
    data = stream(b"\x04\x1a" + struct.pack("<I", 1 << 20) + b"\x10" * (1 << 20))
    _core.decode_graph(stream(OUTPUT))
    tracemalloc.start()
    try:
        _core.decode_graph(data)
        assert tracemalloc.get_traced_memory()[1] < 32 * len(data)
    finally:
        tracemalloc.stop()
