"""Dynamo's half of a capture: one whole step becomes one FX graph, without running it.

Dynamo is asked for the graph directly, not through a call of a compiled function: no code cache is
filled, no recompile limit applies, no guard is built, and what it installs in the globals of the
traced function is taken out again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import convert_frame, exc
from torch._dynamo import source as sources
from torch._guards import CompileContext, Source, TracingContext, compile_context

from vllm_neuron.errors import CaptureError
from vllm_neuron.lowering.scalar_index import unread_indices
from vllm_neuron.premises import premises_of

__all__ = [
    "DynamoTrace",
    "GraphOutput",
    "attribute_path",
    "explain",
    "operands_text",
    "refusal",
    "refuse_data_dependent_sizes",
    "source_line",
    "trace_step",
    "traced_modules",
]

# Switched off for every capture: what depends on earlier captures (automatic dynamic shapes), what
# replays Python side effects, and what turns data into sizes.
_CONFIG: dict[str, Any] = {
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "capture_dynamic_output_shape_ops": False,
    "capture_scalar_outputs": False,
    "replay_side_effects": False,
    "side_effect_replay_policy": "silent",
    "specialize_float": True,
    "specialize_int": True,
    "suppress_errors": False,
}

_TORCH_ROOT = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """Stands for one output of the graph in a result tree."""

    index: int


@dataclass(slots=True)
class DynamoTrace:
    """What Dynamo leaves behind.

    Attributes:
        graph_module: torch-level graph; every tensor, weights included, is a placeholder.
        example_inputs: fake tensors for its placeholders.
        tensors: the real tensors behind them.
        sources: where Dynamo found each of them.
        result: the step's return value with `GraphOutput` in place of computed tensors.
        fake_mode: fake tensor mode of the trace.
        tensor_to_context: Dynamo's symbolic contexts, which AOTAutograd wants.
        code: every code object that was traced.
        self_name: the name of the step in `sources`.
        premises: what the trace read of the step and of modules; see `premises`.
    """

    graph_module: torch.fx.GraphModule
    example_inputs: list[Any]
    tensors: list[torch.Tensor]
    sources: list[Source]
    result: Any
    fake_mode: Any
    tensor_to_context: Any
    code: Sequence[CodeType]
    self_name: str
    premises: list[list[Any]]


def trace_step(step: torch.nn.Module, args: tuple[Any, ...], *, bucket: str) -> DynamoTrace:
    """Trace `step(*args)` into one graph.

    Raises:
        CaptureError: the step is not one static graph.
    """
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

    frame = convert_frame._get_frame(step, args, {})
    self_name = frame.code.co_varnames[0]
    backend: dict[str, Any] = {}

    def keep_graph(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> torch.fx.GraphModule:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        context = TracingContext.get()
        _keep_updates(gm, InstructionTranslator.current_tx().output, self_name, bucket)
        backend.update(
            backend_id=gm.meta["backend_id"],
            graph_module=gm,
            example_inputs=list(example_inputs),
            fake_mode=context.fake_mode,
            tensor_to_context=context.tensor_to_context,
        )
        return gm

    known_globals = set(frame.globals)
    received: list[torch.Tensor] = []
    try:
        with (
            torch._dynamo.config.patch(_CONFIG),
            unread_indices(),
            get_metrics_context(),
            dynamo_timed("vllm_neuron.capture"),
            torch_function_mode_stack_state_mgr,
            compile_context(CompileContext(convert_frame.get_compile_id({}))),
        ):
            output = convert_frame.compile_frame(
                frame.code,
                frame.globals,
                frame.locals,
                frame.builtins,
                frame.closure,
                compiler_fn=keep_graph,
                one_graph=True,
                restart_reasons=set(),
            ).graph_capture_output(frame.argdefs, frame.kwdefaults)

        premises = premises_of(
            output.output_graph.guards, step, self_name=self_name, scope=frame.globals
        )

        # Dynamo's generated code gathers the graph's inputs, calls it and rebuilds the result;
        # with a stand-in for the graph it computes nothing.
        def graph_stand_in(*tensors: torch.Tensor) -> tuple[GraphOutput, ...]:
            received.extend(tensors)
            count = len(backend["graph_module"].graph.output_node().args[0])
            return tuple(GraphOutput(index) for index in range(count))

        replay = output.get_runtime_env().forward_callable(
            backend.pop("backend_id", "__no_graph"), graph_stand_in, extra_globals=frame.globals
        )
        try:
            result = replay(step, *args)
        except (AttributeError, TypeError) as error:
            raise _reads_outputs(backend, error, bucket) from error
    except CaptureError:
        raise
    except exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, CaptureError):
            raise error.inner_exception from None
        raise explain(error.inner_exception, bucket) from error
    except Exception as error:
        raise explain(error, bucket) from error
    finally:
        for name in set(frame.globals) - known_globals:
            del frame.globals[name]
    found = output.output_graph.export_metadata.graph_input_idx_to_local_source
    if not backend:
        backend = {
            "graph_module": _empty_graph(),
            "example_inputs": [],
            "fake_mode": torch._subclasses.FakeTensorMode(),
            "tensor_to_context": {},
        }
        found = {}
    return DynamoTrace(
        **backend,
        tensors=received,
        sources=[found[index] for index in range(len(received))],
        result=result,
        code=output.traced_code,
        self_name=self_name,
        premises=premises,
    )


def _reads_outputs(backend: dict[str, Any], error: Exception, bucket: str) -> CaptureError:
    """The step's result is more than the graph's outputs put together."""
    source = None
    if "graph_module" in backend:
        for node in backend["graph_module"].graph.nodes:
            if node.op == "call_method" and node.target == "item":
                source = source_line(node.meta.get("stack_trace"))
    return refusal(
        bucket,
        f"the step makes its result from the values of tensors ({error})",
        "Return tensors, and read numbers out of them after the step.",
        source,
    )


def _empty_graph() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(())
    return torch.fx.GraphModule({}, graph)


def _keep_updates(gm: torch.fx.GraphModule, output: Any, self_name: str, bucket: str) -> None:
    """Deal with computed tensors that the step assigns to things older than the trace.

    Side effects are not replayed. Replacing a tensor that is a graph input (`self.state = new`) is
    an update of that input, so the graph gets a `copy_`. Any other assignment of a computed
    tensor would be lost, and is refused.
    """
    from torch._dynamo.side_effects import TempLocalSource

    effects = output.side_effects
    nodes = {node.name: node for node in gm.graph.nodes}
    placeholders = {
        node.meta["grapharg"].source.name: node
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get("grapharg") is not None
    }
    for variable in effects._get_modified_vars():
        owner = variable.source
        if owner is None or isinstance(owner, TempLocalSource):
            continue
        for key, value in _stores(effects, variable):
            computed = _computed_tensor(value)
            if computed is None:
                continue
            node = nodes.get(computed.proxy.node.name)
            target = placeholders.get(f"{owner.name}[{key!r}]") or placeholders.get(
                f"{owner.name}.{key}"
            )
            old = target.meta["example_value"] if target is not None else None
            new = node.meta["example_value"] if node is not None else None
            whole = getattr(value, "proxy", None) is computed.proxy
            if whole and old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
                with gm.graph.inserting_before(gm.graph.output_node()):
                    copy = gm.graph.call_method("copy_", (target, node))
                copy.meta = {"example_value": old, "stack_trace": node.meta.get("stack_trace")}
                continue
            where = _readable(owner, self_name)
            where = f"{where}.{key}" if isinstance(key, str) else f"{where}[{key!r}]"
            raise refusal(
                bucket,
                f"the step stores a tensor that it computed in {where}",
                "A compiled step changes nothing but its inputs: return the tensor, or update a "
                "buffer of the same shape and dtype that the step reads.",
                source_line(node.meta.get("stack_trace")) if node is not None else None,
            )
    gm.recompile()


def _stores(effects: Any, variable: Any) -> list[tuple[Any, Any]]:
    stores = list(effects.store_attr_mutations.get(variable, {}).items())
    items = getattr(variable, "items", None)
    if isinstance(items, dict):
        for hashable, value in items.items():
            key = getattr(hashable, "vt", hashable)
            stores.append((key.as_python_constant() if key.is_python_constant() else key, value))
    elif isinstance(items, (list, tuple)):
        stores.extend(enumerate(items))
    return stores


def _computed_tensor(value: Any) -> Any:
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    found: list[Any] = []

    def visit(variable: Any) -> None:
        if isinstance(variable, TensorVariable) and variable.proxy.node.op != "placeholder":
            found.append(variable)

    VariableTracker.visit(visit, value)
    return found[0] if found else None


def refusal(bucket: str, reason: str, advice: str, source: str | None = None) -> CaptureError:
    """A `CaptureError` whose text says which bucket, where, why, and what to do."""
    place = f" at {source}" if source else ""
    return CaptureError(
        f"Bucket {bucket!r} cannot be captured{place}: {reason}. {advice}",
        bucket=bucket,
        reason=reason,
        source=source,
    )


def refuse_data_dependent_sizes(graph: torch.fx.Graph, bucket: str) -> None:
    """Name the first operator of a graph whose result has no static size.

    Raises:
        CaptureError: there is one.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in values:
            sizes = item.shape if isinstance(item, torch.Tensor) else [item]
            if any(
                isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes
            ):
                raise refusal(
                    bucket,
                    f"the result of {node.target}({operands_text(node)}) has a size that depends "
                    "on the values of tensors",
                    "Use operations whose result shape is known beforehand (torch.where, masking, "
                    "a fixed output_size).",
                    source_line(node.stack_trace),
                )


