"""The LoRA adapters of one rank: vLLM's caches of them, over tensors that graphs have as inputs.

vLLM reads adapters, keeps the `--max-cpu-loras` last used ones in memory and the `--max-loras` last
used ones in slots. The slots are tensors of a fixed shape, uploaded once; what is written into them
reaches the device before the next step. So no adapter is part of a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.utils import is_in_target_modules
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.models import supports_lora
from vllm.model_executor.utils import get_packed_modules_mapping

from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.lora_slots import NO_ADAPTER
from vllm_neuron.vllm.punica import AdapterStack, NeuronPunicaWrapper, stacked_a, stacked_b

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

    from vllm_neuron.vllm.execution import Execution

__all__ = ["LoraAdapters"]

logger = logging.getLogger(__name__)


class LoraAdapters:
    """The adapters of a model.

    Args:
        vllm_config: the engine's configuration, with a `lora_config`.
        model: vLLM's model; its layers are replaced by vLLM's layers with adapters.
        execution: has the device's copies of the slots, once the graphs are built.

    Raises:
        ConfigurationError: the model cannot have adapters.
    """

    def __init__(self, vllm_config: VllmConfig, model: Any, execution: Execution) -> None:
        _check_model(vllm_config, model)
        self._execution = execution
        self._cache = _AdapterCache(vllm_config, torch.device("cpu"), model.embedding_modules)
        self._cache.create_lora_manager(model, vllm_config)
        slots: Any = self._cache._adapter_manager
        self._slots: _Slots = slots
        self._tensors = _lay_out(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def activate(self, requests: Collection[LoRARequest]) -> None:
        """Has the adapters of a step in slots; vLLM schedules `--max-loras` of them at most.

        Only `add` reads again what `load_inplace` asks to be: in a step, files that somebody is
        writing would end the engine, and every step would read them.
        """
        if requests:
            kept = {msgspec.structs.replace(request, load_inplace=False) for request in requests}
            self._cache.set_active_adapters(kept, None)
            self._follow()

    def slots_of(self, adapter_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the slots of active adapters; of id 0, which is none, `NO_ADAPTER`."""
        slots = self._slots.lora_index_to_id
        return np.array([slots.index(i) if i else NO_ADAPTER for i in adapter_ids], np.int64)

    def add(self, request: LoRARequest) -> bool:
        """Reads an adapter and puts it into a slot; returns whether it is there now.

        Raises:
            ValueError: its rank, modules or values cannot be served.
            LoRAAdapterNotFoundError: there is none in the place that the request names.
        """
        added = self._cache.add_adapter(request)
        self._follow()
        return added

    def remove(self, adapter_id: int) -> bool:
        """Forgets an adapter; returns whether it was known."""
        return self._cache.remove_adapter(adapter_id)

    def pin(self, adapter_id: int) -> bool:
        """Keeps an adapter in its slot until it is removed.

        Raises:
            ValueError: it is not known.
        """
        pinned = self._cache.pin_adapter(adapter_id)
        self._follow()
        return pinned

    def known(self) -> set[int]:
        """Returns the ids of the adapters in memory."""
        return self._cache.list_adapters()

    def _follow(self) -> None:
        """Writes the slots to the device if an adapter was put into one."""
        if self._slots.written:
            self._execution.refresh(self._tensors)
            self._slots.written = False


class _Slots(LRUCacheLoRAModelManager):
    """vLLM's slots, and whether one was written.

    Attributes:
        written: set when an adapter is written into a slot; for the owner to reset.
    """

    written = False

    def activate_adapter(self, lora_id: int) -> bool:
        """Puts an adapter into a slot, in the place of the one that was used longest ago."""
        was_written = super().activate_adapter(lora_id)
        self.written = self.written or was_written
        return was_written


class _AdapterCache(LRUCacheWorkerLoRAManager):
    """vLLM's cache of adapters, which refuses those that would spoil other requests."""

    _manager_cls = _Slots

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """Reads an adapter.

        Raises:
            ValueError: it has a value that is not finite, with its scale, which vLLM multiplies
                into B in the dtype of the slots. A step multiplies the columns of B of all slots
                with zeros, except for a request's own, and zero times infinity is NaN.
        """
        adapter = super()._load_adapter(lora_request)
        where = f"LoRA adapter {lora_request.lora_name} ({lora_request.lora_path})"
        for name, weights in adapter.loras.items():
            if weights.lora_a is None or weights.lora_b is None:
                raise ValueError(f"{where}: module {name} lacks A or B.")
            for part in (weights.lora_a, weights.lora_b * weights.scaling):
                if not bool(torch.isfinite(part).all()):
                    raise ValueError(f"{where}: module {name} has a value that is not finite.")
        served = self._adapter_manager.modules
        parts = self._adapter_manager.packed_modules
        known = {*served, *(part for names in parts.values() for part in names)}
        left_out = sorted(adapter.loras.keys() - known)
        if left_out:
            logger.warning(
                "%s changes %d modules that have no adapters on this server, which leaves these "
                "changes out, e.g. %s; see --lora-target-modules.",
                where,
                len(left_out),
                left_out[0],
            )
        return adapter


def _check_model(vllm_config: VllmConfig, model: Any) -> None:
    """Refuses a model whose layers cannot have adapters."""
    name = type(model).__name__
    supported: bool = supports_lora(model)
    if not supported:
        raise ConfigurationError(
            f"--enable-lora is not supported for {name}: vLLM's model does not say how adapters "
            "fit to its layers. Unset it.",
            name="--enable-lora",
            value=name,
        )
    assert vllm_config.lora_config is not None
    targets = vllm_config.lora_config.target_modules
    packed = get_packed_modules_mapping(model)
    for module_name, module in model.named_modules():
        if isinstance(module, MoERunner) and is_in_target_modules(module_name, targets, packed):
            raise ConfigurationError(
                f"--enable-lora for the experts of {name} ({module_name}) is not supported on "
                "Neuron in this version: adapters of experts need kernels that are not written. "
                "Set --lora-target-modules to other layers, e.g. q_proj k_proj v_proj o_proj.",
                name="--lora-target-modules",
                value=module_name,
            )


def _lay_out(slots: _Slots) -> list[torch.Tensor]:
    """Puts the slots of all layers into the layout of the graphs; returns a graph's inputs."""
    tensors = []

    def stack(stacked: AdapterStack) -> AdapterStack:
        tensors.append(stacked.flat)
        return stacked

    for layer in slots.modules.values():
        module: Any = layer
        if isinstance(module, VocabParallelEmbeddingWithLoRA):
            wrapper: Any = module.punica_wrapper
            assert isinstance(wrapper, NeuronPunicaWrapper)
            wrapper.vocabulary = module.lora_a_stacked.shape[1]
            tensors.append(module.lora_a_stacked_2d)
            module.lora_b_stacked = stack(stacked_b(module.lora_b_stacked))
        elif isinstance(module, LogitsProcessorWithLoRA):
            module.lora_a_stacked = stack(stacked_a(module.lora_a_stacked))
            module.lora_b_stacked = stack(stacked_b(module.lora_b_stacked))
        else:
            module.lora_a_stacked = tuple(stack(stacked_a(a)) for a in module.lora_a_stacked)
            module.lora_b_stacked = tuple(stack(stacked_b(b)) for b in module.lora_b_stacked)
    return tensors
