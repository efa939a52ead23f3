"""Quantised weights as plain tensor arithmetic of static shape: unpacking and dequantisation.

All of it is traced into the graph of a step. Integers stay int32 or narrower: compilers for Neuron
refuse arithmetic on 64-bit ones.
"""

from __future__ import annotations

import torch

__all__ = ["dequantise", "expand_blocks", "unpack", "unpack_awq"]

_WORD_BITS = 32
#: AWQ's value i of a word lies at bit 4 * (i // 2 + 4 * (i % 2)): the words hold values
#: 0 2 4 6 1 3 5 7, lowest bits first (AutoAWQ, `awq/utils/packing_utils.py`).
_AWQ_BITS = 4


def unpack(words: torch.Tensor, *, bits: int, dim: int) -> torch.Tensor:
    """Unpacks unsigned integers, lowest bits first (GPTQ and compressed-tensors).

    Args:
        words: int32, of any shape.
        bits: bits of each value, a divisor of 32.
        dim: the dimension along which values were packed.

    Returns:
        int32, longer by 32 / bits along `dim`.
    """
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return _shifted(words, shifts, bits=bits, dim=dim)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpacks AWQ's 4-bit integers, packed along the last dimension in an order of its own.

    Args:
        words: int32 (rows, n / 8).

    Returns:
        int32 (rows, n).
    """
    place = torch.arange(_WORD_BITS // _AWQ_BITS, dtype=torch.int32, device=words.device)
    shifts = ((place >> 1) + ((place & 1) << 2)) * _AWQ_BITS
    return _shifted(words, shifts, bits=_AWQ_BITS, dim=words.dim() - 1)


def _shifted(words: torch.Tensor, shifts: torch.Tensor, *, bits: int, dim: int) -> torch.Tensor:
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = -1
    # The shift is arithmetic: the mask takes the copies of the sign bit away.
    values = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return values.flatten(dim, dim + 1)


def dequantise(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    *,
    dim: int,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns (values - zeros) * scales.

    The difference is exact in every model dtype (integers up to 256 in magnitude), so that each
    weight is rounded once, by the product.

    Args:
        values: int32, the length of `dim` is that of the layer's input.
        scales: of the model's dtype, one per group along `dim`.
        zeros: zero points like `scales`, or one for all.
        dim: the dimension of the input.
        groups: group of each input, int32; None: they are consecutive and of equal size.

    Returns:
        Of the dtype of `scales`, of the shape of `values`.
    """
    values = values.to(scales.dtype)
    if groups is not None:
        scales = scales.index_select(dim, groups)
        if isinstance(zeros, torch.Tensor):
            zeros = zeros.index_select(dim, groups)
        return (values - zeros) * scales
    grouped = values.unflatten(dim, (scales.shape[dim], -1))
    if isinstance(zeros, torch.Tensor):
        zeros = zeros.unsqueeze(dim + 1)
    return ((grouped - zeros) * scales.unsqueeze(dim + 1)).flatten(dim, dim + 1)


def expand_blocks(
    scales: torch.Tensor, *, block: tuple[int, int], shape: tuple[int, int]
) -> torch.Tensor:
    """Repeats a scale per block to one per element.

    Args:
        scales: (ceil(rows / block rows), ceil(columns / block columns)).
        block: rows and columns of a block; the last ones may be cut off.
        shape: rows and columns of the result.
    """
    rows, columns = scales.shape
    repeated = scales.view(rows, 1, columns, 1).expand(rows, block[0], columns, block[1])
    return repeated.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]
