"""From a captured graph to a module that a compiler takes, one file per route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_neuron.route import Route

if TYPE_CHECKING:
    import logging
    from pathlib import Path

    from vllm_neuron.lowering.module import Lowering

__all__ = ["lowering_for"]


def lowering_for(route: Route, *, xla_python: Path | None, logger: logging.Logger) -> Lowering:
    """The lowering of a route; its child process starts at the first graph.

    Args:
        route: the compilation route.
        xla_python: VLLM_NEURON_XLA_PYTHON.
        logger: where the XLA route writes time and memory of each lowering.

    Raises:
        ConfigurationError: there is no interpreter for the XLA route's worker.
    """
    if route is Route.XLA:
        from vllm_neuron.lowering import xla_interpreter
        from vllm_neuron.lowering.xla import XlaLowering

        return XlaLowering(xla_interpreter.find(xla_python), logger=logger)
    from vllm_neuron.lowering.native import NativeLowering

    return NativeLowering()
