"""Where the buckets of a model run: as compiled graphs on a runtime, or eagerly on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_neuron.device import Mode
from vllm_neuron.runtime.host_tensor import lazy_zeros

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_neuron.pipeline import Pipeline
    from vllm_neuron.route import StartRecord

__all__ = ["EagerExecution", "Execution", "KVCacheShape", "make_execution"]


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """Key and value cache of one layer.

    Attributes:
        key: (num_blocks, block_size, kv_heads, head_dim).
        value: (num_blocks, block_size, kv_heads, value_dim).
        dtype: of both.
    """

    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype


class Execution(Protocol):
    """How the model runner gets KV caches and runs a bucket."""

    compiled: bool
    loads_weights: bool
    #: What made the graphs, once they are built; None where nothing is compiled.
    pipeline: Pipeline | None

    def allocate_kv_caches(self, shapes: Sequence[KVCacheShape]) -> Any:
        """Allocates the caches; returns what each step call passes as `kv_caches`."""

    def build(self, steps: Mapping[str, tuple[torch.nn.Module, tuple]]) -> dict[str, Callable]:
        """Makes every bucket callable.

        Args:
            steps: step module and its arguments, by bucket name.
        """

    def refresh(self, tensors: Iterable[torch.Tensor]) -> None:
        """Has the graphs see what was written to tensors that they read besides arguments."""


class EagerExecution:
    """`VLLM_NEURON_CPU_MODE=1`: the step modules themselves, on torch tensors."""

    compiled = False
    loads_weights = True
    pipeline: Pipeline | None = None

    def allocate_kv_caches(self, shapes: Sequence[KVCacheShape]) -> Any:
        """Returns zeroed torch tensors."""
        return [
            (lazy_zeros(shape.key, shape.dtype), lazy_zeros(shape.value, shape.dtype))
            for shape in shapes
        ]

    def build(self, steps: Mapping[str, tuple[torch.nn.Module, tuple]]) -> dict[str, Callable]:
        """Returns the step modules."""
        return {bucket: step for bucket, (step, _) in steps.items()}

    def refresh(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does nothing: the steps read the tensors themselves."""


def make_execution(
    vllm_config: VllmConfig, start: StartRecord, *, local_rank: int = 0
) -> Execution:
    """Returns the execution that a start's mode asks for; a rank has a core of its own."""
    if start.mode is Mode.CPU:
        return EagerExecution()
    # Imports the compiler and the runtime, which CPU mode does without.
    from vllm_neuron.vllm.graphs import CompiledExecution

    return CompiledExecution(vllm_config, start, local_rank=local_rank)
