"""The worker's copy of the scheduler's requests, kept in step with each SchedulerOutput."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

__all__ = ["RequestTable"]

CPU = torch.device("cpu")


class RequestTable:
    """Requests that are not finished, and the batch of those that the current step runs.

    Args:
        vllm_config: the engine's configuration.
        block_size: tokens per KV cache block.
        max_blocks: blocks of the longest sequence; 0 for an encoder, which has no KV cache.

    Attributes:
        requests: every unfinished request by id, also those that are preempted.
        batch: vLLM's batch of the scheduled requests with their sampling parameters.
        admitted: ids that this step adds to the batch: new or resumed requests.
    """

    def __init__(self, vllm_config: VllmConfig, *, block_size: int, max_blocks: int) -> None:
        model_config = vllm_config.model_config
        pools = model_config.runner_type == "pooling"
        custom_processors = tuple(model_config.logits_processors or ())
        self.requests: dict[str, CachedRequestState] = {}
        self.admitted: set[str] = set()
        self.batch = InputBatch(
            max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=model_config.max_model_len,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            device=CPU,
            vocab_size=model_config.get_vocab_size(),
            # One table per group of layers that share it: one or, without a KV cache, none.
            block_sizes=[block_size] if max_blocks else [],
            max_num_blocks_per_req=[max_blocks] if max_blocks else [],
            is_pooling_model=pools,
            logitsprocs=build_logitsprocs(vllm_config, CPU, False, pools, custom_processors),
            # Whether a user's processor reads the output tokens cannot be known.
            logitsprocs_need_output_token_ids=bool(custom_processors),
            reasoning_config=vllm_config.reasoning_config,
        )

    def update(self, step: SchedulerOutput) -> None:
        """Applies what the scheduler decided: finished, paused, new, continued and resumed."""
        batch = self.batch
        for req_id in step.finished_req_ids:
            self.requests.pop(req_id, None)
            batch.remove_request(req_id)
        # A request that is resumed in this step may still be in the batch (forced preemption by
        # reset_prefix_cache); it is taken out and added again with its new blocks.
        running = step.num_scheduled_tokens.keys() - step.scheduled_cached_reqs.resumed_req_ids
        for req_id in batch.req_id_to_index.keys() - running:
            batch.remove_request(req_id)

        added = [self._new(request) for request in step.scheduled_new_reqs]
        added += self._continue(step.scheduled_cached_reqs)
        for state in added:
            batch.add_request(state)
        self.admitted = {state.req_id for state in added}
        batch.condense()
        batch.refresh_metadata()

    def append_tokens(self, index: int, token_ids: list[int]) -> None:
        """Records the tokens sampled for the request at `index` of the batch."""
        batch = self.batch
        start = int(batch.num_tokens_no_spec[index])
        end = start + len(token_ids)
        batch.token_ids_cpu[index, start:end] = token_ids
        batch.is_token_ids[index, start:end] = True
        batch.num_tokens_no_spec[index] = end
        self.requests[batch.req_ids[index]].output_token_ids.extend(token_ids)

    def _new(self, request: NewRequestData) -> CachedRequestState:
        previous = self.requests.get(request.req_id)
        if previous is not None:
            return self._extend_session(previous, request)
        params = request.sampling_params
        generator = None
        if params is not None and params.sampling_type == SamplingType.RANDOM_SEED:
            assert params.seed is not None
            generator = torch.Generator().manual_seed(params.seed)
        state = CachedRequestState(
            req_id=request.req_id,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            sampling_params=params,
            pooling_params=request.pooling_params,
            generator=generator,
            block_ids=request.block_ids,
            num_computed_tokens=request.num_computed_tokens,
            output_token_ids=[],
            lora_request=request.lora_request,
        )
        self.requests[request.req_id] = state
        return state

    def _extend_session(
        self, state: CachedRequestState, request: NewRequestData
    ) -> CachedRequestState:
        """Continues a streaming session: its earlier output has become part of the prompt."""
        self.batch.remove_request(state.req_id)
        state.prompt_token_ids = request.prompt_token_ids
        state.sampling_params = request.sampling_params
        state.block_ids = request.block_ids
        state.num_computed_tokens = request.num_computed_tokens
        state.num_prompt_tokens = request.prompt_len
        state.output_token_ids.clear()
        return state

    def _continue(self, cached: CachedRequestData) -> list[CachedRequestState]:
        """Updates known requests; returns those that have to be added to the batch (again)."""
        batch = self.batch
        to_add = []
        for position, req_id in enumerate(cached.req_ids):
            state = self.requests[req_id]
            state.num_computed_tokens = cached.num_computed_tokens[position]
            index = batch.req_id_to_index.get(req_id)
            num_output = cached.num_output_tokens[position]
            if num_output < len(state.output_token_ids):
                # The scheduler discarded sampled tokens (a failed KV load): follow it.
                del state.output_token_ids[num_output:]
                if index is not None:
                    batch.num_tokens_no_spec[index] = state.num_tokens
            blocks = cached.new_block_ids[position]
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                state.block_ids = blocks
            elif blocks is not None:
                for known, added in zip(state.block_ids, blocks, strict=True):
                    known.extend(added)
            if index is None:
                to_add.append(state)
                continue
            batch.num_computed_tokens_cpu[index] = state.num_computed_tokens
            if blocks is not None:
                batch.block_table.append_row(blocks, index)
        return to_add
