"""A decoder step that also returns what its layers computed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.attention import KVCache
from vllm_neuron.vllm.step import DecoderStep

__all__ = ["TappedStep", "decoder_layers", "tapped_modules"]

# What the modules returned in the step that is running. It belongs to this module because a hook
# gets nothing of the step, and Dynamo follows a global that is set back.
_kept: dict[str, list[torch.Tensor]] | None = None


class TappedStep(DecoderStep):
    """A `DecoderStep` that returns logits and, by name of the module, the tensors it returned.

    Only within `hooked()`, for eager calls as well as for captures.
    """

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        logits_rows: torch.Tensor,
        kv_caches: Sequence[KVCache],
    ) -> Any:
        """See `DecoderStep.forward`."""
        global _kept
        outer, _kept = _kept, {}
        try:
            results = super().forward(
                input_ids, positions, slot_mapping, block_tables, logits_rows, kv_caches
            )
            return results[0], _kept
        finally:
            _kept = outer

    @contextlib.contextmanager
    def hooked(self, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
        """Keep what these modules return."""
        handles = [
            module.register_forward_hook(partial(_keep, name)) for name, module in modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _keep(name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
    if _kept is None:
        return
    results = output if isinstance(output, (tuple, list)) else (output,)
    # Copies: the next layer may write into the very tensor.
    _kept[name] = [item.clone() for item in results if isinstance(item, torch.Tensor)]


def decoder_layers(attention_layers: Sequence[str]) -> list[str]:
    """Names of the decoder layers by those of the attention layers in them, in order.

    Raises:
        ConfigurationError: an attention layer is in no numbered layer.
    """
    names = []
    for name in attention_layers:
        match = re.match(r"(.*?\.\d+)\.", name)
        if match is None:
            raise ConfigurationError(
                f"The attention layer {name} is not part of a numbered decoder layer (such as "
                "model.layers.0), so there are no boundaries at which to compare this model.",
                name="model",
                value=name,
            )
        names.append(match[1])
    return list(dict.fromkeys(names))


def tapped_modules(
    model: torch.nn.Module, attention_layers: Sequence[str]
) -> dict[str, torch.nn.Module]:
    """The decoder layers and what is beside them (embedding, last norm) by name, in model order."""
    layers = decoder_layers(attention_layers)
    places: dict[str, torch.nn.Module] = {}
    folder, _, _ = layers[0].rpartition(".")
    parent, _, own = folder.rpartition(".")
    for child, module in model.get_submodule(parent).named_children():
        if child == own:
            places |= {name: model.get_submodule(name) for name in layers}
        elif not isinstance(module, torch.nn.ModuleList):
            places[f"{parent}.{child}".lstrip(".")] = module
    return places
