"""Runs pooling models: hidden states by compiled graphs, then vLLM's pooler on the host."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.buckets import encode_label, prefill_label
from vllm_neuron.vllm.model_runner import NeuronModelRunner
from vllm_neuron.vllm.step import DecoderStep, EncoderStep
from vllm_neuron.vllm.step_inputs import EncoderInputs, StepInputs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["PoolingModelRunner", "served_tasks"]

#: The tasks of vLLM (`vllm.tasks`) that are served, one vector per prompt each.
SERVED_TASKS = ("embed", "classify")


def served_tasks(tasks: Collection[str]) -> tuple[str, ...]:
    """Returns those of a model's pooling tasks that requests may ask for.

    Raises:
        ConfigurationError: there is none.
    """
    served = tuple(task for task in SERVED_TASKS if task in tasks)
    if not served:
        raise ConfigurationError(
            f"This model cannot be served on Neuron: it pools for {', '.join(sorted(tasks))}; the "
            f"plugin pools for {' and '.join(SERVED_TASKS)}. Choose another model.",
            name="model",
            value=", ".join(sorted(tasks)),
        )
    return served


class PoolingModelRunner(NeuronModelRunner):
    """Runs one rank's pooling model.

    A decoder (Qwen3-Embedding) is run as for generation, by prefill buckets over the KV cache, in
    chunks and from the prefix cache where vLLM allows it. An encoder (BERT) has no KV cache and
    sees a prompt whole. Nothing is decoded. The pooler, a few operations on one vector, is vLLM's
    own module and runs eagerly.
    """

    def _check_model(self) -> None:
        """Refuses what cannot be pooled.

        Raises:
            ConfigurationError: the model mixes kinds of attention or serves other tasks only.
        """
        kinds = {layer.impl.is_encoder for layer in self.layers.values()}
        if len(kinds) != 1:
            raise ConfigurationError(
                "This model cannot be served on Neuron: its attention layers must all have a KV "
                f"cache, or all be those of an encoder; there are {len(self.layers)} of "
                f"{len(kinds)} kinds.",
                name="model",
                value=type(self.model).__name__,
            )
        (self.is_encoder,) = kinds
        self._tasks = served_tasks(self.model.pooler.get_supported_tasks())

    def supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks of the model's pooler that are served."""
        return self._tasks

    def execution_labels(self) -> list[str]:
        """Returns the buckets' names in metrics."""
        if self.is_encoder:
            return [*map(encode_label, self.buckets.prefill)]
        return super().execution_labels()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV caches, of an encoder none, and the request table."""
        self._allocate(kv_cache_config)

    def _add_prefill(self, steps: dict[str, torch.nn.Module]) -> None:
        if self.is_encoder:
            step = EncoderStep(self.model, self.layers).eval()
            for size in self.buckets.prefill:
                steps[encode_label(size)] = step
                self._inputs[encode_label(size)] = EncoderInputs(size)
            return
        super()._add_prefill(steps)

    def _add_decode(self, steps: dict[str, torch.nn.Module]) -> None:
        """Adds nothing: a pooling model decodes nothing."""

    def _step(self, *, return_hidden_states: bool) -> DecoderStep:
        return DecoderStep(
            self.model,
            self.layers,
            block_size=self.block_size,
            return_logits=False,
            return_hidden_states=return_hidden_states,
        ).eval()

    def _warm_up_host(self) -> None:
        """Does nothing: no pooler is compiled."""

    def _arguments(self, inputs: Any) -> tuple[Any, ...]:
        return inputs.tensors if self.is_encoder else super()._arguments(inputs)

    @torch.no_grad()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs the scheduled tokens and pools the prompts that they complete."""
        table = self.table
        for request in scheduler_output.scheduled_new_reqs:
            params = request.pooling_params
            assert params is not None, "vLLM gives a pooling model pooling requests only"
            assert params.task is not None, "vLLM checked the task"
            self.model.pooler.get_pooling_updates(params.task).apply(params)
        table.update(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        if not counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = table.batch
        # In the order of the schedule: a request may use blocks that those before it fill.
        hidden_states = {
            req_id: self._hidden_states(batch.req_id_to_index[req_id], count)
            for req_id, count in counts.items()
        }
        return ModelRunnerOutput(
            req_ids=batch.req_ids.copy(),
            req_id_to_index=batch.req_id_to_index.copy(),
            pooler_output=self._pool(
                torch.cat([hidden_states[req_id] for req_id in batch.req_ids]),
                np.array([counts[req_id] for req_id in batch.req_ids], np.int64),
            ),
        )

    @torch.no_grad()
    def execute_padding(self) -> None:
        """Runs the smallest bucket on padding: a step of a rank that has no request."""
        size = self.buckets.prefill[0]
        # Not the inputs of the bucket: they still name the blocks of its last request.
        if self.is_encoder:
            self._call(encode_label(size), EncoderInputs(size))
        else:
            padding = StepInputs(1, size, self.max_blocks, block_size=self.block_size)
            self._call(prefill_label(size), padding)

    def _hidden_states(self, row: int, count: int) -> torch.Tensor:
        """Runs the next `count` tokens of one request; returns (count, hidden)."""
        if not self.is_encoder:
            return self._run_chunk(row, count)[0][:count]
        size = self.buckets.prefill_for(count)
        label = encode_label(size)
        inputs = self._bucket(label)
        inputs.fill(self.table.batch.token_ids_cpu[row, :count])
        hidden_states = self._call(label, inputs)[0][:count]
        if self.step_counters is not None:
            self.step_counters.count(label, size - count)
        return hidden_states

    def _pool(
        self, hidden_states: torch.Tensor, counts: np.ndarray[Any, np.dtype[np.int64]]
    ) -> list[torch.Tensor | None]:
        """Pools each request of the batch.

        Args:
            hidden_states: of all scheduled tokens, in the order of the batch.
            counts: scheduled tokens of each request.

        Returns:
            A vector per request, None for one whose prompt is not complete.
        """
        batch = self.table.batch
        lengths = torch.from_numpy(batch.num_computed_tokens_cpu[: batch.num_reqs] + counts)
        metadata = batch.get_pooling_metadata()
        metadata.build_pooling_cursor(counts, lengths, device=hidden_states.device)
        pooled = self.model.pooler(hidden_states=hidden_states, pooling_metadata=metadata)
        finished = metadata.get_pooling_cursor().get_finished_mask()
        return [
            vector if is_done else None for vector, is_done in zip(pooled, finished, strict=True)
        ]
