"""ATen operators that PyTorch/XLA lacks, or lowers to other numbers than eager gives.

Each is written with operators that it lowers exactly, or with XLA's own. They run on lazy tensors,
in the XLA route's lowering process only. Arguments come in schema order.
"""

from __future__ import annotations

from vllm_neuron.lowering.xla_operators import arithmetic, indexing, reductions, shapes
from vllm_neuron.lowering.xla_operators.registry import own_operator, xla_type

__all__ = ["own_operator", "xla_type"]

del arithmetic, indexing, reductions, shapes
