"""StableHLO lowerings of ATen operators that torch-mlir lacks or lowers inexactly.

One file per operator family; each says in its docstring what eager promises for the family. They
run only in the lowering process, on jaxlib's MLIR.
"""

from __future__ import annotations

from vllm_neuron.lowering.ops import (
    arithmetic,
    complex_numbers,
    fourier,
    indexing,
    matrices,
    ordering,
    powers,
    reductions,
    scans,
    scattering,
    shapes,
    special,
    windows,
)
from vllm_neuron.lowering.ops.builder import Builder, Refusal, Tensor
from vllm_neuron.lowering.ops.constants import literal
from vllm_neuron.lowering.ops.registry import own_lowering

__all__ = ["Builder", "Refusal", "Tensor", "literal", "own_lowering"]

del arithmetic, complex_numbers, fourier, indexing, matrices, ordering, powers, reductions, scans
del scattering, shapes, special, windows
