"""A captured graph as plain data, so that a process without torch can lower it.

Every node becomes an operator name with its arguments in schema order, defaults filled in. Values
are numbered; literals carry their kind. Weights are graph inputs and appear as a shape and a dtype;
only tensors that the model's code writes out (`torch.tensor([0.5])`) travel as bytes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from vllm_neuron.capture import CapturedGraph
from vllm_neuron.dynamo_trace import operands_text, source_line
from vllm_neuron.errors import LoweringError

if TYPE_CHECKING:
    from vllm_neuron.trace_record import TraceRecord

__all__ = ["EncodedGraph", "GraphMessage", "NodeOrigin", "encode_graph", "lowering_error"]

# A literal tensor of the model's code is written into the module; above this size it belongs in a
# buffer, or the module and its cache entry would carry it.
MAX_LITERAL_BYTES = 1 << 20

# A constant that the graph would compute is written out up to this size.
MAX_FOLDED_BYTES = 1 << 16

# Besides the pointwise operators, those that eager's CPU kernels compute in float32 when their
# operands are float16 or bfloat16. Products of matrices are left alone: hardware takes narrow
# operands there and accumulates in float32 itself.
_COMPUTED_WIDE = {
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.avg_pool2d.default,
}
_COMPARISONS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
}

# Operators whose strides count in the storage of their first argument, whatever its own strides.
_READS_STORAGE = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
}

# Dtypes of which the native route has no tensors, by what to compute in instead. complex128 is one
# within a graph only: NEFF files have no name for it.
_INSTEAD = {
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64, if the values fit",
    "complex128": "complex64, or float64 pairs (torch.view_as_real)",
}

# Window functions, which are constants.
_WINDOWS = {
    f"aten::{name}_window" for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")
}

# Operators that return their first argument as a value, whatever the memory format.
_IDENTITIES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh_copy.default,
}


@dataclass(frozen=True, slots=True)
class NodeOrigin:
    """Where a node of a message comes from, for error messages.

    Attributes:
        op: the ATen operator, such as `aten.topk.default`.
        operands: dtype and shape of each tensor operand, `float32[4, 8], int64[4]`.
        source: `file:line` of the model, or None.
    """

    op: str
    operands: str
    source: str | None

    @classmethod
    def of(cls, node: torch.fx.Node) -> NodeOrigin:
        """Describe a node of a captured graph."""
        return cls(str(node.target), operands_text(node), source_line(node.stack_trace))


@dataclass(frozen=True, slots=True)
class GraphMessage:
    """What a lowering process is sent.

    Attributes:
        header: JSON tree with `inputs`, `literals`, `nodes`, `outputs` and `aliases`. A node has
            its operator `op`, `args`, `results` (number, dtype, shape), whether it
            `returns_list`, all `dtypes` of its tensors, whether eager has narrow floats
            `computed_wide`, for a comparison the `common` dtype of its operands, and for a strided
            view the `storage_order` of its tensor's dimensions.
        literals: bytes of the literal tensors, in the order of `header["literals"]`.
        origins: where each entry of `header["nodes"]` comes from.
    """

    header: dict[str, Any]
    literals: bytes
    origins: tuple[NodeOrigin, ...]


@dataclass(frozen=True, slots=True)
class EncodedGraph:
    """A graph that another process captured, as the message to be lowered.

    Attributes:
        message: what a lowering process is sent.
        record: as in `CapturedGraph`.
        bucket: the bucket's name.
    """

    message: GraphMessage
    record: TraceRecord
    bucket: str


def encode_graph(graph: CapturedGraph, *, bucket: str, route: str) -> GraphMessage:
    """Write a graph out as data; bucket and route are for messages.

    Raises:
        LoweringError: it holds something that is not an operator on tensors, or a large literal.
    """
    return _Encoder(graph, bucket, route).message()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec(value: torch.Tensor) -> list[Any]:
    return [_dtype_name(value.dtype), list(value.shape)]


class _Encoder:
    def __init__(self, graph: CapturedGraph, bucket: str, route: str) -> None:
        self.captured = graph
        self.bucket = bucket
        self.route = route
        self.values: dict[torch.fx.Node, Any] = {}
        self.count = 0
        self.nodes: list[dict[str, Any]] = []
        self.origins: list[NodeOrigin] = []
        self.literal_specs: list[list[Any]] = []
        self.literals = bytearray()

    def message(self) -> GraphMessage:
        inputs = []
        outputs: list[int] = []
        for node in self.captured.graph_module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._new_value()
                inputs.append(_spec(node.meta["val"]))
                self._check_dtype(next(iter(node.users), node), "it takes", node.meta["val"])
            elif node.op == "get_attr":
                self.values[node] = self._literal(node)
            elif node.op == "output":
                outputs = [self.values[item] for item in node.args[0]]
                for item in node.args[0]:
                    self._check_dtype(item, "it returns", item.meta["val"])
            else:
                self._call(node)
        header = {
            "inputs": inputs,
            "literals": self.literal_specs,
            "nodes": self.nodes,
            "outputs": outputs,
            "aliases": sorted(self.captured.record.aliases.items()),
        }
        return GraphMessage(header, bytes(self.literals), tuple(self.origins))

    def _new_value(self) -> int:
        self.count += 1
        return self.count - 1

    def _refuse(self, node: torch.fx.Node, reason: str) -> LoweringError:
        return lowering_error(self.bucket, node, reason, route=self.route)

    def _check_dtype(self, node: torch.fx.Node, what: str, tensor: torch.Tensor) -> None:
        instead = _INSTEAD.get(_dtype_name(tensor.dtype))
        if instead is not None and self.route == "native":
            raise self._refuse(
                node,
                f"{what} a tensor of {_dtype_name(tensor.dtype)}, which the route has not; "
                f"compute in {instead}, and convert arguments before the step",
            )

    def _folded(self, node: torch.fx.Node) -> bool:
        """Write a short arange of fractions or of narrow floats as a literal.

        Eager's rounding of them depends on the processor's vector width.
        """
        value = node.meta["val"]
        whole = all(float(number).is_integer() for number in node.args)
        exact = whole and value.dtype.itemsize > 2
        if not value.dtype.is_floating_point or exact or value.nbytes > MAX_FOLDED_BYTES:
            return False
        with unset_fake_temporarily():
            self.values[node] = self._written(node, torch.arange(*node.args, dtype=value.dtype))
        return True

    def _literal(self, node: torch.fx.Node) -> int:
        tensor = self.captured.graph_module
        for part in str(node.target).split("."):
            tensor = getattr(tensor, part)
        return self._written(node, tensor)

    def _written(self, node: torch.fx.Node, tensor: Any) -> int:
        if not isinstance(tensor, torch.Tensor):
            raise self._refuse(node, f"the graph holds a {type(tensor).__name__}")
        if tensor.nbytes > MAX_LITERAL_BYTES:
            raise self._refuse(
                node,
                f"the graph holds a literal tensor of {tensor.nbytes} bytes; register it as a "
                "buffer of the model",
            )
        self.literal_specs.append([self._new_value(), *_spec(tensor)])
        flat = tensor.detach().contiguous().reshape(-1)
        self.literals += flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return self.count - 1

    def _call(self, node: torch.fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            self.values[node] = self.values[_node(node.args[0])][node.args[1]]
            return
        if target in _IDENTITIES:
            self.values[node] = self.values[_node(node.args[0])]
            return
        if not isinstance(target, torch._ops.OpOverload):
            raise self._refuse(node, f"{target} is not an operator on tensors")
        if target is torch.ops.aten.arange.start_step and self._folded(node):
            return
        if target.name().partition(".")[0] in _WINDOWS and not node.all_input_nodes:
            with unset_fake_temporarily():
                self.values[node] = self._written(node, target(*node.args, **node.kwargs))
            return
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise self._refuse(
                node,
                "it draws random numbers, and a compiled graph has no generator; draw them outside "
                "the step and pass them as an argument",
            )
        value = node.meta["val"]
        results = [value] if isinstance(value, torch.Tensor) else value
        if not isinstance(results, (list, tuple)) or not all(
            result is None or isinstance(result, torch.Tensor) for result in results
        ):
            raise self._refuse(node, f"its result is a {type(value).__name__}, not a tensor")
        for result in results:
            if isinstance(result, torch.Tensor) and result.dtype != torch.complex128:
                self._check_dtype(node, "it returns", result)
        numbers = [self._new_value() for _ in results]
        self.values[node] = numbers[0] if isinstance(value, torch.Tensor) else numbers
        tensors = [item.meta["val"] for item in node.all_input_nodes] + list(results)
        dtypes = {_dtype_name(item.dtype) for item in tensors if isinstance(item, torch.Tensor)}
        message = {
            "op": str(target),
            "args": self._arguments(node, target),
            "results": [
                None if result is None else [number, *_spec(result)]
                for number, result in zip(numbers, results, strict=True)
            ],
            "returns_list": isinstance(target._schema.returns[0].type, torch.ListType),
            "dtypes": sorted(dtypes),
            "computed_wide": torch.Tag.pointwise in target.tags or target in _COMPUTED_WIDE,
        }
        if target in _READS_STORAGE:
            message["storage_order"] = self._storage_order(node)
        if target in _COMPARISONS:
            operands = [
                item.meta["val"] if isinstance(item, torch.fx.Node) else item
                for item in node.args[:2]
            ]
            message["common"] = _dtype_name(torch.result_type(*operands))
        self.nodes.append(message)
        self.origins.append(NodeOrigin.of(node))

    def _storage_order(self, node: torch.fx.Node) -> list[int]:
        """Dimensions of a strided view's tensor from the slowest in memory to the fastest."""
        tensor = _node(node.args[0]).meta["val"]
        order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), tensor.shape[dim]))
        whole = tensor.permute(order).is_contiguous() and tensor.storage_offset() == 0
        if not whole and tensor.numel():
            raise self._refuse(
                node,
                "it reads the storage of a tensor that is only a part of that storage; take the "
                "view of the whole tensor",
            )
        return order

    def _arguments(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> list[Any]:
        arguments = []
        for index, parameter in enumerate(target._schema.arguments):
            if index < len(node.args) and not parameter.kwarg_only:
                value = node.args[index]
            elif parameter.name in node.kwargs:
                value = node.kwargs[parameter.name]
            else:
                value = parameter.default_value
            arguments.append(self._argument(node, value, parameter.type))
        return arguments

    def _argument(self, node: torch.fx.Node, value: Any, kind: Any) -> list[Any]:
        if isinstance(kind, torch.OptionalType):
            if value is None:
                return ["none"]
            kind = kind.getElementType()
        if isinstance(value, torch.fx.Node):
            number = self.values[value]
            if not isinstance(number, int):
                return ["list", "Tensor", [["value", item] for item in number]]
            return ["value", number]
        if isinstance(kind, torch.ListType):
            element = kind.getElementType()
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            return ["list", str(element), [self._argument(node, item, element) for item in items]]
        if isinstance(value, bool):
            literal = ["bool", value]
        elif isinstance(value, int):
            literal = ["int", value]
            if isinstance(kind, torch.FloatType):
                literal = ["float", float(value).hex()]
        elif isinstance(value, float):
            literal = ["float", value.hex()]
        elif isinstance(value, complex):
            literal = ["complex", value.real.hex(), value.imag.hex()]
        elif isinstance(value, str):
            return ["str", value]
        elif isinstance(value, torch.dtype):
            return ["dtype", _dtype_name(value)]
        elif isinstance(value, (torch.device, torch.layout, torch.memory_format)) or value is None:
            # Where and how a tensor lies in memory does not change its value.
            return ["none"]
        else:
            raise self._refuse(node, f"an argument is a {type(value).__name__}")
        return ["scalar_tensor", *literal] if isinstance(kind, torch.TensorType) else literal


def lowering_error(
    bucket: str, origin: NodeOrigin | torch.fx.Node | None, reason: str, *, route: str
) -> LoweringError:
    """A `LoweringError` that names operator, specs, source line and bucket."""
    op = source = None
    what = "a graph"
    if origin is not None:
        if isinstance(origin, torch.fx.Node):
            origin = NodeOrigin.of(origin)
        op, source = origin.op, origin.source
        what = f"{op}({origin.operands})"
    place = f" at {source}" if source else ""
    return LoweringError(
        f"Bucket {bucket!r}: the {route} route cannot lower {what}{place}: {reason}.",
        bucket=bucket,
        op=op,
        reason=reason,
        source=source,
    )


def _node(argument: Any) -> torch.fx.Node:
    """Return an argument that the operator's schema says is a tensor."""
    assert isinstance(argument, torch.fx.Node)
    return argument
