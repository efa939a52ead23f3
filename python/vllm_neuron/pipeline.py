"""The way of one graph: trace, lower, compile, load, bind; each step only if no cache has it.

Three look-ups, from cheapest to dearest, each of which makes everything after it unnecessary: the
trace key (before tracing), the lowering key (of the functional graph) and the NEFF key (of the
lowered module). All graphs of a start go through one `Pipeline`, which counts what it did.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_neuron import _core
from vllm_neuron.binding import (
    BoundGraph,
    describe_tensors,
    find_tensor,
    memory_of,
    module_state,
    signature,
    spec_of,
)
from vllm_neuron.cache import keys
from vllm_neuron.cache.precompile import CachedTrace
from vllm_neuron.errors import ExecutionError, GraphKeyError, NeffError

if TYPE_CHECKING:
    import torch

    from vllm_neuron.cache.compilation import CompilationCache, CompiledNeff
    from vllm_neuron.cache.precompile import PrecompileCache
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.compiler.base import Compiler
    from vllm_neuron.lowering.module import LoweredModule
    from vllm_neuron.lowering.native import NativeLowering
    from vllm_neuron.runtime.base import DeviceTensor, LoadedModel, Runtime
    from vllm_neuron.trace_record import TraceRecord

__all__ = ["GraphSpec", "Pipeline", "PipelineCounters", "default_workers"]

#: Memory to have free for each compiler that runs at the same time (spec CM-20).
MEMORY_PER_WORKER = 8 << 30
#: The most compilers at a time without being asked for more (spec CM-20).
MOST_WORKERS = 8

#: While graphs are being compiled, one line at least this often says how far it is (spec OB-3).
PROGRESS_INTERVAL_S = 30.0


def default_workers() -> int:
    """Return how many graphs to compile at a time: what cores and free memory allow, at least 1."""
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(MOST_WORKERS, cores, free // MEMORY_PER_WORKER))


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One graph to have ready.

    Attributes:
        bucket: its name, unique in a start, such as `prefill_s128`.
        step: the module whose forward is the graph.
        args: example arguments, tensors in nested tuples, lists or dicts; only their shapes and
            dtypes matter.
    """

    bucket: str
    step: torch.nn.Module
    args: tuple[Any, ...]


@dataclass(slots=True)
class PipelineCounters:
    """What one start did. `*_s` are seconds of work, added up over graphs."""

    graphs: int = 0
    traces: int = 0
    trace_hits: int = 0
    lowerings: int = 0
    lowering_hits: int = 0
    compilations: int = 0
    neff_hits: int = 0
    trace_s: float = 0.0
    lower_s: float = 0.0
    compile_s: float = 0.0
    load_s: float = 0.0

    @property
    def precompile_state(self) -> str:
        """`cold`, `partly warm` or `warm` (spec PC-14)."""
        if self.trace_hits == 0:
            return "cold"
        return "warm" if self.trace_hits == self.graphs else "partly warm"


@dataclass(slots=True)
class _Job:
    """A graph on its way: what is known of it so far."""

    spec: GraphSpec
    trace_key: _core.Key
    trace_factors: dict[str, Any]
    trace: TraceRecord | None = None
    module: LoweredModule | None = None
    graph_digest: str | None = None
    model: LoadedModel | None = None


