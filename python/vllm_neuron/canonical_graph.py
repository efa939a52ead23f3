"""Canonical graph bytes back into a `torch.fx.GraphModule` (docs/key-format.md, "Decoding").

The bytes name constants by their digest; their content travels beside them:

    data, contents = _core.graph_bytes(graph_module), constant_contents(graph_module)
    equal = decode_graph_module(data, contents)

Runs on torch 2.9 and later and imports nothing of this package but `_core` and `errors`, so that a
worker with another torch can use it.
"""

from __future__ import annotations

import _operator
import keyword
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from typing_extensions import Buffer

from vllm_neuron import _core
from vllm_neuron.errors import GraphFormatError

__all__ = ["MAX_CONSTANT_BYTES", "constant_contents", "decode_graph_module"]

MAX_CONSTANT_BYTES = 1 << 32
"""Memory that the constants of one graph may take unless the caller says otherwise."""

_T = TypeVar("_T")


def constant_contents(graph_module: fx.GraphModule) -> dict[str, bytes]:
    """Return the content of each constant of a graph by its digest, nested graphs included.

    Args:
        graph_module: a graph that has canonical bytes.

    Returns:
        Elements in row-major order; equal contents once.
    """
    contents: dict[str, bytes] = {}
    for node in graph_module.graph.nodes:
        if node.op != "get_attr":
            continue
        value: Any = graph_module
        for name in node.target.split("."):
            value = getattr(value, name)
        if isinstance(value, fx.GraphModule):
            contents |= constant_contents(value)
        else:
            content = _content(value)
            contents[_core.digest(content)] = content
    return contents


def decode_graph_module(
    data: Buffer,
    contents: Mapping[str, Buffer] | None = None,
    *,
    max_constant_bytes: int = MAX_CONSTANT_BYTES,
) -> fx.GraphModule:
    """Build the graph that canonical bytes describe.

    The result has equal canonical bytes and computes the same. Names, metadata and device indices
    are not in the bytes; placeholders get a fake tensor (no memory) or a scalar as `meta["val"]`.

    Args:
        data: what `_core.graph_bytes` gave.
        contents: content of each constant by its digest, as from `constant_contents`.
        max_constant_bytes: memory that the constants may take in all.

    Raises:
        GraphFormatError: the bytes break the format, name something that this torch does not have
            or a constant whose content was not given. Attributes: `offset`, `expected`, `found`.
    """
    graph = _core.decode_graph(data)
    constants = _tensors(graph, contents or {}, max_constant_bytes)
    return _Builder(constants, FakeTensorMode()).build(graph)


def _error(what: str, offset: int, expected: object, found: object) -> GraphFormatError:
    message = f"{what} at offset {offset}: expected {expected}, found {found}"
    return GraphFormatError(message, offset=offset, expected=str(expected), found=str(found))


