"""Which ATen operators are decomposed before a graph is lowered: by AOTAutograd, or afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._decomp import decomposition_table as torch_decompositions
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from vllm_neuron.lowering.kernel_decompositions import KERNELS
from vllm_neuron.lowering.matrix_decompositions import MATRICES

if TYPE_CHECKING:
    from vllm_neuron.capture import CapturedGraph

__all__ = ["decompose", "decomposition_table", "finish_decomposition"]

aten = torch.ops.aten


@functools.cache
def decomposition_table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """PyTorch's table to its core operators, with this package's own entries on top."""
    own = {
        aten._cdist_forward.default: _cdist,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
        aten._scaled_mm.default: _scaled_mm,
        aten.bernoulli.default: _bernoulli,
        aten.copy.default: _copy,
        aten.empty_permuted.default: _empty_permuted,
        aten.full.default: _full,
        aten.hypot.default: _hypot,
        aten.multinomial.default: _multinomial,
        aten.native_dropout.default: _dropout,
        aten.squeeze.dims: _squeeze_dims,
    }
    known = dict(core_aten_decompositions()) | get_decompositions(_BEYOND_CORE)
    return known | KERNELS | MATRICES | own


_ASSERTIONS = {
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._functional_assert_async.msg,
    aten._linalg_check_errors.default,
}


def finish_decomposition(graph: torch.fx.Graph) -> None:
    """Take out of a traced graph what cannot be lowered and what has another name in ATen."""
    for node in list(graph.nodes):
        # A compiled graph cannot raise; eager would, on the same input.
        if node.target in _ASSERTIONS:
            graph.erase_node(node)
        # Some decompositions, and the pass over Python floats, write operators that are not ATen.
        elif node.target is torch.ops.prims.convert_element_type.default:
            node.target = aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
        elif node.target is torch.ops.prims.scalar_tensor.default:
            node.target = aten.scalar_tensor.default


# Operators outside of the core table that PyTorch can decompose and torch-mlir does not know.
_BEYOND_CORE = [
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten.addmv.default,
    aten.dist.default,
    aten.grid_sampler_2d.default,
]


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    del compute_mode
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def _batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del momentum
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    shape = [-1, *[1] * (input.ndim - 2)]
    scale = (running_var + eps).rsqrt()
    out = (wide - running_mean.view(shape)) * scale.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype), input.new_empty(0), input.new_empty(0)


def _multinomial(
    self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> torch.Tensor:
    """Eager's own way where it draws one exponential number per class (Distributions.cpp)."""
    if generator is not None or (replacement and num_samples > 1):
        return NotImplemented
    scaled = self / aten.exponential.default(torch.empty_like(self), 1.0)
    if num_samples == 1:
        return scaled.argmax(-1, keepdim=True)
    return scaled.topk(num_samples, -1).indices


def _bernoulli(self: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return (torch.rand_like(self) < self).to(self.dtype)


def _dropout(
    input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager's own way: numbers are kept with probability 1 - p, whatever they are."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    kept = aten.bernoulli.p(torch.empty_like(input), 1 - p)
    return input * kept / (1 - p), kept.to(torch.bool)


def _hypot(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # The greater one comes out of the root, so that no square overflows or vanishes.
    dtype = torch.result_type(self, other)
    one, two = self.abs().to(dtype), other.abs().to(dtype)
    greater, lesser = torch.maximum(one, two), torch.minimum(one, two)
    ratio = torch.where(greater == 0, 0, lesser / greater)
    length = greater * (1 + ratio * ratio).sqrt()
    return torch.where(one.isinf() | two.isinf(), float("inf"), length)


def _scaled_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Scales of one number, or one per row of `self` (M, 1) and column of `mat2` (1, N)."""
    del use_fast_accum
    rows, columns = (self.shape[0], 1), (1, mat2.shape[1])
    whole = scale_a.numel() == 1 or scale_a.shape == rows
    whole = whole and (scale_b.numel() == 1 or scale_b.shape == columns)
    if not whole or scale_result is not None:
        return NotImplemented
    left = self.float() * (scale_a.reshape(()) if scale_a.numel() == 1 else scale_a)
    right = mat2.float() * (scale_b.reshape(()) if scale_b.numel() == 1 else scale_b)
    product = left @ right
    if bias is not None:
        product = product + bias
    return product.to(self.dtype if out_dtype is None else out_dtype)


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return src.to(self.dtype).expand(self.shape)


def _empty_permuted(
    size: Sequence[int], physical_layout: Sequence[int], **kwargs: Any
) -> torch.Tensor:
    return aten.empty.memory_format(size, **kwargs)


def _full(size: Sequence[int], fill_value: Any, *, dtype: Any = None, **kwargs: Any) -> Any:
    # torch-mlir takes numbers only.
    if not isinstance(fill_value, bool):
        return NotImplemented
    return aten.full.default(
        size, int(fill_value), dtype=torch.bool if dtype is None else dtype, **kwargs
    )


def _squeeze_dims(self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    squeezed = {index % self.ndim for index in dim if self.shape[index] == 1} if self.ndim else ()
    return self.view([size for index, size in enumerate(self.shape) if index not in squeezed])


def decompose(graph: CapturedGraph, operators: Iterable[str]) -> CapturedGraph:
    """Write the named operators of a graph with others, wherever PyTorch or this file knows how.

    Source lines, inputs, outputs and aliases stay. An operator without a decomposition stays too.

    Args:
        graph: a captured graph.
        operators: names such as `aten.linalg__powsum.default`.
    """
    known = {**torch_decompositions, **_OF_NEWER_OPERATORS}
    wanted = set(operators)
    table = {op: rule for op, rule in known.items() if str(op) in wanted}
    if not table:
        return graph
    values = [node.meta["val"] for node in graph.graph_module.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(values)
    assert mode is not None, "a captured graph has inputs, and they are fake tensors"
    with mode, torch.no_grad(), preserve_node_meta():
        interpreter = torch.fx.Interpreter(graph.graph_module)
        decomposed = make_fx(interpreter.run, decomposition_table=table)(*values)
    return type(graph)(decomposed, graph.record, graph.bucket)


def _powsum(
    self: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    return torch.sum(torch.abs(self).to(dtype or self.dtype) ** ord, dim, keepdim)


# Operators that PyTorch/XLA's torch 2.9 does not know and torch 2.13 cannot decompose.
_OF_NEWER_OPERATORS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.linalg__powsum.default: _powsum,
}
