"""The native route's lowering process: torch-mlir and jaxlib's MLIR, without torch.

torch-mlir ends its process on some inputs. Here that costs one graph an error message, not a
server its life. Started by `native.NativeLowering`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vllm_neuron.lowering.worker import answer_stream, serve

__all__ = ["main"]


def main(memory_limit_bytes: int) -> None:
    """Answer requests on standard input until it is closed.

    Args:
        memory_limit_bytes: limit of this process's address space; an allocation beyond it fails.
    """
    serve(_lower, answer_stream(memory_limit_bytes))


def _lower(graph: Mapping[str, Any], literals: bytes) -> tuple[dict[str, Any], bytes]:
    from vllm_neuron.lowering.ops import own_lowering
    from vllm_neuron.lowering.stablehlo_module import finish_module
    from vllm_neuron.lowering.torch_dialect import import_graph, lower_to_stablehlo

    imported = import_graph(graph, is_own=lambda node: own_lowering(node) is not None)
    text = lower_to_stablehlo(imported.module)
    return {"module": True}, finish_module(text, graph, literals, imported.own)


if __name__ == "__main__":
    main(int(sys.argv[1]))