def _raise_first_failure(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


class Pipeline:
    """Gets graphs ready to run.

    Args:
        route: name of the compilation route, part of every key.
        level: vLLM's optimization level.
        arguments: the compiler's arguments, merged.
        key_arguments: the same in canonical form, part of the keys.
        lowering: lowers captured graphs; started on the first miss only.
        compiler: compiles lowered modules.
        runtime: loads and runs NEFFs.
        precompile: the Precompile Cache, or None when it is off.
        compilation: the compilation cache.
        model: what else can change a graph: factors of the trace key by name.
        describe: what `vllm-neuron cache ls` shows of the entries, e.g. `{"model": ...}`.
        workers: how many graphs are lowered and compiled at a time.
        logger: where the log lines go.
    """

    def __init__(
        self,
        *,
        route: str,
        level: int,
        arguments: Sequence[str],
        key_arguments: Sequence[str],
        lowering: NativeLowering,
        compiler: Compiler,
        runtime: Runtime,
        precompile: PrecompileCache | None,
        compilation: CompilationCache,
        model: Mapping[str, Any],
        describe: Mapping[str, Any],
        workers: int,
        logger: logging.Logger,
    ) -> None:
        self.counters = PipelineCounters()
        self._route = route
        self._level = level
        self._arguments = tuple(arguments)
        self._key_arguments = tuple(key_arguments)
        self._lowering = lowering
        self._compiler = compiler
        self._runtime = runtime
        self._precompile = precompile
        self._compilation = compilation
        self._model = dict(model)
        self._describe = dict(describe)
        self._workers = workers
        self._logger = logger
        self._counting = threading.Lock()
        self._weights: dict[tuple[Any, ...], tuple[torch.Tensor, DeviceTensor]] = {}

    def build(
        self, specs: Sequence[GraphSpec], tensors: Mapping[str, DeviceTensor]
    ) -> dict[str, BoundGraph]:
        """Make graphs ready: from the caches where they are known, else by the whole way.

        Args:
            specs: the graphs; bucket names are unique.
            tensors: device tensors of arguments that stay the same from call to call, by argument
                name: KV caches, such as `kv_caches[3][0]`. The other arguments are passed at each
                call. Weights are uploaded here, once for all graphs of this pipeline.

        Returns:
            The graphs by bucket name.

        Raises:
            CaptureError: a step is not one static graph.
            LoweringError: an operator cannot be lowered.
            CompileError: the compiler failed.
            ExecutionError: a NEFF does not load, freshly compiled.
        """
        # Buckets share their steps, so each is described once.
        steps = {id(spec.step): spec.step for spec in specs}
        described = {
            key: (module_state(step), describe_tensors(step)) for key, step in steps.items()
        }
        jobs = [self._look_up_trace(spec, described[id(spec.step)]) for spec in specs]
        self.counters.graphs += len(jobs)
        try:
            self._make_models(jobs)
        finally:
            self._lowering.close()
        graphs = {job.spec.bucket: self._bind(job, tensors) for job in jobs}
        self._log_summary()
        return graphs

    def _look_up_trace(self, spec: GraphSpec, described: tuple[str, Any]) -> _Job:
        state, weights = described
        factors = keys.trace_factors(
            bucket=spec.bucket,
            route=self._route,
            level=self._level,
            compiler_arguments=self._key_arguments,
            target=self._compiler.target,
            step_state=state,
            arguments=signature(spec.step, spec.args),
            weights=weights,
            model=self._model,
        )
        job = _Job(spec, keys.key_of("trace", factors), factors)
        if self._precompile is not None:
            found = self._precompile.load(job.trace_key, factors, spec.step, spec.args)
            if found is not None:
                self.counters.trace_hits += 1
                job.trace, job.module = found.trace, found.module
                job.graph_digest = found.graph_digest
        return job

    def _make_models(self, jobs: Sequence[_Job]) -> None:
        """Trace what is unknown, one graph after the other; the rest goes on on other threads.

        Dynamo is not thread-safe, so only one thread traces.
        """
        started = time.monotonic()
        running: dict[Future[None], str] = {}
        with ThreadPoolExecutor(self._workers, thread_name_prefix="neuron-compile") as pool:
            try:
                for job in jobs:
                    _raise_first_failure(running)
                    graph = self._trace(job) if job.module is None else None
                    running[pool.submit(self._make_model, job, graph)] = job.spec.bucket
                self._wait(running, started)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _wait(self, running: Mapping[Future[None], str], started: float) -> None:
        pending = set(running)
        while pending:
            done, pending = wait(pending, timeout=PROGRESS_INTERVAL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if pending:
                self._logger.info(
                    "Compiling: %d of %d graphs done after %.0f s, in work: %s",
                    len(running) - len(pending),
                    len(running),
                    time.monotonic() - started,
                    ", ".join(sorted(running[future] for future in pending)[:8]),
                )

    def _trace(self, job: _Job) -> CapturedGraph:
        from vllm_neuron.capture import capture

        started = time.monotonic()
        graph = capture(job.spec.step, job.spec.args, bucket=job.spec.bucket)
        seconds = time.monotonic() - started
        self.counters.traces += 1
        self.counters.trace_s += seconds
        job.trace = graph.record
        self._logger.info("Traced %s in %.2f s", job.spec.bucket, seconds)
        try:
            job.graph_digest = _core.graph_digest(graph.graph_module)
        except GraphKeyError as error:
            # Without a digest nothing made of the graph may be kept (bugs A11).
            self._logger.warning("%s is not cached: %s", job.spec.bucket, error)
        return graph

    def _make_model(self, job: _Job, graph: CapturedGraph | None) -> None:
        if graph is not None:
            job.module = self._lower(job, graph)
            if self._precompile is not None and job.graph_digest is not None:
                assert job.trace is not None
                self._precompile.store(
                    job.trace_key,
                    job.trace_factors,
                    CachedTrace(job.trace, job.module, job.graph_digest),
                    describe=self._described(job),
                )
        job.model = self._load(job, self._compile(job))

    def _lower(self, job: _Job, graph: CapturedGraph) -> LoweredModule:
        if job.graph_digest is None:
            return self._lower_now(job, graph)
        assert job.trace is not None
        factors = keys.lowering_factors(
            graph_digest=job.graph_digest,
            aliases=job.trace.aliases,
            inputs=[(item.spec.shape, item.spec.dtype) for item in job.trace.inputs],
            route=self._route,
            lowering_versions=self._lowering.versions(),
        )
        key = keys.key_of("lowering", factors)
        found = self._compilation.load_module(
            key,
            inputs=[item.spec for item in job.trace.inputs],
            outputs=job.trace.outputs,
            aliases=job.trace.aliases,
        )
        if found is not None:
            self._count(lowering_hits=1)
            return found
        module = self._lower_now(job, graph)
        self._compilation.store_module(key, factors, module, describe=self._described(job))
        return module

    def _lower_now(self, job: _Job, graph: CapturedGraph) -> LoweredModule:
        started = time.monotonic()
        module = self._lowering.lower(graph, bucket=job.spec.bucket)
        seconds = time.monotonic() - started
        self._count(lowerings=1, lower_s=seconds)
        self._logger.info("Lowered %s in %.2f s", job.spec.bucket, seconds)
        return module

    def _compile(self, job: _Job) -> CompiledNeff:
        module = job.module
        assert module is not None
        assert job.trace is not None
        # Positions, not parameter names: equal graphs of different models share a NEFF.
        input_names = [f"input{position}" for position in range(len(job.trace.inputs))]
        output_names = [f"output{position}" for position in range(len(job.trace.outputs))]
        factors = keys.neff_factors(
            module_digest=_core.digest(module.data),
            compiler_arguments=self._key_arguments,
            compiler=self._compiler.key_factors(),
            route=self._route,
        )
        key = keys.key_of("neff", factors)

        def compile_module() -> bytes:
            started = time.monotonic()
            data = self._compiler.compile(
                module,
                bucket=job.spec.bucket,
                arguments=self._arguments,
                input_names=input_names,
                output_names=output_names,
            )
            self._count(compilations=1, compile_s=time.monotonic() - started)
            return data

        neff = self._compilation.neff(
            key,
            factors,
            module,
            compile_module,
            bucket=job.spec.bucket,
            describe=self._described(job),
        )
        if neff.hit:
            self._count(neff_hits=1)
        return neff

    def _load(self, job: _Job, neff: CompiledNeff) -> LoadedModel:
        started = time.monotonic()
        try:
            model = self._load_neff(job, neff)
        except (ExecutionError, NeffError) as error:
            if not neff.hit:
                raise
            self._compilation.discard_neff(neff.key, f"it does not load: {error}")
            self._count(neff_hits=-1)
            model = self._load_neff(job, self._compile(job))
        self._count(load_s=time.monotonic() - started)
        return model

    def _load_neff(self, job: _Job, neff: CompiledNeff) -> LoadedModel:
        assert job.trace is not None
        # Fresh NEFFs are verified before they are kept, cached ones by their entry's checksums.
        return self._runtime.load(
            neff.data, aliases=job.trace.aliases, bucket=job.spec.bucket, is_verified=True
        )

    def _bind(self, job: _Job, tensors: Mapping[str, DeviceTensor]) -> BoundGraph:
        assert job.trace is not None
        assert job.model is not None
        return BoundGraph(
            job.spec.bucket,
            job.spec.step,
            job.spec.args,
            trace=job.trace,
            model=job.model,
            bound=self._bound_inputs(job, tensors),
        )

    def _bound_inputs(
        self, job: _Job, tensors: Mapping[str, DeviceTensor]
    ) -> dict[int, DeviceTensor]:
        assert job.trace is not None
        bound = {}
        for index, item in enumerate(job.trace.inputs):
            if item.kind == "argument":
                if item.name in tensors:
                    bound[index] = tensors[item.name]
                continue
            weight = find_tensor(job.spec.step, item.name)
            if weight is None or spec_of(weight) != item.spec:
                found = "nothing" if weight is None else str(spec_of(weight))
                raise ExecutionError(
                    f"{job.spec.bucket}: the graph reads the {item.kind} {item.name} as "
                    f"{item.spec}, the model has {found}",
                    bucket=job.spec.bucket,
                    status=None,
                    reason="a weight does not fit the graph",
                )
            bound[index] = self._upload(weight)
        return bound

    def _upload(self, weight: torch.Tensor) -> DeviceTensor:
        """Upload a weight once, however many graphs and names it has."""
        identity = memory_of(weight)
        if identity not in self._weights:
            # The tensor is kept: its address must not be used again while it is an identity.
            self._weights[identity] = (weight, self._runtime.upload(weight.detach()))
        return self._weights[identity][1]

    def _load_neff(self, job: _Job, neff: CompiledNeff) -> LoadedModel:
        assert job.trace is not None
        # Fresh NEFFs are verified before they are kept, cached ones by their entry's checksums.
        return self._runtime.load(
            neff.data, aliases=job.trace.aliases, bucket=job.spec.bucket, is_verified=True
        )

    def _count(self, **amounts: float) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def _described(self, job: _Job) -> dict[str, Any]:
        return {**self._describe, "bucket": job.spec.bucket, "route": self._route}

    def _log_summary(self) -> None:
        done = self.counters
        self._logger.info(
            "Precompile Cache: %s, loaded %d of %d graphs, traced %d in %.1f s",
            done.precompile_state,
            done.trace_hits,
            done.graphs,
            done.traces,
            done.trace_s,
        )
        self._logger.info(
            "Compilation cache: %d of %d graphs from the cache, lowered %d in %.1f s, "
            "compiled %d in %.1f s",
            done.neff_hits,
            done.graphs,
            done.lowerings,
            done.lower_s,
            done.compilations,
            done.compile_s,
        )
