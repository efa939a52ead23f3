"""Recognises attention over a paged KV cache in a StableHLO module, by what it computes.

The pattern is the lowering of `vllm/attention.py`: keys and values are gathered by block table,
scores are masked, softmax is taken of them, and values are summed up by it. Whatever differs in any
step is left as it is. docs/host-emulator.md says what the custom call computes in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PagedAttention", "paged_attention"]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Values of a module that one attention is made of.

    Attributes:
        queries: float32 (B * H, G * Q, head), scaled.
        keys: key cache (blocks, T, H, head).
        values: value cache (blocks, T, H, value head).
        blocks: block tables of B sequences, int64 (B * N, 1).
        visible: which keys a query sees, bool (B, 1, Q, N * T).
        live: which values count, bool (B, N * T, 1, 1).
        soft_cap: what the scores are kept below, or None.
        sinks: a score without a value per query head, float32 (1, H * G, 1, 1), or None.
    """

    queries: Any
    keys: Any
    values: Any
    blocks: Any
    visible: Any
    live: Any
    soft_cap: float | None
    sinks: Any | None


class _Different(Exception):
    """A module does something else than the pattern says."""


def paged_attention(product: Any) -> PagedAttention | None:
    """Return what attention is made of, if `product` is its sum of values.

    Args:
        product: a `stablehlo.dot_general`.
    """
    try:
        return _match(product)
    except _Different:
        return None


