"""A step function and example inputs become one functional ATen graph with static shapes.

Dynamo traces the whole step (`dynamo_trace`), AOTAutograd makes the graph functional: in-place
updates become outputs, and its own metadata says which inputs they belong to. Neither runs the
graph. Weights and buffers are graph inputs that keep their names, never constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.source import CallMethodItemSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing

from vllm_neuron.binding import (
    argument_leaves,
    find_tensor,
    leaves,
    memory_of,
    named_tensors,
    spec_of,
)
from vllm_neuron.dynamo_trace import (
    DynamoTrace,
    GraphOutput,
    attribute_path,
    explain,
    refusal,
    refuse_data_dependent_sizes,
    trace_step,
    traced_modules,
)
from vllm_neuron.environment_reads import variables_read_by
from vllm_neuron.errors import CaptureError
from vllm_neuron.lowering.decompositions import decomposition_table, finish_decomposition
from vllm_neuron.lowering.scalar_index import gather_scalar_indices
from vllm_neuron.lowering.trace_state import kept_state, without_inference_mode
from vllm_neuron.premises import variable_premises
from vllm_neuron.result_tree import NotRepresentable, classes_of, find_class, result_tree
from vllm_neuron.shared_memory import join_inputs, overlaps, separate
from vllm_neuron.trace_record import (
    GraphInput,
    TensorSpec,
    TraceRecord,
    source_digests,
    source_file,
)

__all__ = ["CapturedGraph", "GraphInput", "TensorSpec", "TraceRecord", "capture"]


@dataclass
class CapturedGraph:
    """One traced bucket.

    Attributes:
        graph_module: functional ATen graph; flat tensor inputs in the order of `record.inputs`,
            a flat tuple of outputs in the order of `record.outputs`. Each node's `stack_trace`
            names the line of the model that made it.
        record: bindings, aliases and result structure.
        bucket: the bucket's name.
        premises: what else the trace read; see `premises`.
    """

    graph_module: torch.fx.GraphModule
    record: TraceRecord
    bucket: str
    premises: list[list[Any]] = field(default_factory=list)


def capture(step: torch.nn.Module, args: tuple[Any, ...], *, bucket: str) -> CapturedGraph:
    """Trace `step(*args)` into one functional graph, without running it or touching weights.

    Python side effects of the step happen in the trace only and are gone afterwards.

    Args:
        step: module whose forward takes nested tuples and lists of CPU tensors.
        args: example arguments; only shapes, dtypes and strides matter. Values that are not
            tensors become constants of the graph.
        bucket: name of the bucket, for messages.

    Raises:
        CaptureError: the step is not one static graph. `source` is `file:line` of the model.
    """
    for path, leaf in leaves(tuple(args), "args"):
        _refuse_dynamic_dimensions(leaf, path, bucket)
    args = _separate_arguments(args)
    with torch.no_grad():
        trace = trace_step(step, args, bucket=bucket)
        names = _tensor_names(step, args)
        inputs = _bind_inputs(step, trace, names, bucket)
        _merge_duplicates(trace, inputs)
        graph_module, metadata = _functionalise(trace, inputs, bucket)
        return _assemble(graph_module, metadata, trace, inputs, names, bucket)


def _refuse_dynamic_dimensions(leaf: Any, path: str, bucket: str) -> None:
    if not isinstance(leaf, torch.Tensor):
        return
    marked = set()
    for name in ("_dynamo_dynamic_indices", "_dynamo_unbacked_indices"):
        marked |= set(getattr(leaf, name, ()))
    symbolic = {i for i, size in enumerate(leaf.shape) if isinstance(size, torch.SymInt)}
    for dimension in sorted(marked | symbolic):
        raise refusal(
            bucket,
            f"dimension {dimension} of input {path} is dynamic",
            "Neuron graphs have static shapes: give each bucket its own size and leave out "
            "mark_dynamic.",
        )


def _separate_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give an argument that is the same tensor as an earlier one an object of its own.

    Dynamo would make one graph input of both, and a later call may pass two tensors.
    """
    seen: set[int] = set()

    def separate(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in seen:
                return value.detach()
            seen.add(id(value))
        elif type(value) in (list, tuple):
            return type(value)(separate(item) for item in value)
        elif type(value) is dict:
            return {key: separate(item) for key, item in value.items()}
        return value

    return tuple(separate(arg) for arg in args)


def _tensor_names(step: torch.nn.Module, args: Sequence[Any]) -> dict[int, tuple[Any, str]]:
    """Kind and name of every tensor that has one, by object identity."""
    names: dict[int, tuple[Any, str]] = {}
    for path, leaf in argument_leaves(step, args):
        if isinstance(leaf, torch.Tensor):
            names[id(leaf)] = ("argument", path)
    parameters = {id(tensor) for tensor in step.parameters()}
    for name, tensor in named_tensors(step):
        kind = "parameter" if id(tensor) in parameters else "buffer"
        names.setdefault(id(tensor), (kind, name))
    return names


def _bind_inputs(
    step: torch.nn.Module, trace: DynamoTrace, names: dict[int, tuple[Any, str]], bucket: str
) -> list[GraphInput]:
    inputs = []
    for tensor, source in zip(trace.tensors, trace.sources, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise refusal(
                bucket,
                f"the graph takes {source.name}, a {type(tensor).__name__}, as an input",
                "Pass a tensor, or make it a constant of the step.",
            )
        kind, name = names.get(id(tensor), ("attribute", attribute_path(source, trace.self_name)))
        if name is None:
            raise refusal(
                bucket,
                f"the graph reads the tensor {source.name}, which does not belong to the step",
                "Register it as a buffer of the model, or pass it as an argument.",
            )
        if kind == "attribute" and find_tensor(step, name) is None:
            raise refusal(
                bucket,
                f"the graph reads {source.name}, which is no tensor in an attribute of the step "
                "(but a NumPy array, or a variable of an enclosing function)",
                "Register it as a buffer of the model, or pass it as an argument.",
            )
        inputs.append(GraphInput(kind, name, spec_of(tensor)))
    return inputs


def _merge_duplicates(trace: DynamoTrace, inputs: list[GraphInput]) -> None:
    """Make one graph input of tensors of the model that are the same memory (tied weights).

    Which of them are tied is part of the trace key. Arguments stay apart: a later call may pass
    different ones. So do tensors in plain attributes, of which the key knows nothing.
    """
    graph = trace.graph_module.graph
    first: dict[Any, torch.fx.Node] = {}
    doubled = []
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if inputs[index].kind not in ("parameter", "buffer"):
            continue
        key = memory_of(trace.tensors[index])
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
            doubled.append(index)
        else:
            first[key] = node
    for index in reversed(doubled):
        for items in (inputs, trace.tensors, trace.example_inputs, trace.sources):
            del items[index]
    if doubled:
        trace.graph_module.recompile()


def _functionalise(
    trace: DynamoTrace, inputs: Sequence[GraphInput], bucket: str
) -> tuple[torch.fx.GraphModule, Any]:
    """AOTAutograd's inference graph and its metadata of mutations and output aliases."""
    kept: dict[str, Any] = {}

    def keep_graph(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        kept.update(graph_module=gm, metadata=TracingContext.get().fw_metadata)
        return lambda *args: args

    context = TracingContext(trace.fake_mode)
    context.tensor_to_context = trace.tensor_to_context
    # Scalar tensors have symbols for their values; AOTAutograd would want a trace without them.
    environment = trace.fake_mode.shape_env
    for symbol in environment.backed_var_to_val if environment is not None else ():
        TensorifyState.specialize(str(symbol))
    gather_scalar_indices(trace.graph_module)
    without_inference_mode(trace.graph_module)

    def trace_functional_graph() -> None:
        with (
            kept_state(),
            tracing(context),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            aot_module_simplified(
                trace.graph_module,
                trace.example_inputs,
                fw_compiler=keep_graph,
                decompositions=decomposition_table(),
            )

    try:
        trace.example_inputs = separate(trace.example_inputs, trace.fake_mode)
        trace_functional_graph()
        updated = set(kept["metadata"].mutated_inp_runtime_indices)
        shared = {index for overlap in overlaps(trace.tensors) for index in overlap.members}
        if updated & shared:
            if not join_inputs(trace.graph_module, trace.tensors):
                raise refusal(
                    bucket,
                    "the step updates an input in place that shares memory with another input of "
                    "another dtype",
                    "Pass inputs that do not overlap: "
                    + ", ".join(inputs[index].name for index in sorted(shared))
                    + ".",
                )
            trace_functional_graph()
    except CaptureError:
        raise
    except Exception as error:
        raise explain(error, bucket) from error
    finally:
        TensorifyState.clear()
    graph_module, metadata = kept["graph_module"], kept["metadata"]
    if metadata.tokens:
        raise refusal(
            bucket,
            "an operator of the step has a side effect: "
            + ", ".join(_effectful(graph_module.graph)),
            "Use operators that only compute tensors.",
        )
    _refuse_read_values(trace, bucket)
    refuse_data_dependent_sizes(graph_module.graph, bucket)
    for info, graph_input in zip(metadata.input_info, inputs, strict=True):
        if info.mutates_metadata or info.mutates_storage_metadata:
            raise refusal(
                bucket,
                f"the step changes the shape or strides of input {graph_input.name} in place",
                "Use a view instead.",
            )
    return graph_module, metadata


def _effectful(graph: torch.fx.Graph) -> list[str]:
    return sorted(
        {
            str(node.args[1])
            for node in graph.nodes
            if node.target is torch.ops.higher_order.with_effects
        }
    )


def _refuse_read_values(trace: DynamoTrace, bucket: str) -> None:
    """Refuse a graph that holds the value that a scalar tensor had during the trace."""
    environment = trace.fake_mode.shape_env
    for symbol in environment.replacements if environment is not None else ():
        for source in environment.var_to_sources.get(symbol, ()):
            if isinstance(source, CallMethodItemSource):
                raise refusal(
                    bucket,
                    f"the step reads the value of the tensor {source.base.name}",
                    "Compute with the tensor, or pass a Python number, which is a constant of the "
                    "graph.",
                )


def _assemble(
    graph_module: torch.fx.GraphModule,
    metadata: Any,
    trace: DynamoTrace,
    inputs: list[GraphInput],
    names: dict[int, tuple[Any, str]],
    bucket: str,
) -> CapturedGraph:
    """Keep the outputs that the caller or an alias needs, and write the record."""
    graph = graph_module.graph
    mutated = list(metadata.mutated_inp_runtime_indices)
    produced = list(graph.output_node().args[0])
    outputs = produced[: len(mutated)]
    user_outputs = produced[len(mutated) : len(mutated) + len(metadata.output_info)]
    position: dict[int, int] = {}
    returned: list[int] = []

    def leaf(value: Any) -> list[Any] | None:
        if isinstance(value, torch.Tensor):
            turned = None if id(value) in names else _transposed_input(value, trace)
            if turned is None:
                returned.append(_input_index(value, graph, trace, inputs, names, bucket))
                return ["input", returned[-1]]
            index, order = turned
            placeholders = graph.find_nodes(op="placeholder")
            current = dict(zip(mutated, produced, strict=False)).get(index, placeholders[index])
            with graph.inserting_before(graph.output_node()):
                node = graph.call_function(torch.ops.aten.permute.default, (current, order))
            node.meta["val"] = current.meta["val"].permute(order)
            outputs.append(node)
            return ["output", len(outputs) - 1]
        if not isinstance(value, GraphOutput):
            return None
        info = metadata.output_info[value.index]
        if info.output_type is OutputType.is_input:
            returned.append(info.base_idx)
            return ["input", info.base_idx]
        produced_value = user_outputs[value.index]
        if not isinstance(produced_value, torch.fx.Node):
            return result_tree(produced_value, lambda _: None)
        if value.index not in position:
            position[value.index] = len(outputs)
            outputs.append(produced_value)
        return ["output", position[value.index]]

    try:
        result = result_tree(trace.result, leaf)
    except NotRepresentable as error:
        raise refusal(bucket, *error.args) from None
    if not outputs:
        if not returned:
            raise refusal(
                bucket,
                "Cannot compile a module that has no output",
                "Return a tensor, or update an input in place.",
            )
        # A graph has an output, even if all that the step returns are its inputs.
        outputs.append(graph.find_nodes(op="placeholder")[returned[0]])
    graph.output_node().args = (tuple(outputs),)
    finish_decomposition(graph)
    graph.eliminate_dead_code()
    graph_module.recompile()
    sources = _sources(trace, result)
    record = TraceRecord(
        inputs=tuple(inputs),
        outputs=tuple(spec_of(node.meta["val"]) for node in outputs),
        aliases=dict(enumerate(mutated)),
        result=result,
        sources=sources,
    )
    premises = trace.premises + variable_premises(variables_read_by(sources))
    return CapturedGraph(graph_module, record, bucket, premises)


def _sources(trace: DynamoTrace, result: Any) -> dict[str, str]:
    modules = {*traced_modules(trace.code), *_modules_of_classes(result)}
    return dict.fromkeys(sorted(modules), "") | source_digests(sorted(modules))


def _modules_of_classes(result: Any) -> Iterator[str]:
    for name in classes_of(result):
        # Bases too: what they inherit makes the value, and generated code names no file.
        for kind in getattr(find_class(name), "__mro__", ()):
            if source_file(kind.__module__) is not None:
                yield kind.__module__


def _input_index(
    tensor: torch.Tensor,
    graph: torch.fx.Graph,
    trace: DynamoTrace,
    inputs: list[GraphInput],
    names: dict[int, tuple[Any, str]],
    bucket: str,
) -> int:
    """Index of the graph input that is `tensor`; one that the graph does not use is added."""
    for index, known in enumerate(trace.tensors):
        if known is tensor:
            return index
    if id(tensor) not in names:
        raise refusal(
            bucket,
            f"the step returns a tensor of shape {tuple(tensor.shape)} that does not belong to it",
            "Register it as a buffer of the model, or pass it as an argument.",
        )
    kind, name = names[id(tensor)]
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        node = graph.placeholder(f"passed_{len(inputs)}")
    node.meta["val"] = trace.fake_mode.from_tensor(tensor, static_shapes=True)
    trace.tensors.append(tensor)
    inputs.append(GraphInput(kind, name, spec_of(tensor)))
    return len(inputs) - 1


def _transposed_input(tensor: torch.Tensor, trace: DynamoTrace) -> tuple[int, list[int]] | None:
    """The input and the order of its dimensions that `tensor` is, or None.

    Dynamo leaves attributes of an input that the step only returns (`x.T`, `x.mT`, `x.data`) out of
    the graph.
    """
    for index, known in enumerate(trace.tensors):
        if known.ndim != tensor.ndim:
            continue
        order = list(range(known.ndim))
        for turned in (order, order[::-1], [*order[:-2], *order[:-3:-1]]):
            if memory_of(known.permute(turned)) == memory_of(tensor):
                return index, turned
    return None
