"""Names of the tensors that a step reads, and a loaded NEFF bound to them.

Names are paths: `model.layers.0.weight` for a weight, `rope.tables['cos']` for a tensor attribute,
`kv_caches[3][0]` for an argument. Weights and KV caches are bound once; a call passes only the
step's own arguments. Nothing here imports Dynamo, so a warm start does not pay for it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_neuron import _core
from vllm_neuron.errors import ExecutionError
from vllm_neuron.premises import plain
from vllm_neuron.shared_memory import overlaps
from vllm_neuron.trace_record import TensorSpec

if TYPE_CHECKING:
    from vllm_neuron.runtime.base import DeviceTensor, LoadedModel
    from vllm_neuron.trace_record import GraphInput, TraceRecord

__all__ = [
    "BoundGraph",
    "argument_leaves",
    "describe_tensors",
    "find_tensor",
    "leaves",
    "memory_of",
    "module_state",
    "named_tensors",
    "signature",
    "spec_of",
]


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype name of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested lists, tuples and dicts with its path."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    else:
        yield path, value


def argument_leaves(step: torch.nn.Module, args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a call's arguments under the name that the graph input has."""
    for name, value in inspect.signature(step.forward).bind(*args).arguments.items():
        yield from leaves(value, name)


def named_tensors(step: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, then the buffers of a module, under every name each has."""
    yield from step.named_parameters(remove_duplicate=False)
    yield from step.named_buffers(remove_duplicate=False)


def describe_tensors(
    step: torch.nn.Module,
) -> list[tuple[str, tuple[int, ...], str, tuple[int, ...], str | None]]:
    """Describe the parameters and buffers of a module for the trace key.

    Returns:
        Name, shape, dtype name, strides, and the first name of the same memory if there is one: a
        graph takes tied weights as one input.
    """
    first: dict[tuple[object, ...], str] = {}
    described = []
    for name, tensor in named_tensors(step):
        identity = memory_of(tensor)
        tied_to = first.setdefault(identity, name)
        spec = spec_of(tensor)
        described.append(
            (name, spec.shape, spec.dtype, tensor.stride(), tied_to if tied_to != name else None)
        )
    return described


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What is equal for two tensors exactly if they are the same view of the same memory."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def find_tensor(step: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter, buffer or tensor attribute of a module by its path, None if absent."""
    value: Any = step
    try:
        for part in _parts(name):
            value = getattr(value, part) if isinstance(part, str) else value[part[0]]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
    return value if isinstance(value, torch.Tensor) else None


def _parts(path: str) -> Iterator[str | tuple[int | str]]:
    """Split a path into attribute names, as `str`, and subscripts, as 1-tuples."""
    rest = path
    while rest:
        if rest.startswith("["):
            inner, _, rest = rest[1:].partition("]")
            yield (inner[1:-1] if inner[:1] in "'\"" else int(inner),)
        else:
            rest = rest.removeprefix(".")
            end = min((at for at in (rest.find("."), rest.find("[")) if at >= 0), default=len(rest))
            yield rest[:end]
            rest = rest[end:]


def signature(step: torch.nn.Module, args: Sequence[Any]) -> list[Any]:
    """Describe a call so that equal descriptions give equal graphs, for the trace key.

    A tensor counts by dtype, shape, stride and what it overlaps, anything else by type and value:
    None, numbers and strings are constants of the graph.

    Raises:
        TypeError: an argument is neither a tensor nor a plain constant.
    """
    described: list[Any] = []
    named: list[tuple[str, Any]] = []
    for name, leaf in argument_leaves(step, args):
        named.append((name, leaf))
        if isinstance(leaf, torch.Tensor):
            spec = spec_of(leaf)
            described.append([name, spec.dtype, list(spec.shape), list(leaf.stride())])
        elif leaf is None or type(leaf) in (bool, int, float, str):
            described.append([name, type(leaf).__name__, repr(leaf)])
        else:
            raise TypeError(
                f"argument {name} is a {type(leaf).__name__}; expected tensors, numbers, strings "
                "and None in nested lists, tuples and dicts"
            )
    # An update of one of these is seen in the others, which is part of the graph.
    named += named_tensors(step)
    for overlap in overlaps([leaf for _, leaf in named]):
        members = [named[index] for index in overlap.members]
        first = members[0][1].storage_offset()
        described.append(
            ["overlap", *([name, leaf.storage_offset() - first] for name, leaf in members)]
        )
    return described


def module_state(step: torch.nn.Module) -> str:
    """Digest what a trace can read of the modules of a step besides their tensors.

    That is each module's class and its public attributes that are plain values, functions, dtypes
    or enumeration members, and torch's defaults. Whatever else a trace read is a premise of its
    record (`premises`), so this need not be complete: it keeps apart what is served in turn.
    """
    described = [
        [
            name,
            f"{type(module).__module__}.{type(module).__qualname__}",
            [
                [key, described]
                for key, value in sorted(vars(module).items())
                if not key.startswith("_") and (described := plain(value)) is not None
            ],
        ]
        for name, module in step.named_modules()
    ]
    # Dynamo reads these without a guard that could become a premise.
    settings = [str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu")]
    return _core.digest(json.dumps([settings, described], separators=(",", ":")).encode())


class BoundGraph:
    """A loaded NEFF that is called like the step function it was traced from.

    Args:
        bucket: name of the bucket, for messages.
        step: the step module.
        args: the example arguments it was traced with.
        trace: how its inputs and outputs relate to the step.
        model: the loaded NEFF.
        bound: device tensor per graph input index; inputs that are missing are passed per call.
    """

    def __init__(
        self,
        bucket: str,
        step: torch.nn.Module,
        args: Sequence[Any],
        *,
        trace: TraceRecord,
        model: LoadedModel,
        bound: Mapping[int, DeviceTensor],
    ) -> None:
        self.bucket = bucket
        self.trace = trace
        self._arguments = list(inspect.signature(step.forward).parameters)
        position = {name: index for index, name in enumerate(self._arguments)}
        free = [index for index in range(len(trace.inputs)) if index not in bound]
        self._free = free
        self._paths = [_argument_path(trace.inputs[index], position, bucket) for index in free]
        self._inputs: list[Any] = [bound.get(index) for index in range(len(trace.inputs))]
        self._model = model.bind(bound)

    def __call__(self, *args: Any) -> Any:
        """Run the step.

        Args:
            args: as for the step function; what is bound is not looked at and may be None.

        Returns:
            What the step function returns, with torch tensors; a result that is an input which is
            bound, such as a KV cache, is its device tensor.

        Raises:
            ExecutionError: an argument has another shape or dtype than the graph, or the runtime
                failed.
        """
        passed = []
        for index, path in zip(self._free, self._paths, strict=True):
            value: Any = args
            for key in path:
                value = value[key]
            self._check(index, value)
            passed.append(value)
        outputs = self._model.execute(passed)
        inputs = self._inputs.copy()
        for index, value in zip(self._free, passed, strict=True):
            inputs[index] = value
        return self.trace.rebuild_result(_ReadOnce(outputs), inputs)

    def _check(self, index: int, value: torch.Tensor) -> None:
        item = self.trace.inputs[index]
        if tuple(value.shape) != item.spec.shape or (
            str(value.dtype).removeprefix("torch.") != item.spec.dtype
        ):
            found = spec_of(value)
            raise ExecutionError(
                f"{self.bucket}: argument {item.name} is {found.dtype}{list(found.shape)}, the "
                f"graph takes {item.spec.dtype}{list(item.spec.shape)}. Nothing is compiled while "
                "serving; add a bucket for this shape.",
                bucket=self.bucket,
                status=None,
                reason="an argument does not fit the graph",
            )


class _ReadOnce:
    """Graph outputs as torch tensors, each read only if the result needs it."""

    def __init__(self, outputs: Sequence[DeviceTensor]) -> None:
        self._outputs = outputs

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._outputs[index].read()


def _argument_path(
    item: GraphInput, position: Mapping[str, int], bucket: str
) -> tuple[int | str, ...]:
    first, *rest = _parts(item.name)
    if item.kind != "argument" or not isinstance(first, str):
        raise ExecutionError(
            f"{bucket}: the {item.kind} {item.name} is not bound to a device tensor",
            bucket=bucket,
            status=None,
            reason="a graph input is not bound",
        )
    return (position[first], *(part[0] for part in rest))
