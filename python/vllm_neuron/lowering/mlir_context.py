"""The MLIR context of jaxlib, in which StableHLO modules are read and written."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, stablehlo

__all__ = ["stablehlo_context"]


def stablehlo_context() -> ir.Context:
    """Return a context of its own with jaxlib's dialects, StableHLO and CHLO."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    return context