def _match(product: Any) -> PagedAttention:
    shares, values = _batched_operands(product, contracting=(2, 1))
    pairs, rows, keys = _shape(shares)
    value_cache, value_blocks, live, element = _values(values)
    shares = _through(shares, "reshape")
    if element == "bf16":
        (shares,) = _operands(shares, "convert")
    elif element != "f32":
        raise _Different
    shares = _through(shares, "reshape")
    sequences, heads, queries, _ = _expect_rank(shares, 4)
    scores, visible, sinks = _softmax(shares)
    scores, soft_cap = _capped(_through(scores, "reshape"))
    query_rows, key_rows = _batched_operands(_owner(scores, "dot_general"), contracting=(2, 1))
    key_cache, key_blocks = _keys(key_rows, element)

    blocks, block_size, kv_heads, head = _expect_rank(key_cache, 4)
    value_dims = _expect_rank(value_cache, 4)
    table = _table(key_blocks)
    expected = {
        "shares": (pairs, rows, keys) == (sequences * kv_heads, heads // kv_heads * queries, keys),
        "heads": heads % kv_heads == 0,
        "scores": _shape(scores) == (pairs, rows, keys) and _element(scores) == "f32",
        "result": _element(product.results[0]) == element,
        "queries": _shape(query_rows) == (pairs, rows, head) and _element(query_rows) == "f32",
        "values": value_dims[:3] == (blocks, block_size, kv_heads),
        "one table": table == _table(value_blocks),
        "table": _element(table) == "i64" and _count(table) * block_size == sequences * keys,
        "visible": _shape(visible) == (sequences, 1, queries, keys),
        "live": _shape(live) == (sequences, keys, 1, 1),
        "caches": _element(key_cache) == _element(value_cache),
        "sinks": sinks is None or (_shape(sinks) == (1, heads, 1, 1) and _element(sinks) == "f32"),
        "not empty": 0 not in (blocks, block_size, kv_heads, heads, queries, keys, sequences, head),
    }
    if not all(expected.values()):
        raise _Different
    return PagedAttention(
        queries=query_rows,
        keys=key_cache,
        values=value_cache,
        blocks=table,
        visible=visible,
        live=live,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def _softmax(shares: Any) -> tuple[Any, Any, Any | None]:
    """Return scores (before the mask), mask and sinks of a softmax over the last dimension."""
    sinks = None
    width = _shape(shares)[3]
    if _is(shares, "slice"):
        cut = _owner(shares, "slice")
        last = _ints(cut.attributes["limit_indices"])
        if any(_ints(cut.attributes["start_indices"])) or last != _shape(shares):
            raise _Different
        if set(_ints(cut.attributes["strides"])) != {1}:
            raise _Different
        shares = cut.operands[0]
        if _shape(shares)[3] != width + 1:
            raise _Different
        sinks = True
    powers, total = _operands(shares, "divide")
    (distances,) = _operands(powers, "exponential")
    scores, largest = _operands(distances, "subtract")
    if _reduced(total, "stablehlo.add", 0.0) != powers:
        raise _Different
    if _reduced(largest, "stablehlo.maximum", float("-inf")) != scores:
        raise _Different
    if sinks:
        joined = _owner(scores, "concatenate")
        if _int(joined.attributes["dimension"]) != 3 or len(joined.operands) != 2:
            raise _Different
        scores, sinks = joined.operands
        sinks = _unbroadcast(sinks)
    visible, scores, hidden = _operands(scores, "select")
    if _constant(_unbroadcast(hidden)) != float("-inf"):
        raise _Different
    return scores, _unbroadcast(visible), sinks


def _reduced(value: Any, operation: str, start: float) -> Any:
    """Return the operand of a reduction over the last of 4 dimensions, broadcast again."""
    column = _unbroadcast(value)
    reduction = _owner(_through(column, "reshape"), "reduce")
    rows = _shape(reduction.results[0])
    body = [inner.operation.name for inner in reduction.regions[0].blocks[0].operations]
    if (
        body != [operation, "stablehlo.return"]
        or list(_ints(reduction.attributes["dimensions"])) != [3]
        or len(reduction.operands) != 2
        or _constant(reduction.operands[1]) != start
        # Not (..., 1, rows): with as many rows as keys that fits too, and divides by other rows.
        or _shape(column) not in (rows, (*rows, 1))
    ):
        raise _Different
    return reduction.operands[0]


def _capped(scores: Any) -> tuple[Any, float | None]:
    """Return scores before a soft cap, and the cap, if there is one."""
    if not _is(scores, "multiply"):
        return scores, None
    bounded, scale = _operands(scores, "multiply")
    (fractions,) = _operands(bounded, "tanh")
    scores, divisor = _operands(fractions, "divide")
    cap = _constant(_unbroadcast(scale))
    if cap != _constant(_unbroadcast(divisor)) or not cap > 0:
        raise _Different
    return scores, cap


def _keys(value: Any, element: str) -> tuple[Any, Any]:
    """Return cache and block indices of keys, transposed and of type float32."""
    value = _transposed(_unchanged(value), (0, 2, 1))
    if element != "f32":
        (value,) = _operands(value, "convert")
    cache, blocks, found = _gathered(_by_sequence(value))
    if found != element:
        raise _Different
    return cache, blocks


def _values(value: Any) -> tuple[Any, Any, Any, str]:
    """Return cache, block indices, liveness and element type of values."""
    rows = _by_sequence(_unchanged(value))
    live, rows, zero = _operands(rows, "select")
    if _constant(_unbroadcast(zero)) != 0.0:
        raise _Different
    return *_gathered(rows)[:2], _unbroadcast(live), _element(rows)


def _by_sequence(value: Any) -> Any:
    """Return (B, S, H, dim) of (B * H, S, dim)."""
    by_head = _through(value, "reshape")
    _, heads, length, dim = _expect_rank(by_head, 4)
    if _shape(value)[1:] != (length, dim) or heads < 1:
        raise _Different
    return _transposed(by_head, (0, 2, 1, 3))


def _gathered(rows: Any) -> tuple[Any, Any, str]:
    """Return cache, block indices and element type of whole blocks gathered from a cache."""
    from jaxlib.mlir.dialects import stablehlo

    element = _element(rows)
    sizes = _shape(rows)[2:]
    rows = _through(rows, "reshape")
    if _is(rows, "bitcast_convert"):
        (rows,) = _operands(rows, "bitcast_convert")
    cache, blocks = _operands(rows, "gather")
    stored = {"bf16": "i16", "f32": "f32"}.get(element)
    shape = _expect_rank(cache, 4)
    owner = _owner(rows, "gather")
    numbers = stablehlo.GatherDimensionNumbers(owner.attributes["dimension_numbers"])
    if (
        _element(cache) != stored
        or _element(rows) != stored
        or shape[2:] != sizes
        or list(numbers.offset_dims) != [1, 2, 3]
        or list(numbers.collapsed_slice_dims) != [0]
        or list(numbers.operand_batching_dims)
        or list(numbers.start_index_map) != [0]
        or numbers.index_vector_dim != 1
        or _ints(owner.attributes["slice_sizes"]) != (1, *shape[1:])
        or _shape(blocks) != (_count(blocks), 1)
    ):
        raise _Different
    return cache, blocks, element


def _table(blocks: Any) -> Any:
    """Return what all gathers of one table have in common, whatever its shape."""
    return _through(blocks, "reshape")


def _batched_operands(product: Any, *, contracting: tuple[int, int]) -> tuple[Any, Any]:
    """Return the operands of a product of three dimensions, the first one of the batch."""
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    if (
        "algorithm" in product.attributes
        or list(numbers.lhs_batching_dimensions) != [0]
        or list(numbers.rhs_batching_dimensions) != [0]
        or list(numbers.lhs_contracting_dimensions) != [contracting[0]]
        or list(numbers.rhs_contracting_dimensions) != [contracting[1]]
    ):
        raise _Different
    left, right = product.operands
    _expect_rank(left, 3)
    _expect_rank(right, 3)
    return left, right


def _transposed(value: Any, permutation: tuple[int, ...]) -> Any:
    owner = _owner(value, "transpose")
    if _ints(owner.attributes["permutation"]) != permutation:
        raise _Different
    return owner.operands[0]


def _unbroadcast(value: Any) -> Any:
    """Return what is broadcast without a change of its dimensions' order, or `value` itself."""
    while _is(value, "broadcast_in_dim"):
        owner = _owner(value, "broadcast_in_dim")
        dimensions = _ints(owner.attributes["broadcast_dimensions"])
        if dimensions != tuple(range(len(dimensions))):
            break
        value = owner.operands[0]
    return value


def _unchanged(value: Any) -> Any:
    """Return what is broadcast to the shape it has already, or `value` itself."""
    if _is(value, "broadcast_in_dim"):
        owner = _owner(value, "broadcast_in_dim")
        dimensions = _ints(owner.attributes["broadcast_dimensions"])
        if owner.operands[0].type == value.type and dimensions == tuple(range(len(dimensions))):
            return owner.operands[0]
    return value


def _through(value: Any, name: str) -> Any:
    """Skip operations of a name."""
    while _is(value, name):
        (value,) = _operands(value, name)
    return value


def _is(value: Any, name: str) -> bool:
    from jaxlib.mlir import ir

    return not isinstance(value.owner, ir.Block) and value.owner.name == f"stablehlo.{name}"


def _owner(value: Any, name: str) -> Any:
    if not _is(value, name):
        raise _Different
    return value.owner


def _operands(value: Any, name: str) -> tuple[Any, ...]:
    return tuple(_owner(value, name).operands)


def _constant(value: Any) -> float:
    """Return the number that all elements of a constant are."""
    from jaxlib.mlir import ir

    attribute = ir.DenseElementsAttr(_owner(value, "constant").attributes["value"])
    if not attribute.is_splat:
        raise _Different
    number = attribute.get_splat_value()
    if not isinstance(number, ir.FloatAttr):
        raise _Different
    return ir.FloatAttr(number).value


def _shape(value: Any) -> tuple[int, ...]:
    from jaxlib.mlir import ir

    kind = ir.RankedTensorType(value.type)
    if not kind.has_static_shape:
        raise _Different
    return tuple(kind.shape)


def _expect_rank(value: Any, rank: int) -> tuple[int, ...]:
    shape = _shape(value)
    if len(shape) != rank:
        raise _Different
    return shape


def _count(value: Any) -> int:
    count = 1
    for size in _shape(value):
        count *= size
    return count


def _element(value: Any) -> str:
    from jaxlib.mlir import ir

    return str(ir.RankedTensorType(value.type).element_type)


def _ints(attribute: Any) -> tuple[int, ...]:
    from jaxlib.mlir import ir

    return tuple(ir.DenseI64ArrayAttr(attribute))


def _int(attribute: Any) -> int:
    from jaxlib.mlir import ir

    return ir.IntegerAttr(attribute).value
