"""Compiled execution of a model's buckets: a worker's pipeline, made from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_neuron.cache.compilation import CompilationCache
from vllm_neuron.cache.precompile import PrecompileCache
from vllm_neuron.cache.start_report import report_path
from vllm_neuron.cache.tiers import COMPILATION_SHARE, PRECOMPILE_SHARE, tiers_of
from vllm_neuron.compile_pool import MOST_WORKERS, default_workers
from vllm_neuron.compiler.arguments import HOST_TARGET
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.device import Mode, compile_target
from vllm_neuron.lowering import lowering_for
from vllm_neuron.pipeline import GraphSpec, Pipeline
from vllm_neuron.runtime.host import HostRuntime
from vllm_neuron.vllm.factors import UnkeyableConfigError, describe, model_factors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_neuron.compiler.base import Compiler
    from vllm_neuron.route import StartRecord
    from vllm_neuron.runtime.base import DeviceTensor, Runtime
    from vllm_neuron.vllm.execution import KVCacheShape

__all__ = ["CompiledExecution"]

logger = logging.getLogger(__name__)

#: Name of the step argument that holds the KV caches; see `vllm.step.DecoderStep.forward`.
KV_ARGUMENT = "kv_caches"


class CompiledExecution:
    """Runs each bucket as one compiled graph on the runtime.

    Args:
        vllm_config: the engine's configuration.
        start: what was decided while it was built.
        local_rank: the rank on this machine, which has a logical core of its own.
    """

    compiled = True

    def __init__(self, vllm_config: VllmConfig, start: StartRecord, *, local_rank: int = 0) -> None:
        self._vllm_config = vllm_config
        self._start = start
        #: Without a runtime graphs are compiled only.
        self._runtime = _make_runtime(start, local_rank)
        self.loads_weights = self._runtime is not None
        self._kv_shapes: list[KVCacheShape] = []
        self._kv_caches: list[tuple[DeviceTensor, DeviceTensor]] = []
        self.pipeline: Pipeline | None = None

    def allocate_kv_caches(
        self, shapes: Sequence[KVCacheShape]
    ) -> list[tuple[DeviceTensor, DeviceTensor]]:
        """Allocate zeroed device tensors, shared by the graphs of all buckets; none to compile."""
        self._kv_shapes = list(shapes)
        if self._runtime is None:
            self._kv_caches = []
            return self._kv_caches
        self._kv_caches = [
            (
                self._runtime.allocate(shape.key, _name(shape.dtype)),
                self._runtime.allocate(shape.value, _name(shape.dtype)),
            )
            for shape in shapes
        ]
        return self._kv_caches

    def build(
        self, steps: Mapping[str, tuple[torch.nn.Module, tuple[Any, ...]]]
    ) -> dict[str, Callable[..., Any]]:
        """Have every bucket compiled or loaded; see `Pipeline.build`."""
        # Traced with tensors of the right shape whose memory nobody touches, so that the system
        # never provides it.
        untouched = [
            (torch.empty(shape.key, dtype=shape.dtype), torch.empty(shape.value, dtype=shape.dtype))
            for shape in self._kv_shapes
        ]
        specs = [
            GraphSpec(
                bucket=bucket,
                step=step,
                args=tuple(untouched if item is self._kv_caches else item for item in args),
            )
            for bucket, (step, args) in steps.items()
        ]
        if not specs:
            return {}
        bound = {
            f"{KV_ARGUMENT}[{layer}][{part}]": tensor
            for layer, pair in enumerate(self._kv_caches)
            for part, tensor in enumerate(pair)
        }
        self.pipeline = self._make_pipeline(specs[0].step)
        return dict(self.pipeline.build(specs, bound))

    def refresh(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write CPU tensors that have changed to their device tensors; see `Pipeline.refresh`."""
        if self.pipeline is not None:
            self.pipeline.refresh(tensors)

    def _make_pipeline(self, step: torch.nn.Module) -> Pipeline:
        record, settings = self._start.route, self._start.settings
        arguments = self._start.compiler_arguments
        assert arguments is not None, "a compiled execution has compiler arguments"
        precompile = None
        factors: dict[str, Any] = {}
        if record.precompile_on:
            try:
                factors = {
                    **model_factors(self._vllm_config, step.get_submodule("model")),
                    "variables": settings.key_factors(),
                }
                tiers = tiers_of(
                    settings,
                    settings.precompile_directory,
                    name="Precompile Cache",
                    logger=logger,
                    share=PRECOMPILE_SHARE,
                )
                precompile = PrecompileCache(tiers, logger=logger)
            except UnkeyableConfigError as error:
                logger.warning("Precompile Cache: traces are not kept: %s", error)
        tiers = None
        if not settings["NEURON_LIBTORCH_DISABLE_COMPILE_CACHE"]:
            tiers = tiers_of(
                settings,
                settings.compile_cache_directory,
                name="Compilation cache",
                logger=logger,
                share=COMPILATION_SHARE,
            )
        return Pipeline(
            route=record.route.value,
            level=record.level,
            arguments=arguments.arguments,
            key_arguments=arguments.key_arguments,
            lowering=lowering_for(
                record.route, xla_python=settings["VLLM_NEURON_XLA_PYTHON"], logger=logger
            ),
            compiler=self._make_compiler(),
            runtime=self._runtime,
            precompile=precompile,
            compilation=CompilationCache(
                tiers,
                logger=logger,
                timeout_s=settings["NEURON_LIBTORCH_COMPILATION_TIMEOUT"],
                strict=settings.strict_variable,
            ),
            model=factors,
            describe=describe(self._vllm_config),
            workers=settings["NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS"] or default_workers(),
            logger=logger,
            report=report_path(settings.cache_root),
            trace_workers=self._trace_workers(),
            verifies_traces=settings["VLLM_NEURON_PRECOMPILE_VERIFY"],
            one_by_one=settings["NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND"],
        )

    def _trace_workers(self) -> int:
        settings = self._start.settings
        if settings["VLLM_NEURON_DISABLE_PARALLEL_TRACE"]:
            return 1
        # What the driver makes of a fork of a process that has the device open is not known.
        has_device = self._start.device_run is not None and self._runtime is not None
        default = 1 if has_device else MOST_WORKERS
        return settings["VLLM_NEURON_PARALLEL_TRACE_WORKERS"] or default

    def _make_compiler(self) -> Compiler:
        if self._start.device_run is not None:
            return self._start.device_run.compiler()
        if self._start.mode is Mode.COMPILE:
            target = compile_target(self._start.settings)
            if target != HOST_TARGET:
                # Warm starts have no use for it.
                from vllm_neuron.device_run import compiler_for

                return compiler_for(target, self._start.settings)
        return HostCompiler()


def _make_runtime(start: StartRecord, local_rank: int) -> Runtime | None:
    if start.mode is Mode.COMPILE:
        return None
    if start.device_run is not None:
        return start.device_run.runtime(local_rank)
    return HostRuntime()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