def _content(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    dense = plain.clone(memory_format=torch.contiguous_format)
    return bytes(dense.reshape(-1).view(torch.uint8).numpy())


def _instance(value: object, kind: type[_T], what: str, name: str, offset: int) -> _T:
    if isinstance(value, kind):
        return value
    raise _unknown(what, name, offset)


def _unknown(what: str, name: str, offset: int) -> GraphFormatError:
    return _error(what, offset, f"one that torch {torch.__version__} has", repr(name))


def _dtype(name: str, offset: int) -> torch.dtype:
    return _instance(getattr(torch, name, None), torch.dtype, "dtype", name, offset)


def _device(name: str, offset: int) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise _unknown("device type", name, offset) from error


def _constant_nodes(
    graph: _core.CanonicalGraph,
) -> Iterator[tuple[int, _core.CanonicalConstant]]:
    for node in graph.nodes:
        if isinstance(node.target, _core.CanonicalConstant):
            yield node.offset, node.target
        elif isinstance(node.target, _core.CanonicalGraph):
            yield from _constant_nodes(node.target)


def _tensors(
    graph: _core.CanonicalGraph, contents: Mapping[str, Buffer], max_bytes: int
) -> dict[_core.CanonicalConstant, torch.Tensor]:
    """Make the constants, those of one storage in one storage."""
    # An object that is used again is the same one again; the first offset tells where it is.
    first: dict[_core.CanonicalConstant, int] = {}
    storages: dict[int, list[_core.CanonicalConstant]] = {}
    for offset, constant in _constant_nodes(graph):
        if constant not in first:
            first[constant] = offset
            storages.setdefault(constant.storage, []).append(constant)
    used_bytes = 0
    made: dict[_core.CanonicalConstant, torch.Tensor] = {}
    for sharing in storages.values():
        # An empty tensor, too, tells by its memory with whom it shares.
        size_bytes = max(1, *(_end_bytes(constant, first[constant]) for constant in sharing))
        used_bytes += size_bytes
        if used_bytes > max_bytes:
            offset = first[sharing[0]]
            raise _error("constants", offset, f"at most {max_bytes} bytes", used_bytes)
        storage = torch.UntypedStorage(size_bytes)
        for constant in sharing:
            content = contents.get(constant.digest)
            made[constant] = _fill(storage, constant, content, first[constant])
        for constant in sharing:
            if _core.digest(_content(made[constant])) != constant.digest:
                expected = f"one content of storage {constant.storage}"
                raise _error("constant", first[constant], expected, "another one by a second view")
    return made


def _end_bytes(constant: _core.CanonicalConstant, offset: int) -> int:
    tensor = constant.tensor
    if tensor.device_type != "cpu":
        raise _error("device type of a constant", offset, "cpu", tensor.device_type)
    if 0 in tensor.shape:
        return 0
    steps = zip(tensor.shape, tensor.stride, strict=True)
    end = constant.storage_offset + sum((size - 1) * stride for size, stride in steps) + 1
    return end * _dtype(tensor.dtype, offset).itemsize


def _fill(
    storage: torch.UntypedStorage,
    constant: _core.CanonicalConstant,
    content: Buffer | None,
    offset: int,
) -> torch.Tensor:
    if content is None:
        raise _error("constant", offset, f"its content ({constant.digest})", "none")
    content_bytes = memoryview(content).cast("B")
    shape, stride = constant.tensor.shape, constant.tensor.stride
    dtype = _dtype(constant.tensor.dtype, offset)
    count = 1
    for size in shape:
        count *= size
    if len(content_bytes) != count * dtype.itemsize:
        expected = f"{count * dtype.itemsize} bytes of content"
        raise _error("constant", offset, expected, len(content_bytes))
    if _core.digest(content_bytes) != constant.digest:
        found = _core.digest(content_bytes)
        raise _error("constant", offset, f"content with digest {constant.digest}", found)
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, constant.storage_offset, shape, stride)
    if count > 0:
        values = torch.frombuffer(bytearray(content_bytes), dtype=torch.uint8).view(dtype)
        if tensor.is_contiguous():
            tensor.copy_(values.reshape(shape))
        else:
            _scatter(tensor, values)
    return tensor


