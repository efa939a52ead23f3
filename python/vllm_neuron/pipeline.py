"""The way of one graph: trace, lower, compile, load, bind; each step only if no cache has it.

Three look-ups, from cheapest to dearest, each of which makes everything after it unnecessary: the
trace key (before tracing), the lowering key (of the functional graph) and the NEFF key (of the
lowered module). All graphs of a start go through one `Pipeline`, which counts what it did.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from vllm_neuron.cache.start_report import write_report
from vllm_neuron.compile_pool import Progress, Work, run_largest_first
from vllm_neuron.errors import CacheMissError, ExecutionError
from vllm_neuron.graph_job import GraphJob, GraphSpec, PipelineCounters
from vllm_neuron.graph_maker import GraphMaker
from vllm_neuron.premises import PremiseChecks
from vllm_neuron.trace_pool import Traced, trace_all

if TYPE_CHECKING:
    import torch

    from vllm_neuron.cache.compilation import CompilationCache
    from vllm_neuron.cache.entries import EntryKind
    from vllm_neuron.cache.precompile import PrecompileCache
    from vllm_neuron.cache.tiers import Tiers
    from vllm_neuron.compiler.base import Compiler
    from vllm_neuron.lowering.module import Lowering
    from vllm_neuron.runtime.base import DeviceTensor, Runtime
    from vllm_neuron.trace_record import GraphInput

__all__ = ["GraphSpec", "Pipeline", "PipelineCounters"]


class Pipeline:
    """Gets graphs ready to run.

    Args:
        route: name of the compilation route, part of every key.
        level: vLLM's optimization level.
        arguments: the compiler's arguments, merged.
        key_arguments: the same in canonical form, part of the keys.
        lowering: lowers captured graphs; started on the first miss only.
        compiler: compiles lowered modules.
        runtime: loads and runs NEFFs; None to compile only.
        precompile: the Precompile Cache, or None when it is off.
        compilation: the compilation cache.
        model: what else can change a graph: factors of the trace key by name.
        describe: what `vllm-neuron cache ls` shows of the entries, e.g. `{"model": ...}`.
        workers: how many graphs are lowered and compiled at a time, by all processes of the node
            that share the compilation cache.
        report: where the report of the start goes (`cache.start_report`), or None.
        trace_workers: how many graphs are traced at a time at most, in processes forked from this
            one.
        one_by_one: trace, lower and compile each graph before the next one is traced.
        verifies_traces: trace what the Precompile Cache has too, and compare.
        logger: where the log lines go.
    """

    def __init__(
        self,
        *,
        route: str,
        level: int,
        arguments: Sequence[str],
        key_arguments: Sequence[str],
        lowering: Lowering,
        compiler: Compiler,
        runtime: Runtime | None,
        precompile: PrecompileCache | None,
        compilation: CompilationCache,
        model: Mapping[str, Any],
        describe: Mapping[str, Any],
        workers: int,
        logger: logging.Logger,
        report: Path | None = None,
        trace_workers: int = 1,
        one_by_one: bool = False,
        verifies_traces: bool = False,
    ) -> None:
        self.counters = PipelineCounters()
        #: The graphs of the last `build`.
        self.jobs: list[GraphJob] = []
        self._route = route
        self._level = level
        self._key_arguments = tuple(key_arguments)
        self._lowering = lowering
        self._compiler = compiler
        self._runtime = runtime
        self._precompile = precompile
        self._compilation = compilation
        self._model = dict(model)
        self._workers = workers
        self._describe = dict(describe)
        self._report = report
        self._trace_workers = trace_workers if lowering.lowers_encoded_graphs else 1
        self._one_by_one = one_by_one
        self._verifies_traces = verifies_traces
        self._logger = logger
        self._maker = GraphMaker(
            route=route,
            arguments=arguments,
            key_arguments=key_arguments,
            lowering=lowering,
            compiler=compiler,
            runtime=runtime,
            precompile=precompile,
            compilation=compilation,
            describe=describe,
            workers=workers,
            counters=self.counters,
            logger=logger,
        )
        self._weights: dict[tuple[Any, ...], tuple[torch.Tensor, DeviceTensor]] = {}
        #: The weights that graphs read and do not update: step, name, and where they lie.
        self._reads: list[tuple[GraphJob, GraphInput, DeviceTensor]] = []
        #: Names of weights that have their memory under another name too, and that name, by step.
        self._ties: dict[torch.nn.Module, list[tuple[str, str]]] = {}

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
            The graphs by bucket name; none without a runtime.

        Raises:
            CacheMissError: compiling is forbidden and graphs are in no cache; it lists them all.
            CaptureError: a step is not one static graph.
            LoweringError: an operator cannot be lowered.
            CompileError: the compiler failed.
            ExecutionError: a NEFF does not load, freshly compiled.
        """
        error: BaseException | None = None
        try:
            jobs = self.jobs = self._jobs(specs)
            self._make_models(jobs)
            graphs = {}
            if self._runtime is not None:
                graphs = {job.spec.bucket: self._bind(job, tensors) for job in jobs}
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._lowering.close()
            self._write_report(error)
        self._log_summary()
        return graphs

    def tiers(self) -> tuple[Tiers | None, Tiers | None]:
        """The directories of the compilation cache and of the Precompile Cache."""
        precompile = self._precompile.tiers if self._precompile is not None else None
        return self._compilation.tiers, precompile

    def waited_s(self) -> float:
        """Seconds that graphs waited for other processes."""
        flights = self._compilation.flights
        return flights.waited_s if flights is not None else 0.0

    def is_kept(self, job: GraphJob) -> bool:
        """Whether the caches have the NEFF of a graph now."""
        tiers = self._compilation.tiers
        return (
            job.neff is not None
            and tiers is not None
            and tiers.find_near("neff", job.neff.key) is not None
        )

    def _jobs(self, specs: Sequence[GraphSpec]) -> list[GraphJob]:
        # Buckets share their steps, so each is described once.
        steps = {id(spec.step): spec.step for spec in specs}
        described = {
            key: (module_state(step), describe_tensors(step)) for key, step in steps.items()
        }
        checks = PremiseChecks()
        jobs = [self._look_up_trace(spec, described[id(spec.step)], checks) for spec in specs]
        self.counters.add(graphs=len(jobs))
        return jobs

    def _write_report(self, error: BaseException | None) -> None:
        if self._report is None:
            return
        write_report(
            self._report,
            description={**self._describe, "route": self._route},
            counters=self.counters.totals(),
            misses={
                "trace": self._precompile.misses if self._precompile is not None else {},
                "neff": self._compilation.misses,
            },
            error=None if error is None else f"{type(error).__name__}: {error}",
        )

    def _look_up_trace(
        self, spec: GraphSpec, described: tuple[str, Any], checks: PremiseChecks
    ) -> GraphJob:
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
        job = GraphJob(spec, keys.key_of("trace", factors), factors)
        if self._precompile is not None:
            found = self._precompile.load(
                job.trace_key, factors, spec.step, spec.args, checks=checks
            )
            if found is not None:
                self.counters.trace_hits += 1
                job.is_from_cache = True
                job.trace, job.module = found.trace, found.module
                job.graph_digest = found.graph_digest
        return job

    def _make_models(self, jobs: Sequence[GraphJob]) -> None:
        """Trace what is unknown, then do the rest on a pool.

        Dynamo is not thread-safe: what is traced here is traced by this thread.
        """
        batches = [[job] for job in jobs] if self._one_by_one else [jobs]
        for batch in batches:
            self._trace_unknown(batch)
            if self._verifies_traces:
                self._verify_traces(batch)
            self._run(batch)
            doubtful = [job for job in batch if job.doubt is not None]
            for job in doubtful:
                self._distrust(job, str(job.doubt))
            if doubtful:
                self._trace_unknown(doubtful)
                self._run(doubtful)
        if self._maker.missing:
            raise self._all_missing()

    def _trace_unknown(self, jobs: Sequence[GraphJob]) -> None:
        for job, traced in self._traces([job for job in jobs if job.module is None]):
            self._take(job, traced)

    def _verify_traces(self, jobs: Sequence[GraphJob]) -> None:
        """Trace what came from the Precompile Cache, and believe the trace."""
        known = [job for job in jobs if job.is_from_cache]
        equal = 0
        for job, traced in self._traces(known):
            found = (traced.graph.record, traced.graph_digest)
            if found == (job.trace, job.graph_digest):
                equal += 1
                self._count_trace(job, traced)
            else:
                digest = traced.graph_digest or "none"
                self._distrust(
                    job, f"a new trace differs: graph {job.graph_digest} in the cache, now {digest}"
                )
                self._take(job, traced)
        if known:
            self._logger.info(
                "Precompile Cache: %d of %d traces verified by tracing again", equal, len(known)
            )

    def _traces(self, jobs: Sequence[GraphJob]) -> Iterator[tuple[GraphJob, Traced]]:
        # Closed at once, so that a failure leaves no process behind.
        with closing(
            trace_all(
                [job.spec for job in jobs],
                workers=self._trace_workers,
                route=self._lowering.route,
                logger=self._logger,
            )
        ) as answers:
            for index, answer in answers:
                if isinstance(answer, Traced):
                    yield jobs[index], answer
                elif self._runtime is not None:
                    raise answer
                else:
                    jobs[index].failure = answer

    def _run(self, jobs: Sequence[GraphJob]) -> None:
        flights = self._compilation.flights
        jobs = [job for job in jobs if job.failure is None]
        progress = Progress(
            len(jobs), waiting=flights.waiting if flights else frozenset(), logger=self._logger
        )

        run_largest_first(
            [Work(job.spec.bucket, job.size, partial(self._maker.make, job)) for job in jobs],
            workers=1 if self._one_by_one else self._workers,
            progress=progress,
            stop=self._maker.stop,
        )

    def _distrust(self, job: GraphJob, reason: str) -> None:
        """Forget what the Precompile Cache said of a graph."""
        assert self._precompile is not None
        self._precompile.discard(job.trace_key, job.spec.bucket, reason)
        self.counters.add(trace_hits=-1, discards=1)
        job.trace = job.module = job.graph_digest = job.doubt = None
        job.is_from_cache = False

    def _all_missing(self) -> CacheMissError:
        missing = sorted(pair for error in self._maker.missing for pair in error.details["missing"])
        tiers = self._compilation.tiers
        places = tiers.directories().items() if tiers is not None else ()
        return CacheMissError(
            f"{self._compilation.strict}=1 forbids compiling, and {len(missing)} of "
            f"{self.counters.graphs} graphs are in no cache:\n"
            + "".join(f"  {bucket}: key {key[:32]}\n" for bucket, key in missing)
            + "Looked in "
            + ", ".join(f"{tier} {place}" for tier, place in places)
            + f". Compile them with VLLM_NEURON_CPU_COMPILE=1, fetch them, or unset "
            f"{self._compilation.strict}.",
            missing=missing,
        )

    def _take(self, job: GraphJob, traced: Traced) -> None:
        job.graph, job.trace = traced.graph, traced.graph.record
        job.premises = traced.premises
        job.graph_digest = traced.graph_digest
        self._count_trace(job, traced)
        if traced.graph_digest is None:
            # Without a digest nothing made of the graph may be kept (bugs A11).
            self._logger.warning("%s is not cached: %s", job.spec.bucket, traced.why_no_digest)

    def _count_trace(self, job: GraphJob, traced: Traced) -> None:
        self.counters.add(traces=1)
        self.counters.spent(job.spec.bucket, "trace", traced.seconds)
        self._logger.info("Traced %s in %.2f s", job.spec.bucket, traced.seconds)

    def _bind(self, job: GraphJob, tensors: Mapping[str, DeviceTensor]) -> BoundGraph:
        assert job.trace is not None
        assert job.model is not None
        if job.spec.step not in self._ties:
            described = describe_tensors(job.spec.step)
            self._ties[job.spec.step] = [(name, tied) for name, *_, tied in described if tied]
        return BoundGraph(
            job.spec.bucket,
            job.spec.step,
            job.spec.args,
            trace=job.trace,
            model=job.model,
            bound=self._bound_inputs(job, tensors),
        )

    def _bound_inputs(
        self, job: GraphJob, tensors: Mapping[str, DeviceTensor]
    ) -> dict[int, DeviceTensor]:
        assert job.trace is not None
        bound = {}
        for index, item in enumerate(job.trace.inputs):
            if item.kind == "argument":
                if item.name in tensors:
                    bound[index] = tensors[item.name]
                continue
            bound[index] = self._upload(_weight_of(job, item))
            if index not in job.trace.aliases.values():
                self._reads.append((job, item, bound[index]))
        return bound

    def _upload(self, weight: torch.Tensor) -> DeviceTensor:
        """Upload a weight once, however many graphs and names it has."""
        assert self._runtime is not None
        identity = memory_of(weight)
        if identity not in self._weights:
            # The tensor is kept: its address must not be used again while it is an identity.
            self._weights[identity] = (weight, self._runtime.upload(weight.detach()))
        return self._weights[identity][1]

    def refresh(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write CPU tensors that changed after the build to the device tensors of the graphs.

        Args:
            tensors: parameters, buffers or tensor attributes of the steps. Those that no graph
                reads have no device tensor and are left out.
        """
        for tensor in tensors:
            known = self._weights.get(memory_of(tensor))
            if known is not None:
                known[1].write(tensor)

    def refresh_weights(self) -> int:
        """Bring weights that changed in the model since `build` to the device.

        Each is looked up by the name that the graphs know, so a replaced parameter counts like one
        whose values changed. Where the device shares the weight's memory nothing is to be done.

        Returns:
            How many weights were written.

        Raises:
            ExecutionError: a weight is gone, has another shape or dtype, or no longer shares its
                memory with the weight that it was tied to: the graphs do not fit that model.
        """
        for step, ties in self._ties.items():
            for name, tied_to in ties:
                one, other = find_tensor(step, name), find_tensor(step, tied_to)
                if one is None or other is None or memory_of(one) != memory_of(other):
                    raise ExecutionError(
                        f"the weight {name} was tied to {tied_to} when the graphs were built, and "
                        "is not now: the graphs read one of them only",
                        bucket=None,
                        status=None,
                        reason="a weight does not fit the graph",
                    )
        found = {id(device): (_weight_of(job, item), device) for job, item, device in self._reads}
        changed = [
            (weight, device)
            for weight, device in found.values()
            if not (weight.is_contiguous() and weight.data_ptr() == device.data_ptr())
        ]
        for weight, device in changed:
            device.write(weight.detach())
        return len(changed)

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
        caches: tuple[tuple[EntryKind, PrecompileCache | CompilationCache | None], ...] = (
            ("trace", self._precompile),
            ("neff", self._compilation),
        )
        for kind, cache in caches:
            tiers = cache.tiers if cache is not None else None
            if tiers is None:
                continue
            tiers.warn_of_lost()
            if tiers.remote is not None:
                hits, misses = (tiers.remote_requests[kind, result] for result in ("hit", "miss"))
                self._logger.info(
                    "Remote cache %s: remote hit %d/%d (%s)",
                    tiers.remote.root,
                    hits,
                    hits + misses,
                    "NEFFs" if kind == "neff" else "traces",
                )


def _weight_of(job: GraphJob, item: GraphInput) -> torch.Tensor:
    """The model's tensor that a graph reads, as it is now."""
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
    return weight
