"""A graph message on PyTorch/XLA's lazy tensors, and the HLO module that they make.

Runs only in the XLA route's lowering process, where torch is the older one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_xla
from torch_xla.core.xla_builder import mkshape
from torch_xla.debug import metrics

from vllm_neuron.lowering.failure import LoweringFailure
from vllm_neuron.lowering.hlo_proto import Literal, finish_module
from vllm_neuron.lowering.xla_operators import own_operator, xla_type

__all__ = ["lower_graph", "missing_operators"]

_DISPATCH_KEYS = (
    "XLA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
_NARROW_FLOATS = (torch.float16, torch.bfloat16)


def missing_operators(graph: Mapping[str, Any]) -> dict[str, str]:
    """The operators that this torch lacks, has with other arguments or cannot lower, and why."""
    missing = {}
    for node in graph["nodes"]:
        name = node["op"]
        if name in missing or own_operator(name) is not None:
            continue
        overload = _overload(name)
        if overload is None:
            missing[name] = f"torch {torch.__version__} does not know it"
        elif not _is_lowered(overload):
            missing[name] = "PyTorch/XLA does not lower it"
        elif len(overload._schema.arguments) != len(node["args"]):
            missing[name] = (
                f"it takes {len(overload._schema.arguments)} arguments in torch "
                f"{torch.__version__}, {len(node['args'])} in the server's"
            )
    return missing


def lower_graph(graph: Mapping[str, Any], literals: bytes) -> bytes:
    """Lower a graph message to a serialised HloModuleProto.

    Raises:
        LoweringFailure: an operator cannot be lowered.
    """
    with torch.no_grad():
        return _Graph(graph, literals).lower()


@functools.cache
def _overload(name: str) -> torch._ops.OpOverload | None:
    namespace, _, rest = name.partition(".")
    found = getattr(torch.ops, namespace)
    for part in rest.rsplit(".", 1):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def _is_lowered(overload: torch._ops.OpOverload) -> bool:
    """Whether an operator has a kernel for lazy tensors, of its own or made of others.

    Views have none: functionalization makes copies of them.
    """
    if any(result.alias_info is not None for result in overload._schema.returns):
        return True
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(overload.name(), key) for key in _DISPATCH_KEYS)


class _Graph:
    def __init__(self, graph: Mapping[str, Any], literals: bytes) -> None:
        self.graph = graph
        self.device = torch_xla.device()
        self.values: dict[int, torch.Tensor] = {}
        self.inputs = [self._input(dtype, shape) for dtype, shape in graph["inputs"]]
        self.values |= enumerate(self.inputs)
        position = 0
        for number, dtype, shape in graph["literals"]:
            literal = _empty(dtype, shape)
            data = literals[position : position + literal.nbytes]
            position += literal.nbytes
            if data:
                flat = torch.frombuffer(bytearray(data), dtype=literal.dtype)
                literal = flat.reshape(shape)
            self.values[number] = literal.to(self.device)

    def _input(self, dtype: str, shape: list[int]) -> torch.Tensor:
        """A tensor without memory; its node becomes the parameter."""
        described = mkshape(xla_type(getattr(torch, dtype)), tuple(shape))
        return torch_xla._XLAC._xla_create_placeholder_tensor(described.shape)

    def lower(self) -> bytes:
        for index, node in enumerate(self.graph["nodes"]):
            try:
                results = self._call(node)
            except LoweringFailure as failure:
                raise LoweringFailure(failure.reason, index) from None
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
                reason = next(filter(None, str(error).splitlines()), type(error).__name__)
                raise LoweringFailure(reason[:300], index) from None
            for expected, found in zip(node["results"], results, strict=True):
                if expected is not None:
                    self.values[expected[0]] = _checked(found, expected, index)
        outputs = [self.values[number] for number in self.graph["outputs"]]
        context = torch_xla._XLAC.lowering.LoweringContext("main")
        try:
            context.build([*self.inputs, *outputs])
        except RuntimeError as error:
            raise LoweringFailure(str(error).partition("\n")[0][:300]) from None
        constants = context.device_parameter_id_tensor_mapping()
        return finish_module(
            context.hlo(),
            inputs=len(self.inputs),
            outputs=[str(output.dtype).removeprefix("torch.") for output in outputs],
            aliases=[tuple(pair) for pair in self.graph["aliases"]],
            constant=lambda number: _literal(constants[number]),
        )

    def _call(self, node: Mapping[str, Any]) -> list[torch.Tensor | None]:
        function, arguments, keywords = self._arguments(node)
        wide = node["computed_wide"] and any(
            name in node["dtypes"] for name in ("float16", "bfloat16")
        )
        if wide:
            arguments = [_widened(item) for item in arguments]
        before = _fallbacks()
        result = function(*arguments, **keywords)
        if fallen := sorted(
            name for name, count in _fallbacks().items() if before.get(name) != count
        ):
            raise LoweringFailure(f"PyTorch/XLA does not lower it ({', '.join(fallen)})")
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        if wide:
            results = [
                item.to(getattr(torch, expected[1])) if expected is not None else item
                for item, expected in zip(results, node["results"], strict=True)
            ]
        return results

    def _arguments(
        self, node: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        values = [self._value(item) for item in node["args"]]
        own = own_operator(node["op"])
        if own is not None:
            return functools.partial(own, node), values, {}
        overload = _overload(node["op"])
        assert overload is not None, "checked by missing_operators"
        arguments, keywords = [], {}
        for parameter, value in zip(overload._schema.arguments, values, strict=True):
            if parameter.name == "device":
                value = self.device
            if parameter.kwarg_only:
                keywords[parameter.name] = value
            else:
                arguments.append(value)
        return overload, arguments, keywords

    def _value(self, item: list[Any]) -> Any:
        kind, *rest = item
        if kind == "value":
            return self.values[rest[0]]
        if kind == "list":
            return [self._value(inner) for inner in rest[1]]
        if kind == "scalar_tensor":
            return self._value(rest)
        if kind == "none":
            return None
        if kind == "dtype":
            return getattr(torch, rest[0])
        if kind == "complex":
            return complex(*map(float.fromhex, rest))
        return float.fromhex(rest[0]) if kind == "float" else rest[0]


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW_FLOATS:
        return value.to(torch.float32)
    if isinstance(value, torch.dtype) and value in _NARROW_FLOATS:
        return torch.float32
    return [_widened(item) for item in value] if isinstance(value, list) else value


def _checked(found: torch.Tensor | None, expected: list[Any], index: int) -> torch.Tensor:
    _, dtype, shape = expected
    if found is None or (found.dtype, list(found.shape)) != (getattr(torch, dtype), shape):
        what = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
        raise LoweringFailure(f"PyTorch/XLA gives {what}, not torch.{dtype}{shape}", index)
    return found


def _fallbacks() -> dict[str, int]:
    """How often each operator was computed on the CPU at once, for want of a lowering."""
    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: metrics.counter_value(name) for name in names}


def _literal(tensor: torch.Tensor) -> Literal:
    tensor = tensor.cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    flat = tensor.reshape(-1)
    integers = flat.tolist() if not (tensor.is_floating_point() or tensor.is_complex()) else []
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return dtype, list(map(operator.index, integers)), raw