def _scatter(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write row-major values to a tensor whose elements may lie on each other."""
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size) * step
        places += steps.reshape([-1] + [1] * (tensor.dim() - 1 - axis))
    flat = places.reshape(-1)
    tensor.as_strided((int(flat[-1]) + 1,), (1,))[flat] = values


class _Builder:
    """Builds graph modules; a graph or constant that is used twice becomes one object."""

    def __init__(
        self,
        constants: Mapping[_core.CanonicalConstant, torch.Tensor],
        fake_mode: FakeTensorMode,
    ) -> None:
        self._constants = {constant: index for index, constant in enumerate(constants)}
        self._tensors = list(constants.values())
        self._modules: dict[_core.CanonicalGraph, tuple[int, fx.GraphModule]] = {}
        self._fake_mode = fake_mode

    def build(self, graph: _core.CanonicalGraph) -> fx.GraphModule:
        built, root = fx.Graph(), torch.nn.Module()
        nodes: list[fx.Node] = []
        for index, node in enumerate(graph.nodes):
            args = tuple(self._argument(argument, nodes, node.offset) for argument in node.args)
            match node.op:
                case "placeholder":
                    added = built.placeholder(f"argument_{index}")
                    value = node.target
                    if isinstance(value, _core.CanonicalTensor):
                        value = self._fake(value, node.offset)
                    added.meta["val"] = value
                case "get_attr":
                    name, attribute = self._attribute(node.target)
                    setattr(root, name, attribute)
                    added = built.create_node("get_attr", name)
                case "call_function":
                    for name in node.kwargs:
                        if keyword.iskeyword(name):
                            what = "name of a keyword argument"
                            raise _error(what, node.offset, "no word of Python's", repr(name))
                    kwargs = {
                        name: self._argument(argument, nodes, node.offset)
                        for name, argument in node.kwargs.items()
                    }
                    target = _named_object(node.target, node.offset)
                    added = built.create_node("call_function", target, args, kwargs)
                case _:
                    added = built.create_node("output", "output", args)
            nodes.append(added)
        # Its source text is made and run by the first call only: not every argument that a graph
        # can hold has one, and walking a graph needs none.
        return _LazyGraphModule(root, built)

    def _attribute(self, target: Any) -> tuple[str, torch.Tensor | fx.GraphModule]:
        if isinstance(target, _core.CanonicalConstant):
            number = self._constants[target]
            return f"constant_{number}", self._tensors[number]
        if target not in self._modules:
            module = self.build(target)
            self._modules[target] = (len(self._modules), module)
        number, module = self._modules[target]
        return f"graph_{number}", module

    def _fake(self, tensor: _core.CanonicalTensor, offset: int) -> torch.Tensor:
        dtype = _dtype(tensor.dtype, offset)
        device = _device(tensor.device_type, offset)
        if device.type == "meta":
            return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)
        with self._fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)

    def _argument(self, argument: Any, nodes: list[fx.Node], offset: int) -> Any:
        match argument:
            case _core.NodeReference():
                return nodes[argument.index]
            case _core.NamedObject():
                return _named_object(argument, offset)
            case list():
                return [self._argument(item, nodes, offset) for item in argument]
            case tuple():
                return tuple(self._argument(item, nodes, offset) for item in argument)
            case dict():
                return {
                    name: self._argument(item, nodes, offset) for name, item in argument.items()
                }
            case slice():
                parts = (argument.start, argument.stop, argument.step)
                return slice(*(self._argument(part, nodes, offset) for part in parts))
            case _:
                return argument


def _named_object(named: _core.NamedObject, offset: int) -> Any:
    """Return what is named; only what is of the expected type, whatever the name is."""
    name = named.name
    match named.kind:
        case "dtype":
            return _dtype(name, offset)
        case "layout":
            return _instance(getattr(torch, name, None), torch.layout, "layout", name, offset)
        case "memory_format":
            value = getattr(torch, name, None)
            return _instance(value, torch.memory_format, "memory format", name, offset)
        case "device":
            return _device(name, offset)
        case "higher_order_operator":
            value = getattr(torch.ops.higher_order, name, None)
            if isinstance(value, HigherOrderOperator):
                return value
            raise _unknown("higher-order operator", name, offset)
        case "function":
            value = getattr(_operator, name, None)
            return _instance(value, BuiltinFunctionType, "function", name, offset)
        case _:
            return _operator_overload(name, named.overload or "default", offset)


def _operator_overload(name: str, overload: str, offset: int) -> OpOverload:
    namespace, _, plain = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    found = getattr(packet, overload, None)
    operator = _instance(found, OpOverload, "operator", f"{name}.{overload}", offset)
    if (operator._schema.name, operator._overloadname) != (name, overload):
        raise _error("operator", offset, f"{name}.{overload}", str(operator))
    return operator
