"""From a trace to a loaded model: lower, compile, load; each only if no cache has the result."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from vllm_neuron import _core
from vllm_neuron.cache import keys
from vllm_neuron.cache.precompile import CachedTrace
from vllm_neuron.errors import (
    CacheMissError,
    CompileError,
    ExecutionError,
    LoweringError,
    NeffError,
    NeuronError,
)
from vllm_neuron.trace_record import TensorSpec

if TYPE_CHECKING:
    from vllm_neuron.cache.compilation import CompilationCache, CompiledNeff
    from vllm_neuron.cache.precompile import PrecompileCache
    from vllm_neuron.capture import CapturedGraph
    from vllm_neuron.compiler.base import Compiler
    from vllm_neuron.graph_job import GraphJob, PipelineCounters
    from vllm_neuron.lowering.graph_message import EncodedGraph
    from vllm_neuron.lowering.module import LoweredModule, Lowering
    from vllm_neuron.runtime.base import LoadedModel, Runtime

__all__ = ["GraphMaker"]


class GraphMaker:
    """Does for one graph at a time, on any thread, all that follows its trace.

    The arguments are those of `Pipeline`.
    """

    def __init__(
        self,
        *,
        route: str,
        arguments: Sequence[str],
        key_arguments: Sequence[str],
        lowering: Lowering,
        compiler: Compiler,
        runtime: Runtime | None,
        precompile: PrecompileCache | None,
        compilation: CompilationCache,
        describe: Mapping[str, Any],
        workers: int,
        counters: PipelineCounters,
        logger: logging.Logger,
    ) -> None:
        #: What is in no cache, where compiling is forbidden.
        self.missing: list[CacheMissError] = []
        self._route = route
        self._arguments = tuple(arguments)
        self._key_arguments = tuple(key_arguments)
        self._lowering = lowering
        self._compiler = compiler
        self._runtime = runtime
        self._precompile = precompile
        self._compilation = compilation
        self._describe = dict(describe)
        self._workers = workers
        self._counters = counters
        self._logger = logger
        self._failed: dict[tuple[Any, ...], NeuronError] = {}
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """End what is being made, from any thread: children, and waiting for other processes."""
        self._is_stopped.set()
        if self._compilation.flights is not None:
            self._compilation.flights.is_stopped.set()
        self._lowering.stop()
        self._compiler.stop()

    def make(self, job: GraphJob) -> None:
        """Lower, compile and load one graph.

        What went wrong with a trace from the cache is left in `job.doubt`, a NEFF that is missing
        where compiling is forbidden in `missing`, and any failure in `job.failure` where there is
        no runtime: then the other graphs go on.

        Raises:
            LoweringError: an operator cannot be lowered.
            CompileError: the compiler failed.
            ExecutionError: a NEFF does not load, freshly compiled.
        """
        try:
            if job.module is None:
                assert job.graph is not None
                job.module = self._lower(job, job.graph)
                job.graph = None
                if self._precompile is not None and job.graph_digest is not None:
                    assert job.trace is not None
                    self._precompile.store(
                        job.trace_key,
                        job.trace_factors,
                        CachedTrace(job.trace, job.premises, job.module, job.graph_digest),
                        describe=self._described(job),
                    )
            job.neff = self._compile(job)
            if self._runtime is not None:
                job.model = self._load(job, self._runtime, job.neff)
        except CacheMissError as error:
            self.missing.append(error)
        except (CompileError, ExecutionError, NeffError) as error:
            if job.is_from_cache:
                # The record may be wrong about the module that it is stored with.
                job.doubt = error
            elif self._runtime is not None:
                raise
            else:
                job.failure = error
        except LoweringError as error:
            if self._runtime is not None:
                raise
            job.failure = error

    def _lower(self, job: GraphJob, graph: CapturedGraph | EncodedGraph) -> LoweredModule:
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
            self._counters.add(lowering_hits=1)
            return found
        module = self._lower_now(job, graph)
        self._compilation.store_module(key, factors, module, describe=self._described(job))
        return module

    def _lower_now(self, job: GraphJob, graph: CapturedGraph | EncodedGraph) -> LoweredModule:
        started = time.monotonic()
        bucket = job.spec.bucket
        with self._slot(bucket):
            try:
                module = self._lowering.lower(graph, bucket=bucket)
            except NeuronError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise LoweringError(
                    f"bucket {bucket}: the lowering failed: {reason}",
                    bucket=bucket,
                    op=None,
                    reason=reason,
                    source=None,
                ) from error
        seconds = time.monotonic() - started
        self._counters.add(lowerings=1)
        self._counters.spent(bucket, "lower", seconds)
        self._logger.info("Lowered %s in %.2f s", job.spec.bucket, seconds)
        return module

    def _compile(self, job: GraphJob) -> CompiledNeff:
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

        # What the compiler is told besides the key: a record of the cache may tell it wrongly.
        told = (key, module.inputs, module.outputs, *sorted(module.aliases.items()))
        if told in self._failed:
            # One start does not try the same twice (spec CC-64).
            raise self._failed[told]

        def compile_module() -> bytes:
            with self._slot(job.spec.bucket):
                return self._compile_now(job, input_names, output_names)

        try:
            neff = self._compilation.neff(
                key,
                factors,
                module,
                compile_module,
                bucket=job.spec.bucket,
                describe=self._described(job),
            )
        except (CompileError, NeffError) as error:
            self._failed[told] = error
            raise
        if neff.hit:
            self._counters.add(neff_hits=1)
        return neff

    def _compile_now(
        self, job: GraphJob, input_names: Sequence[str], output_names: Sequence[str]
    ) -> bytes:
        assert job.module is not None
        bucket = job.spec.bucket
        started = time.monotonic()
        try:
            data = self._compiler.compile(
                job.module,
                bucket=bucket,
                arguments=self._arguments,
                input_names=input_names,
                output_names=output_names,
            )
        except NeuronError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CompileError(
                f"bucket {bucket}: the compiler {self._compiler.name} failed: {reason}",
                bucket=bucket,
                command=(self._compiler.name, *self._arguments),
                exit_code=None,
                log_path=None,
                reason=reason,
            ) from error
        self._counters.add(compilations=1)
        self._counters.spent(bucket, "compile", time.monotonic() - started)
        return data

    @contextlib.contextmanager
    def _slot(self, bucket: str) -> Iterator[None]:
        """One of the node's places for compilers; without a cache nobody else is known."""
        flights = self._compilation.flights
        with flights.slot(self._workers, bucket) if flights else contextlib.nullcontext():
            if self._is_stopped.is_set():
                raise CancelledError("the start was stopped")
            yield

    def _load(self, job: GraphJob, runtime: Runtime, neff: CompiledNeff) -> LoadedModel:
        started = time.monotonic()
        try:
            model = self._load_neff(job, runtime, neff)
        except (ExecutionError, NeffError) as error:
            if not neff.hit:
                raise
            self._compilation.discard_neff(neff.key, f"it does not load: {error}")
            self._counters.add(neff_hits=-1)
            model = self._load_neff(job, runtime, self._compile(job))
        self._counters.spent(job.spec.bucket, "load", time.monotonic() - started)
        return model

    def _load_neff(self, job: GraphJob, runtime: Runtime, neff: CompiledNeff) -> LoadedModel:
        assert job.trace is not None
        bucket = job.spec.bucket
        # Fresh NEFFs are verified before they are kept, cached ones by their entry's checksums.
        model = runtime.load(
            neff.data,
            aliases=job.trace.aliases,
            bucket=bucket,
            is_verified=True,
            index=neff.index,
        )
        for kind, traced, loaded in (
            ("inputs", [item.spec for item in job.trace.inputs], model.inputs),
            ("outputs", list(job.trace.outputs), model.outputs),
        ):
            found = [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in loaded]
            if found != traced:
                raise ExecutionError(
                    f"{bucket}: the NEFF has the {kind} {found}, the trace {traced}",
                    bucket=bucket,
                    status=None,
                    reason=f"its {kind} are not those of the trace",
                )
        return model

    def _described(self, job: GraphJob) -> dict[str, Any]:
        return {**self._describe, "bucket": job.spec.bucket, "route": self._route}
