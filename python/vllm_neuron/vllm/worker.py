"""The worker process of one rank: vLLM's remote calls, and the memory budget of the KV cache."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_neuron import route
from vllm_neuron.device import Mode, compile_target
from vllm_neuron.errors import NeuronError
from vllm_neuron.target import TARGETS
from vllm_neuron.vllm import quantization
from vllm_neuron.vllm.buckets import resolve_buckets
from vllm_neuron.vllm.config import neuron_config_of
from vllm_neuron.vllm.execution import make_execution
from vllm_neuron.vllm.metrics import count_steps, samples_of, worker_samples, write_samples
from vllm_neuron.vllm.model_runner import NeuronModelRunner
from vllm_neuron.vllm.pooling_runner import PoolingModelRunner

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from vllm_neuron.vllm.lora import LoraAdapters

__all__ = ["NeuronWorker", "kv_cache_budget"]

logger = logging.getLogger(__name__)

GIB = 1 << 30


def kv_cache_budget(
    *,
    device_memory: int,
    gpu_memory_utilization: float,
    model_bytes: int,
    cap_fraction: float,
    minimum_gib: float,
) -> int:
    """Returns the bytes that the KV cache may take (VI-8).

    A function of configuration only: the number of KV blocks is in every graph, so it must be the
    same on all ranks, on cold and warm starts and on any machine.

    Args:
        device_memory: memory of the device in bytes, a constant of the target.
        gpu_memory_utilization: the share of it that the engine may use, in (0, 1].
        model_bytes: bytes of the model's weights on this rank.
        cap_fraction: the most of the usable memory that the cache may take
            (VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION).
        minimum_gib: least useful cache in GiB (VLLM_NEURON_MIN_KV_BUDGET_GIB).

    Raises:
        RuntimeError: less than the minimum is left.
    """
    total = int(device_memory * gpu_memory_utilization)
    budget = min(total - model_bytes, int(total * cap_fraction))
    if budget < minimum_gib * GIB:
        raise RuntimeError(
            f"Computed KV cache budget is below minimum threshold: {budget / GIB:.2f} GiB < "
            f"{minimum_gib:g} GiB (device memory {device_memory / GIB:.2f} GiB * "
            f"gpu_memory_utilization {gpu_memory_utilization:g} - model {model_bytes / GIB:.2f} "
            f"GiB, at most {cap_fraction:g} of the total). Raise --gpu-memory-utilization or "
            f"VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION, lower VLLM_NEURON_MIN_KV_BUDGET_GIB, set "
            f"--kv-cache-memory-bytes, or serve a smaller model."
        )
    return budget


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """Write an error of the plugin to the log of the process that it happens in.

    What reaches the front-end of a server is often only that a process ended.
    """
    try:
        yield
    except NeuronError as error:
        logger.error("%s: %s", type(error).__name__, error)
        raise


class NeuronWorker(WorkerBase):
    """One rank of an engine; the order of the methods is that of the calls (VI-3)."""

    model_runner: NeuronModelRunner

    def init_device(self) -> None:
        """Takes over the start's decisions, joins the process group, creates the model runner.

        Raises:
            ConfigurationError: the configuration carries no start record.
        """
        self._began = time.perf_counter()
        self._load_s = 0.0
        self.start = start = route.adopt(self.vllm_config)
        if start.mode is not Mode.CPU and "OMP_NUM_THREADS" not in os.environ:
            # Only sampling runs in PyTorch; its spinning threads would slow the runtime down.
            torch.set_num_threads(1)
        self.device = torch.device("cpu")
        torch.manual_seed(self.model_config.seed)
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        pooling = self.model_config.runner_type == "pooling"
        buckets = resolve_buckets(
            max_model_len=self.model_config.max_model_len,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            block_size=self.cache_config.block_size,
            neuron_config=neuron_config_of(self.vllm_config),
            dcp_size=parallel.decode_context_parallel_size,
            pooling=pooling,
            draft_tokens=self.vllm_config.num_speculative_tokens,
        )
        with _errors_logged():
            execution = make_execution(self.vllm_config, start, local_rank=self.local_rank)
        runner = PoolingModelRunner if pooling else NeuronModelRunner
        self.model_runner = runner(self.vllm_config, buckets, execution)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model's weights.

        Raises:
            ConfigurationError: the model cannot be served.
        """
        started = time.perf_counter()
        if self.vllm_config.quant_config is not None:
            # A spawned process has the configuration from a pickle, and nothing registered yet.
            quantization.register()
        # vLLM sets its current configuration for init_device() and initialize_from_config() only.
        with _errors_logged(), set_current_vllm_config(self.vllm_config):
            self.model_runner.load_model()
        self._load_s = time.perf_counter() - started

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks that requests may ask for."""
        return self.model_runner.supported_tasks()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns the KV cache that each layer needs."""
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache.

        Raises:
            RuntimeError: see kv_cache_budget().
        """
        explicit = self.cache_config.kv_cache_memory_bytes
        if explicit:
            return explicit
        return kv_cache_budget(
            device_memory=self._device_memory(),
            gpu_memory_utilization=self.cache_config.gpu_memory_utilization,
            model_bytes=self.model_runner.model_bytes(),
            cap_fraction=self.start.settings["VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION"],
            minimum_gib=self.start.settings["VLLM_NEURON_MIN_KV_BUDGET_GIB"],
        )

    def _device_memory(self) -> int:
        """Returns the bytes of the device that is compiled for, present or not (CM-5)."""
        if self.start.device_run is not None:
            return self.start.device_run.memory
        if self.start.mode is Mode.COMPILE:
            name = compile_target(self.start.settings)
            if name in TARGETS:
                return TARGETS[name].memory(TARGETS[name].lnc_sizes[0])
        return current_platform.get_device_total_memory()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Follows vLLM's automatic reduction of `max_model_len`.

        Raises:
            NotImplementedError: always: the buckets are made for one length.
        """
        raise NotImplementedError(
            f"--max-model-len auto is not supported on Neuron: the buckets are resolved before the "
            f"KV cache is sized. Set --max-model-len {max_model_len}."
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV cache."""
        with _errors_logged():
            self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Has every graph compiled or loaded, and runs each once (VI-4)."""
        started = time.perf_counter()
        settings = self.start.settings
        neither = settings["VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP"]
        with _errors_logged(), set_current_vllm_config(self.vllm_config):
            self.model_runner.build_graphs(
                skip_prefill=neither or settings["VLLM_NEURON_SKIP_PREFILL_WARMUP"],
                skip_decode=neither or settings["VLLM_NEURON_SKIP_DECODE_WARMUP"],
            )
            if self.start.mode is Mode.CPU:
                logger.info("CPU eager mode — skipping warmup")
            elif self.start.mode is not Mode.COMPILE:
                self.model_runner.warm_up()
        self._publish_metrics()
        return CompilationTimes(language_model=time.perf_counter() - started, encoder=0.0)

    def _publish_metrics(self) -> None:
        """Leaves what the start did for `/metrics`, and begins to count steps."""
        directory, pipeline = self.start.metrics_directory, self.model_runner.execution.pipeline
        if directory is None or pipeline is None:
            return
        name = self.model_config.served_model_name
        model_name = name if isinstance(name, str) else name[0]
        samples = samples_of(self.start, pipeline)
        samples += worker_samples(
            pipeline,
            model_name=model_name,
            startup_s=time.perf_counter() - self._began,
            load_s=self._load_s,
            model_bytes=self.model_runner.model_bytes(),
        )
        write_samples(directory, self.rank, samples)
        self.model_runner.step_counters = count_steps(
            directory,
            self.rank,
            model_name=model_name,
            buckets=self.model_runner.execution_labels(),
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs one step."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Samples the tokens of the step."""
        return self.model_runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """Runs a step without a request, to keep data-parallel ranks in step."""
        self.model_runner.execute_padding()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads a LoRA adapter; see `LoraAdapters.add`."""
        return self._adapters().add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets a LoRA adapter."""
        return self._adapters().remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps a LoRA adapter in its slot."""
        return self._adapters().pin(lora_id)

    def list_loras(self) -> set[int]:
        """Returns the ids of the LoRA adapters in memory."""
        return self._adapters().known()

    def _adapters(self) -> LoraAdapters:
        adapters = self.model_runner.adapters
        if adapters is None:
            raise RuntimeError("This server has no LoRA adapters: start it with --enable-lora.")
        return adapters

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns what the step just made proposes for the next one, once."""
        return self.model_runner.take_draft_token_ids()

    def get_model(self) -> torch.nn.Module:
        """Returns vLLM's model."""
        return self.model_runner.model

    def apply_model(self, fn: Callable[[torch.nn.Module], Any]) -> Any:
        """Applies a function to vLLM's model; what it does to weights holds from the next step on.

        Raises:
            ExecutionError: the model is left with weights that the graphs do not fit.
        """
        result = super().apply_model(fn)
        self.refresh_weights()
        return result

    def refresh_weights(self) -> None:
        """Brings weights of vLLM's model that were changed otherwise to the device.

        For worker extensions and `collective_rpc`, after they loaded other weights.

        Raises:
            ExecutionError: the model is left with weights that the graphs do not fit.
        """
        pipeline = self.model_runner.execution.pipeline
        if pipeline is not None:
            logger.info("Weights refreshed: %d written to the device", pipeline.refresh_weights())

    def synchronize_device(self) -> None:
        """Does nothing: a step has ended when execute_model() returns."""

    def reset_encoder_cache(self) -> None:
        """Does nothing: there is no encoder."""

    def get_encoder_timing_stats(self) -> dict[str, Any]:
        """Returns nothing: there is no encoder."""
        return {}

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Raises: NotImplementedError: always."""
        raise NotImplementedError("The Neuron plugin has no profiler in this version")

    def sleep(self, level: int = 1) -> None:
        """Raises: NotImplementedError: always."""
        raise NotImplementedError("Sleep mode is not supported on Neuron")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Raises: NotImplementedError: always."""
        raise NotImplementedError("Sleep mode is not supported on Neuron")
