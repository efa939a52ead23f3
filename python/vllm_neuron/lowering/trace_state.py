"""What tracing a graph must not leave behind in the process: inference mode, gradients, autocast.

Dynamo writes `with torch.inference_mode()` and `with torch.autocast(...)` as a call that enters and
one that leaves, and AOTAutograd runs both while it traces. If an operator between them is refused,
the second never runs, and every later operation of the process would see the mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch._library import simple_registry
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

__all__ = ["kept_state", "without_inference_mode"]

_CHECK = "aten::_linalg_check_errors"


def without_inference_mode(graph_module: fx.GraphModule) -> None:
    """Put the gradient mode that inference mode implies in its place, in a graph of Dynamo's.

    Values do not depend on inference mode. Fake tensors cannot be traced in it, since in it a view
    of an ordinary tensor has no version counter.
    """
    enabled = torch.is_grad_enabled()
    before: dict[fx.Node, bool] = {}
    for node in list(graph_module.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif node.target is _enter_inference_mode:
            before[node], enabled = enabled, not node.args[0]
            _replace_by_grad_mode(graph_module.graph, node, enabled)
        elif node.target is _exit_inference_mode:
            enabled = before[node.args[0]]
            _replace_by_grad_mode(graph_module.graph, node, enabled)
    for node in reversed(before):
        graph_module.graph.erase_node(node)
    if before:
        graph_module.recompile()


def _replace_by_grad_mode(graph: fx.Graph, node: fx.Node, enabled: bool) -> None:
    with graph.inserting_before(node):
        mode = graph.call_function(torch._C._set_grad_enabled, (enabled,))
    mode.meta = dict(node.meta)
    if node.target is _exit_inference_mode:
        graph.erase_node(node)


@contextmanager
def kept_state() -> Iterator[None]:
    """Trace with checks as plain operators, and restore the state of this thread at the end.

    The state is the dispatcher's, autograd's and autocast's. The check is that of torch.linalg for
    singular matrices; PyTorch threads an effect token through the graph for it.
    """
    devices = torch._C._autocast_supported_devices()
    autocast = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    }
    cache = torch.is_autocast_cache_enabled()
    depth = _autocast_depth()
    grad = torch.is_grad_enabled()
    effect = simple_registry.singleton.find(_CHECK).effect
    kind = effect.effect
    effect.register(None)
    try:
        with torch._C._PreserveDispatchKeyGuard():
            yield
    finally:
        effect.register(kind)
        torch._C._set_grad_enabled(grad)
        for device, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        for _ in range(_autocast_depth() - depth):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """In how many autocast regions this thread is; only stepping tells."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
