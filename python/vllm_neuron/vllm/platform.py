"""The vLLM platform class: what vLLM asks the plugin while it starts and admits requests."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_neuron import device, envs, optimization, route
from vllm_neuron.device import Mode
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.lowering import xla_interpreter
from vllm_neuron.requirements import check_packages
from vllm_neuron.route import LogLine, Route
from vllm_neuron.vllm import limits, quantization
from vllm_neuron.vllm.buckets import resolve_buckets
from vllm_neuron.vllm.config import parse_additional_config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.inputs import EngineInput
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

__all__ = ["NeuronPlatform"]

logger = logging.getLogger(__name__)

_WORKER_CLASS = "vllm_neuron.vllm.worker.NeuronWorker"
_ATTENTION_BACKEND = "vllm_neuron.vllm.attention.NeuronAttentionBackend"
_PUNICA_WRAPPER = "vllm_neuron.vllm.punica.NeuronPunicaWrapper"
_V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

# Tokens of one KV cache block when the user does not say (spec 8.3).
DEFAULT_BLOCK_SIZE = 32
# Bytes of memory that the emulated device claims. A constant, because defaults of vLLM and the
# number of KV cache blocks depend on it, and both are part of the graphs.
HOST_DEVICE_MEMORY = 8 << 30
SUPPORTED_DTYPES = (torch.bfloat16, torch.float32, torch.float16)

optimization.mark_default()


def _replace_accelerator_calls() -> None:
    """Make vLLM's unguarded `torch.accelerator` calls harmless where there is no accelerator.

    torch raises "Cannot access accelerator device when none is available"; vLLM calls these in
    the weight loader and when an engine shuts down. Here and not in the worker: the process of
    the engine core, which never imports the worker, calls them too.
    """
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
        torch.accelerator.empty_host_cache = lambda: None
        torch.accelerator.synchronize = lambda *args, **kwargs: None


_replace_accelerator_calls()


def _keep_torch_precompile_off() -> None:
    """Keep PyTorch's own precompile cache off whatever `TORCH_CACHING_PRECOMPILE` says.

    It stores pickles, and its keys leave out most of what a graph depends on. torch reads the
    variable when Dynamo is imported, which a process without the variable need not do here.
    """
    if os.environ.get("TORCH_CACHING_PRECOMPILE", "").strip():
        from torch._dynamo import config

        config.caching_precompile = False


_keep_torch_precompile_off()


def configure_logging() -> None:
    """Show the plugin's log lines with vLLM's own handlers, format and level.

    vLLM configures the logger tree `vllm` only; the plugin's loggers are called `vllm_neuron...`,
    and become children of it. `VLLM_NEURON_LOG_LEVEL` sets their level; one below vLLM's needs
    the handlers opened as well, which lets nothing else through: vLLM's own loggers keep theirs.
    """
    parent, own = logging.getLogger("vllm"), logging.getLogger("vllm_neuron")
    own.parent = parent
    name = os.environ.get("VLLM_NEURON_LOG_LEVEL", "").strip().upper()
    # An impossible value is for the start to refuse.
    if name in envs.LOG_LEVELS:
        own.setLevel(name)
        for handler in parent.handlers:
            handler.setLevel(min(handler.level, own.level))


configure_logging()


class NeuronPlatform(Platform):
    """AWS Neuron devices, and the modes that stand in for them on a machine without one."""

    _enum = PlatformEnum.OOT
    # vLLM makes torch devices of both names; the tensors that it handles are on the host.
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    ray_device_key = "neuron_cores"
    device_control_env_var = "NEURON_VISIBLE_DEVICES"
    # vLLM compiles some small functions itself; "inductor" would run a C++ compiler for them.
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Model dtypes; the first stands in for an unsupported one under `--dtype auto`."""
        return list(SUPPORTED_DTYPES)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Refuse a model dtype that graphs cannot have."""
        if dtype not in SUPPORTED_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
            raise ConfigurationError(
                f"--dtype {dtype} is not supported on Neuron; supported: {names}.",
                name="--dtype",
                value=str(dtype),
            )

    @classmethod
    def log_warnings(cls) -> None:
        """Called in each process after vLLM has (re)configured logging."""
        configure_logging()

    # --- device ----------------------------------------------------------------------------------

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The name for people."""
        return "neuron"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Device memory in bytes."""
        return HOST_DEVICE_MEMORY

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """No: pinned memory belongs to a torch accelerator."""
        return False

    @classmethod
    def inference_mode(cls) -> AbstractContextManager[Any]:
        """The context that steps run in."""
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to select: the runtime addresses its devices itself."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Nothing to seed: sampling runs on the host."""

    @classmethod
    def get_compile_backend(cls) -> str:
        """The `torch.compile` backend of the model; the model runner compiles, not vLLM."""
        return envs.get_compile_backend_name()

    @classmethod
    def import_kernels(cls) -> None:
        """Nothing to import: vLLM's compiled kernels are not used."""

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """The arithmetic of LoRA adapters."""
        return _PUNICA_WRAPPER

    @classmethod
    def can_update_inplace(cls) -> bool:
        """No: layers with LoRA adapters return their result, so that graphs stay functional."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """No: all layers share one kind of KV cache block."""
        return False

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """The one attention backend.

        Raises:
            ConfigurationError: the user selected another one.
        """
        if selected_backend is not None and selected_backend.name != "CUSTOM":
            raise ConfigurationError(
                f"--attention-backend {selected_backend.name} is not available on Neuron, which "
                "has one attention backend of its own. Unset it.",
                name="--attention-backend",
                value=selected_backend.name,
            )
        return _ATTENTION_BACKEND

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Called with the quantisation method of a model, before its configuration is read.

        Raises:
            ConfigurationError: the method is not served.
        """
        quantization.check_method(quant)
        quantization.register()

    # --- configuration ---------------------------------------------------------------------------

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """Called with the parser of each command, and without when a configuration is built.

        Raises:
            ConfigurationError: the settings of the start cannot be served.
        """
        if parser is not None:
            return
        _register_variables()
        start = optimization.starting()
        if start is None:
            return
        _check_model_runner(start.record.settings)
        if start.writes:
            _write_start_lines(start.record)
        _check_route(start)

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Name variables of vLLM and of the plugin that nobody reads, each once.

        Raises:
            ConfigurationError: there is one, and `--fail-on-environ-validation` is set.
        """
        import vllm.envs

        unknown = envs.unknown_variables()
        others = [
            name
            for name in sorted(os.environ)
            if name.startswith("VLLM_")
            and name not in vllm.envs.environment_variables
            and name not in unknown
            and not envs.is_service_variable(name)
        ]
        lines = [
            f"Unknown environment variable {name}"
            + (f": did you mean {close}?" if close else " has no effect.")
            for name, close in unknown.items()
        ]
        # vLLM's own text for its own variables.
        lines += [f"Unknown vLLM environment variable detected: {name}" for name in others]
        if hard_fail and lines:
            name = next(iter([*unknown, *others]))
            raise ConfigurationError(lines[0], name=name, value=os.environ[name])
        start = optimization.starting()
        if start is None or start.writes:
            route.write_lines(LogLine(logging.WARNING, line) for line in lines)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Runs before vLLM derives options from the optimization level; idempotent."""
        from vllm.config import CompilationMode, CUDAGraphMode
        from vllm.config.vllm import OptimizationLevel

        start = optimization.starting()
        if start is not None:
            route.attach(vllm_config, start.record)
            vllm_config.optimization_level = OptimizationLevel(start.record.route.level)
        # The model runner compiles, vLLM must not.
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Settle and check the rest; idempotent, and vLLM passes configurations without a model.

        Raises:
            ConfigurationError: an option cannot be served.
        """
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = _WORKER_CLASS
        vllm_config.scheduler_config.async_scheduling = False
        cache = vllm_config.cache_config
        if not cache.user_specified_block_size:
            cache.block_size = DEFAULT_BLOCK_SIZE
        if vllm_config.model_config is None:
            return
        start = optimization.starting()
        neuron_config, warnings = parse_additional_config(vllm_config.additional_config)
        if start is not None and start.writes:
            route.write_lines(LogLine(logging.WARNING, line) for line in warnings)
        limits.check_engine(vllm_config)
        if start is not None:
            _settle_eager_mode(vllm_config, start.record.mode)
        # For its errors: the worker resolves the buckets that it compiles.
        resolve_buckets(
            max_model_len=vllm_config.model_config.max_model_len,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            block_size=cache.block_size,
            neuron_config=neuron_config,
            dcp_size=vllm_config.parallel_config.decode_context_parallel_size,
            pooling=vllm_config.model_config.runner_type == "pooling",
            draft_tokens=vllm_config.num_speculative_tokens,
        )

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Nothing: `check_and_update_config` settled the block size, and buckets follow from it."""

    # --- requests --------------------------------------------------------------------------------

    @classmethod
    def validate_request(
        cls, processed_inputs: EngineInput, params: SamplingParams | PoolingParams
    ) -> None:
        """Refuse what the model runner cannot do; vLLM answers with HTTP 400."""
        limits.check_request(params)


