"""Turns each SchedulerOutput into calls of static-shape buckets, and their logits into tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm.envs as vllm_envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_neuron.errors import ConfigurationError, ExecutionError
from vllm_neuron.vllm.attention import NeuronAttention, storage_dtype
from vllm_neuron.vllm.buckets import Buckets, decode_label, prefill_label, verify_label
from vllm_neuron.vllm.cpu_compile import model_without_weights
from vllm_neuron.vllm.execution import Execution, KVCacheShape
from vllm_neuron.vllm.lora_slots import with_slots
from vllm_neuron.vllm.ngram import NgramProposer
from vllm_neuron.vllm.prompt_logprobs import PromptLogprobs
from vllm_neuron.vllm.requests import RequestTable
from vllm_neuron.vllm.sampling import HostSampler
from vllm_neuron.vllm.speculation import StepDrafts, sample_step
from vllm_neuron.vllm.step import DecoderStep
from vllm_neuron.vllm.step_inputs import StepInputs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from vllm_neuron.vllm.lora import LoraAdapters
    from vllm_neuron.vllm.step_metrics import StepCounters

__all__ = ["NeuronModelRunner"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingStep:
    """A step between execute_model and sample_tokens.

    Attributes:
        scheduler_output: what the scheduler asked for.
        drafts: the draft tokens that it verifies.
        partial: batch rows whose prompt is not complete yet: nothing is sampled for them.
        logits: (rows as `drafts` says, vocabulary) float32; nothing else holds this memory, the
            sampler may overwrite it.
        prompt_logprobs: completed prompt logprobs by request.
    """

    scheduler_output: SchedulerOutput
    drafts: StepDrafts
    partial: list[int]
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)


class NeuronModelRunner:
    """Runs one rank's model.

    Args:
        vllm_config: the engine's configuration.
        buckets: the shapes to have graphs for.
        execution: runs them.
    """

    def __init__(self, vllm_config: VllmConfig, buckets: Buckets, execution: Execution) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.buckets = buckets
        self.execution = execution
        self.sampler = HostSampler(logprobs_mode=self.model_config.logprobs_mode)
        self.graphs: dict[str, Callable] = {}
        #: The LoRA adapters, on a server that has them.
        self.adapters: LoraAdapters | None = None
        #: Counts steps for `/metrics`, if anybody asks for them.
        self.step_counters: StepCounters | None = None
        self._inputs: dict[str, Any] = {}
        self._pending: PendingStep | None = None
        speculation = vllm_config.speculative_config
        self.proposer = (
            NgramProposer(speculation, self.model_config.max_model_len) if speculation else None
        )
        self._proposed: DraftTokenIds | None = None

    # Start-up, in call order.

    def load_model(self) -> None:
        """Loads vLLM's model and checks that every layer can be served.

        Raises:
            ConfigurationError: the model has a kind of layer the plugin does not implement.
        """
        # Registers the plugin's mixture-of-experts layers, which get_model() then instantiates.
        import vllm_neuron.vllm.moe  # noqa: F401

        load = get_model if self.execution.loads_weights else model_without_weights
        self.model: Any = load(vllm_config=self.vllm_config).eval()
        self.layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, Attention)
        kind: Any = AttentionLayerBase
        with_cache = get_layers_from_vllm_config(self.vllm_config, kind)
        for name, layer in with_cache.items():
            if name not in self.layers or not isinstance(layer.impl, NeuronAttention):
                raise ConfigurationError(
                    f"This model cannot be served on Neuron: layer {name} "
                    f"({type(layer).__name__}) is not implemented in the plugin.",
                    name="model",
                    value=type(layer).__name__,
                )
        self._check_model()
        if self.vllm_config.lora_config is not None:
            from vllm_neuron.vllm.lora import LoraAdapters

            self.adapters = LoraAdapters(self.vllm_config, self.model, self.execution)

    def _check_model(self) -> None:
        """Refuses layers that a generating model cannot have."""
        for name, layer in self.layers.items():
            if layer.impl.is_encoder:
                raise ConfigurationError(
                    f"This model cannot generate text on Neuron: attention of layer {name} is that "
                    "of an encoder.",
                    name="model",
                    value=type(layer).__name__,
                )

    def supported_tasks(self) -> tuple[str, ...]:
        """Returns vLLM's names of the tasks that requests may ask for."""
        return ("generate",)

    def model_bytes(self) -> int:
        """Returns the bytes of the model's distinct parameters and buffers, and of adapters."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        adapters = 0 if self.adapters is None else self.adapters.nbytes
        return sum(storages.values()) + adapters

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns the cache each layer needs; all layers share one block table."""
        block_size = self.vllm_config.cache_config.block_size
        return {
            name: FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                head_size_v=layer.head_size_v,
                dtype=layer.kv_cache_torch_dtype,
            )
            for name, layer in self.layers.items()
            if not layer.impl.is_encoder
        }

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV caches and the request table.

        Args:
            kv_cache_config: vLLM's decision; only the number of blocks is free.
        """
        self._allocate(kv_cache_config)
        self.prompt_logprobs = PromptLogprobs(
            self.model.compute_logits,
            self.sampler,
            return_logits=self.model_config.logprobs_mode.endswith("logits"),
        )

    def _allocate(self, kv_cache_config: KVCacheConfig) -> None:
        self.block_size = self.vllm_config.cache_config.block_size
        with_cache = [layer for layer in self.layers.values() if not layer.impl.is_encoder]
        self.max_blocks = (
            cdiv(self.model_config.max_model_len, self.block_size) if with_cache else 0
        )
        pages = (kv_cache_config.num_blocks, self.block_size)
        self.kv_caches = self.execution.allocate_kv_caches(
            [
                KVCacheShape(
                    key=(*pages, layer.num_kv_heads, layer.head_size),
                    value=(*pages, layer.num_kv_heads, layer.head_size_v),
                    dtype=storage_dtype(layer.kv_cache_torch_dtype),
                )
                for layer in with_cache
            ]
        )
        self.table = RequestTable(
            self.vllm_config, block_size=self.block_size, max_blocks=self.max_blocks
        )

    @torch.no_grad()
    def build_graphs(self, *, skip_prefill: bool = False, skip_decode: bool = False) -> None:
        """Has every bucket ready to run.

        Args:
            skip_prefill: leave prefill buckets out; asking for one then raises.
            skip_decode: likewise for decode buckets.
        """
        logger.info(self.buckets.describe())
        for warning in self.buckets.warnings:
            logger.warning(warning)
        steps: dict[str, torch.nn.Module] = {}
        if not skip_prefill:
            self._add_prefill(steps)
        if not skip_decode:
            self._add_decode(steps)
        self.graphs = self.execution.build(
            {label: (step, self._arguments(self._inputs[label])) for label, step in steps.items()}
        )

    def _add_prefill(self, steps: dict[str, torch.nn.Module]) -> None:
        """Adds the step of each prefill bucket, and its inputs."""
        step = self._step(return_hidden_states=True)
        for size in self.buckets.prefill:
            self._add(steps, prefill_label(size), step, (1, size, self.max_blocks))

    def _add_decode(self, steps: dict[str, torch.nn.Module]) -> None:
        """Likewise for decode, and for decode with draft tokens."""
        step = self._step(return_hidden_states=False)
        positions = 1 + self.buckets.draft_tokens
        for label, query_len in ((decode_label, 1), (verify_label, positions)):
            if label is verify_label and not self.buckets.draft_tokens:
                continue
            for context in (None, *self.buckets.contexts):
                blocks = self.max_blocks if context is None else cdiv(context, self.block_size)
                for size in self.buckets.decode:
                    self._add(steps, label(size, context), step, (size, query_len, blocks))

    @torch.no_grad()
    def warm_up(self) -> None:
        """Runs every bucket once on padding, and the sampler, so that no request pays for it.

        Raises:
            RuntimeError: a bucket fails; names it.
        """
        started = time.perf_counter()
        for label, inputs in self._inputs.items():
            try:
                self._call(label, inputs)
            except Exception as error:
                phase = label.partition("_")[0]
                shape = f"batch={inputs.batch}, seq={len(inputs.input_ids)}"
                raise RuntimeError(
                    f"Model warmup failed for {phase} ({shape}). Error: {error}"
                ) from error
        self._warm_up_host()
        logger.info(
            "Warm-up: %d buckets in %.2f s", len(self._inputs), time.perf_counter() - started
        )

    def _warm_up_host(self) -> None:
        self.sampler.warm_up(self.model_config.get_vocab_size())

    def _step(self, *, return_hidden_states: bool) -> DecoderStep:
        return DecoderStep(
            self.model,
            self.layers,
            block_size=self.block_size,
            return_logits=True,
            return_hidden_states=return_hidden_states,
        ).eval()

    def _add(
        self,
        steps: dict[str, torch.nn.Module],
        label: str,
        step: torch.nn.Module,
        shape: tuple[int, int, int],
    ) -> None:
        steps[label] = step
        self._inputs[label] = StepInputs(
            *shape, block_size=self.block_size, all_logits=label.startswith("verify")
        )

    # One step.

    @torch.no_grad()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs the scheduled tokens.

        Returns:
            None if sample_tokens() is to follow; an empty output if nothing was scheduled.
        """
        if self._pending is not None:
            raise RuntimeError("execute_model() was called again before sample_tokens()")
        table = self.table
        table.update(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = table.batch
        if self.adapters is not None:
            self.adapters.activate(batch.lora_id_to_lora_request.values())
        drafts = StepDrafts.of(scheduler_output, batch.req_ids)
        counts = drafts.num_tokens
        pending = PendingStep(scheduler_output, drafts, self._partial_rows(counts))

        running, admitted, prefills = [], [], []
        for req_id, count in counts.items():
            row = batch.req_id_to_index[req_id]
            if count > 1 or PromptLogprobs.wanted(table.requests[req_id]):
                prefills.append((row, count))
            elif req_id in table.admitted:
                admitted.append(row)
            else:
                running.append(row)
        # A request may use, by prefix caching, blocks that requests before it in the schedule fill
        # in this very step. Running requests use their own blocks only, so they can go first;
        # single tokens of just admitted requests have to wait for the prefills.
        if not prefills:
            running, admitted = running + admitted, []
        calls = []
        if running:
            calls.append((running, self._decode(running, drafts.token_ids)))
        for row, count in prefills:
            calls.append(([row], self._prefill(row, count, pending)))
        if admitted:
            calls.append((admitted, self._decode(admitted, drafts.token_ids)))
        pending.logits = drafts.merge(calls)
        self._pending = pending
        return None

    @torch.no_grad()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples for every request of the step whose prompt is complete.

        That is one token and, where draft tokens are accepted, one more for each of them.

        Args:
            grammar_output: token masks of structured outputs, or None.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch = self.table.batch
        output = ModelRunnerOutput(
            req_ids=batch.req_ids.copy(),
            req_id_to_index=batch.req_id_to_index.copy(),
            prompt_logprobs_dict=pending.prompt_logprobs,
        )
        if vllm_envs.VLLM_COMPUTE_NANS_IN_LOGITS:
            nans = pending.drafts.count_nans(pending.logits)
            output.num_nans_in_logits = dict(zip(batch.req_ids, nans, strict=True))
        if len(pending.partial) == batch.num_reqs:
            output.sampled_token_ids = [[] for _ in batch.req_ids]
            return output

        if grammar_output is not None:
            apply_grammar_bitmask(pending.scheduler_output, grammar_output, batch, pending.logits)
        output.sampled_token_ids, output.logprobs = sample_step(
            self.sampler, self.table, pending.logits, pending.drafts, partial=pending.partial
        )
        if self.proposer is not None:
            drafts = self.proposer.propose(
                output.sampled_token_ids,
                batch.token_ids_cpu,
                batch.num_tokens_no_spec,
                limit=pending.scheduler_output.num_spec_tokens_to_schedule,
            )
            self._proposed = DraftTokenIds(output.req_ids, drafts)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns the draft tokens that the last step proposes, once."""
        proposed, self._proposed = self._proposed, None
        return proposed

    @torch.no_grad()
    def execute_padding(self) -> None:
        """Runs the smallest decode bucket on padding: a step of a rank that has no request."""
        label = decode_label(self.buckets.decode[0])
        inputs = self._inputs[label]
        inputs.fill_decode(*(np.zeros(shape, np.int32) for shape in (0, 0, (0, self.max_blocks))))
        self._fill_lora_slots(inputs, [])
        self._call(label, inputs)

    def _partial_rows(self, counts: dict[str, int]) -> list[int]:
        batch = self.table.batch
        rows = batch.num_reqs
        scheduled = np.fromiter((counts[req_id] for req_id in batch.req_ids), np.int64, rows)
        computed = batch.num_computed_tokens_cpu[:rows] + scheduled
        return np.flatnonzero(computed < batch.num_tokens_no_spec[:rows]).tolist()

    def _decode(self, rows: list[int], drafts: list[list[int]]) -> torch.Tensor:
        """Runs one token of each of the batch's `rows`, and the draft tokens after it.

        Args:
            rows: of the batch.
            drafts: draft tokens by batch row.

        Returns:
            Logits (len(rows), vocabulary) or, if any of the rows has drafts, (len(rows), most
            positions of a row, vocabulary).
        """
        batch = self.table.batch
        starts = batch.num_computed_tokens_cpu[rows]
        tokens = batch.token_ids_cpu[rows, starts]
        blocks = batch.block_table[0].get_numpy_array()[rows]
        counts = np.array([1 + len(drafts[row]) for row in rows])
        size = self.buckets.decode_for(len(rows))
        name = decode_label if counts.max() == 1 else verify_label
        label = name(size, self.buckets.context_for(int((starts + counts).max()) - 1))
        inputs = self._bucket(label)
        self._fill_lora_slots(inputs, rows)
        if name is decode_label:
            inputs.fill_decode(tokens, starts, blocks)
            logits = self._call(label, inputs)[0]
        else:
            token_ids = np.zeros((len(rows), inputs.query_len), np.int32)
            token_ids[:, 0] = tokens
            for at, row in enumerate(rows):
                token_ids[at, 1 : counts[at]] = drafts[row]
            inputs.fill_verify(token_ids, starts, counts, blocks)
            logits = self._call(label, inputs)[0].unflatten(0, (size, -1))
        if self.step_counters is not None:
            self.step_counters.count(name(size), size - len(rows))
        return logits[: len(rows)]

    def execution_labels(self) -> list[str]:
        """Returns the buckets' names in metrics: those of the graphs without a context (BK-17)."""
        labels = [*map(prefill_label, self.buckets.prefill)]
        labels += map(decode_label, self.buckets.decode)
        if self.buckets.draft_tokens:
            labels += map(verify_label, self.buckets.decode)
        return labels

    def _prefill(self, row: int, count: int, pending: PendingStep) -> torch.Tensor:
        """Runs the next `count` tokens of one request; returns logits (1, vocabulary)."""
        batch = self.table.batch
        logits, hidden_states = self._run_chunk(row, count)
        req_id = batch.req_ids[row]
        state = self.table.requests[req_id]
        if PromptLogprobs.wanted(state):
            slots = self._inputs[prefill_label(self.buckets.prefill_for(count))].lora_slots
            done = with_slots(
                slots,
                self.prompt_logprobs.collect,
                state,
                hidden_states[:count],
                batch.vocab_size,
            )
            if done is not None:
                pending.prompt_logprobs[req_id] = done
        return logits

    def _run_chunk(self, row: int, count: int) -> Any:
        """Runs the next `count` tokens of one request; returns what the prefill step does."""
        batch = self.table.batch
        start = int(batch.num_computed_tokens_cpu[row])
        size = self.buckets.prefill_for(count)
        label = prefill_label(size)
        inputs = self._bucket(label)
        inputs.fill_prefill(
            batch.token_ids_cpu[row, start : start + count],
            start,
            batch.block_table[0].get_numpy_array()[row],
        )
        self._fill_lora_slots(inputs, [row])
        results = self._call(label, inputs)
        if self.step_counters is not None:
            self.step_counters.count(label, size - count)
        return results

    def _fill_lora_slots(self, inputs: Any, rows: list[int]) -> None:
        """Sets the adapters of the sequences, which are the batch's `rows`."""
        if self.adapters is not None:
            ids = self.table.batch.request_lora_mapping[rows]
            inputs.fill_lora_slots(self.adapters.slots_of(ids))

    def _bucket(self, label: str) -> Any:
        inputs = self._inputs.get(label)
        if inputs is None:
            raise ExecutionError(
                f"No graph was compiled for bucket {label}; compiled: {sorted(self._inputs)}. "
                f"Nothing is compiled while serving: unset VLLM_NEURON_SKIP_PREFILL_WARMUP and "
                f"VLLM_NEURON_SKIP_DECODE_WARMUP.",
                bucket=label,
                reason="not compiled",
            )
        return inputs

    def _call(self, label: str, inputs: Any) -> Any:
        return self.graphs[label](*self._arguments(inputs))

    def _arguments(self, inputs: Any) -> tuple[Any, ...]:
        """Returns what a step is called with."""
        adapters = () if self.adapters is None else (inputs.lora_slots,)
        return (*inputs.tensors, self.kv_caches, *adapters)