def explain(error: Exception, bucket: str) -> CaptureError:
    """Put an exception of the trace into words: what, where, and what to do."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    stack = getattr(error, "real_stack", None)
    source = None
    for frame in reversed(list(stack or ())):
        if not frame.filename.startswith(_TORCH_ROOT):
            source = f"{frame.filename}:{frame.lineno}"
            break
    text = str(getattr(error, "msg", error))
    gist, lowered = _gist(text), text.lower()
    if isinstance(error, GuardOnDataDependentSymNode) or any(
        phrase in lowered
        for phrase in ("dynamic shape operator", "data-dependent", "data dependent", "tensor.item")
    ):
        return refusal(
            bucket,
            f"the graph would depend on the values of tensors ({gist})",
            "Use operations whose result shape is known beforehand (torch.where, masking, a fixed "
            "output_size) and keep .item(), .tolist() and nonzero() out of the step.",
            source,
        )
    if isinstance(error, (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError)):
        return refusal(
            bucket,
            f"the step is not one graph ({gist})",
            "A bucket is one graph without a break: move this code out of the step.",
            source,
        )
    return refusal(
        bucket,
        f"tracing failed with {type(error).__name__} ({gist})",
        "Call the step with the same arguments without compiling it: if that fails too, the model "
        "or its arguments are at fault.",
        source,
    )


def _gist(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    gist = lines[0] if lines else "no message"
    for line in lines:
        if line.startswith("Explanation:"):
            gist = f"{gist}: {line.removeprefix('Explanation:').strip()}"
    return gist.rstrip(".")[:300]


def operands_text(node: torch.fx.Node) -> str:
    """Dtype and shape of each tensor operand of a traced node: `float32[4, 8], int64[4]`."""
    return ", ".join(
        f"{str(item.meta['val'].dtype).removeprefix('torch.')}{list(item.meta['val'].shape)}"
        for item in node.all_input_nodes
        if isinstance(item.meta.get("val"), torch.Tensor)
    )


def source_line(stack_trace: str | None) -> str | None:
    """`file:line` of the innermost frame outside torch in a node's `stack_trace`."""
    found = None
    for line in (stack_trace or "").splitlines():
        head, quote, rest = line.strip().partition('File "')
        name, end, tail = rest.partition('", line ')
        if not head and quote and end and not name.startswith(_TORCH_ROOT):
            found = f"{name}:{tail.partition(',')[0]}"
    return found


