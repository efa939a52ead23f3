"""The product of lowering: a module that a compiler takes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_neuron.trace_record import TensorSpec

__all__ = ["LoweredModule"]


@dataclass(frozen=True, slots=True)
class LoweredModule:
    """One lowered graph.

    Attributes:
        route: the route that lowered it (`native`).
        data: StableHLO portable artifact (MLIR bytecode of the versioned VHLO dialect) without
            locations; the entry function is `@main`, and each argument that an output updates in
            place carries `tf.aliasing_output`, the index of that output.
        inputs: specs of the entry function's arguments.
        outputs: specs of its results.
        aliases: output index to the index of the input that it updates in place.
    """

    route: str
    data: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    aliases: dict[int, int]