def _register_variables() -> None:
    """Tell vLLM the plugin's variables, so that it does not call them unknown."""
    import vllm.envs

    for name in envs.VARIABLES:
        if name.startswith("VLLM_"):
            vllm.envs.environment_variables.setdefault(name, partial(os.getenv, name))
    # vLLM's second model runner is for Triton; it changes what the scheduler sends.
    os.environ.setdefault(_V2_RUNNER_VARIABLE, "0")
    # vLLM's kernels of latent attention keep the latent in the cache; without them its models
    # compute the same with full keys and values, which the plugin's attention backend serves.
    os.environ.setdefault("VLLM_MLA_DISABLE", "1")


def _check_model_runner(settings: envs.Settings) -> None:
    if settings[_V2_RUNNER_VARIABLE]:
        raise ConfigurationError(
            f"{_V2_RUNNER_VARIABLE}={os.environ[_V2_RUNNER_VARIABLE]} asks for vLLM's second model "
            "runner, and Neuron has a model runner of its own. Unset it.",
            name=_V2_RUNNER_VARIABLE,
            value=os.environ[_V2_RUNNER_VARIABLE],
        )


def _write_start_lines(start: route.StartRecord) -> None:
    route.write_lines(LogLine(logging.WARNING, text) for text in start.settings.notices)
    route.write_lines(route.start_lines(start.route))
    if start.compiler_arguments is not None:
        route.write_lines(route.compiler_lines(start.compiler_arguments))
    directory = start.settings.precompile_directory
    if start.route.precompile_on and (kind := envs.temporary_file_system(directory)):
        logger.info(
            "%s is on a temporary file system (%s): what the caches keep is lost with it. Set "
            "VLLM_CACHE_ROOT to a persistent directory for warm starts.",
            start.settings.cache_root,
            kind,
        )
    if start.mode is Mode.COMPILE:
        logger.info(
            "VLLM_NEURON_CPU_COMPILE=1: every graph is compiled for target %s, nothing is run, and "
            "the start ends.",
            device.compile_target(start.settings),
        )
    if start.device_run is not None:
        logger.info("%s", start.device_run.describe())
        if start.device_run.is_stand_in:
            logger.warning(
                "Compiler or runtime only stand in for the real ones: nothing of this run happens "
                "on a Neuron device."
            )
    if start.mode is Mode.HOST:
        logger.info(
            "Neuron host emulator (VLLM_NEURON_DEVICE=host): NEFFs are built for and run by "
            "XLA:CPU. Its speed says nothing about a Neuron device."
        )


def _check_route(start: optimization.StartInProgress) -> None:
    """Stop where a part of the route is missing; never run the other route instead."""
    warnings = check_packages("serve")
    if start.record.mode is not Mode.CPU:
        if start.record.route.route is Route.XLA:
            warnings += check_packages("xla")
            xla_interpreter.find(start.record.settings[xla_interpreter.PYTHON_VARIABLE])
        else:
            warnings += check_packages("native")
    if start.writes:
        route.write_lines(LogLine(logging.WARNING, text) for text in warnings)


def _settle_eager_mode(vllm_config: VllmConfig, mode: Mode) -> None:
    """Eager execution is what CPU mode is, and nothing else is eager."""
    model = vllm_config.model_config
    if mode is Mode.CPU:
        model.enforce_eager = True
    elif model.enforce_eager:
        raise ConfigurationError(
            "Eager mode on Neuron is not yet supported. Unset --enforce-eager, or set "
            "VLLM_NEURON_CPU_MODE=1 to run eagerly on the CPU.",
            name="--enforce-eager",
            value=True,
        )