def _readable(source: Source, self_name: str) -> str:
    path = attribute_path(source, self_name)
    return source.name if path is None else f"self.{path}".rstrip(".")


def attribute_path(source: Source, self_name: str) -> str | None:
    """Dotted path from the step to what `source` denotes; None if it does not start there."""
    path = ""
    while isinstance(source, sources.ChainedSource):
        if isinstance(source, sources.AttrSource):
            path = f".{source.member}{path}"
        elif isinstance(source, (sources.GetItemSource, sources.DictGetItemSource)):
            if not isinstance(source.index, (int, str)):
                return None
            path = f"[{source.index!r}]{path}"
        elif type(source).get_value is Source.get_value and source.name != source.base.name:
            return None
        source = source.base
    if not (isinstance(source, sources.LocalSource) and source.local_name == self_name):
        return None
    path = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)
    return re.sub(r"\._(?:modules|parameters|buffers)$", "", path).removeprefix(".")


def traced_modules(code: Sequence[CodeType]) -> list[str]:
    """Names of the Python modules that the code objects come from.

    A file that no loaded module has is named `file:NAME`; nobody can find it again, so a record
    that has it is always stale. Code made by exec (dataclasses, named tuples) has no file.
    """
    by_file: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and by_file.get(path, "__").startswith("__"):
            by_file[path] = name
    files = {item.co_filename for item in code if not item.co_filename.startswith("<")}
    return sorted({by_file.get(name, f"file:{Path(name).name}") for name in files})
