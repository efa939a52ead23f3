"""Lowering as the pipeline sees it, and its product: a module that a compiler takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from vllm_neuron.trace_record import TensorSpec

if TYPE_CHECKING:
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.lowering.graph_message import EncodedGraph

__all__ = ["LoweredModule", "Lowering", "ModuleFormat"]

ModuleFormat = Literal["stablehlo", "hlo"]


@dataclass(frozen=True, slots=True)
class LoweredModule:
    """One lowered graph.

    Attributes:
        route: the route that lowered it, `native` or `XLA`.
        data: on the native route a StableHLO portable artifact (MLIR bytecode of the versioned
            VHLO dialect) whose entry function is `@main`, with `tf.aliasing_output`, the index of
            an output, on each argument that it updates in place; on the XLA route a serialised
            HloModuleProto with the same as `input_output_alias`. Neither has locations.
        inputs: specs of the entry function's arguments.
        outputs: specs of its results.
        aliases: output index to the index of the input that it updates in place.
    """

    route: str
    data: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: dict[int, int]

    @property
    def format(self) -> ModuleFormat:
        """What `data` is."""
        return "hlo" if self.route == "XLA" else "stablehlo"


class Lowering(Protocol):
    """What turns captured graphs into modules.

    Attributes:
        route: the word of the route in messages and in modules.
        lowers_encoded_graphs: whether `lower` takes an `EncodedGraph` too.
    """

    route: str
    lowers_encoded_graphs: bool

    def versions(self) -> dict[str, str]:
        """What decides the bytes of a module besides the graph; nothing is started for it."""
        ...

    def lower(self, graph: CapturedGraph | EncodedGraph, *, bucket: str) -> LoweredModule:
        """Lower one graph.

        Raises:
            LoweringError: it names the operator, its source line and the bucket.
        """
        ...

    def stop(self) -> None:
        """End a `lower` that is in progress, from any thread, and refuse others until `close`."""
        ...

    def close(self) -> None:
        """Let go of what lowering holds; a later `lower` takes it again."""
        ...
