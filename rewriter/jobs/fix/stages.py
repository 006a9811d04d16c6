"""The stages of `fix` in order, from the file to the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from onnx import TensorProto

from rewriter.base.errors import ArithmeticRunError, NativeError
from rewriter.base.sandbox import processor_s
from rewriter.base.stopwatch import Stopwatch
from rewriter.hazards.analysis import LOW_TYPES
from rewriter.hazards.planning import weak_typing
from rewriter.ir.model import Array, Model, load, save, set_metadata
from rewriter.ir.model.output_files import work_folder
from rewriter.ir.model.tensors import FLOATS
from rewriter.ir.plan import io_type, plan_file
from rewriter.jobs.fix import loop, refusals
from rewriter.jobs.fix.attempt import Attempt, Result
from rewriter.jobs.fix.before import errors_before, side_by_side
from rewriter.jobs.fix.conclusion import conclude
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.making import Workload
from rewriter.jobs.fix.provenance import SAMPLES, UNFINISHED, source_hash, stamp
from rewriter.jobs.fix.result import FixResult
from rewriter.jobs.search.effort import RunCost, pays_on_cuda
from rewriter.passes.base import Stage
from rewriter.pipeline import text as pipeline
from rewriter.runtime.engines.onnxruntime import on_cuda
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.inputs import Samples
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.metrics.probabilities import finds_nothing, probabilities
from rewriter.runtime.metrics.tolerances import TOLERANCES, Tolerance
from rewriter.runtime.ranges.depth import along_depth
from rewriter.target.quirks import not_repaired
from rewriter.verification.arithmetic_checks import explained
from rewriter.verification.compare_runs import Standard
from rewriter.verification.expected import MOST_SAMPLES, Expected, expected_outputs, judging
from rewriter.verification.not_finite import nan_warnings
from rewriter.verification.verdict import Check, Verdict
from rewriter.verification.verifier import Verifier

PORTS = 3
"""Inputs and outputs that the check of their types names."""

CHECKED_S = 60.0
"""Most processor seconds of a check's emulation with FP16 sums that nobody asked for."""


def run(job: FixJob) -> FixResult:
    """Fix one model; see `rewriter.fix` for what it raises."""
    destination, stage = job.destination(), Stopwatch(job.progress, _steps(job))  # may refuse the job
    request = job.request
    with stage("reading"):
        original, samples, warnings = _read(job)
    cuda = pays_on_cuda(original, samples)
    with work_folder() as folder, on_cuda(cuda) as notes:
        job, workload = _subject(job, stage, folder, original, samples, warnings)
        source_sha, judge = source_hash(job.source, workload.original), workload.judge
        ending = loop.run(job, workload)
        ending = replace(ending, made=_checked_to_the_end(ending, job, workload))
        attempt, data, conclusion = ending.made, workload.fitting.source, conclude(job, ending)
        fixed = weak_typing.named(attempt.measured.model) if job.weak_typing else attempt.fixed
        result = FixResult(
            model=fixed,
            output=None,
            pipeline=pipeline.render(attempt.job.steps),
            target=job.precision.target,
            passes=list(attempt.passes),
            plan=attempt.plan,
            data=replace(data, spans=judge.spans, profiled=frozenset(job.deployment.profile)),
            verdict=Verdict(attempt.checks) if request.verify or attempt.checks else None,
            warnings=[*conclusion.remarks, *attempt.warnings, *judge.not_run(), *notes],
            seconds=stage.seconds,
            repairs=list(ending.lines),
            depth=along_depth(attempt.measured.model, attempt.measured.ranges),
            causes=attempt.causes,
            before=workload.before,
            conclusion=conclusion,
            side_by_side=side_by_side(attempt, workload) if request.page else None,
            judged=len(judge.samples),
            latency_shares=ending.shares,
        )
        if any(step.changes for step in attempt.passes):
            noted = UNFINISHED if judge.interrupted else result.ending
            stamp(fixed, job, result.pipeline, attempt.plan, source_sha, noted)
            if 0 < len(judge.samples) < min(data.samples, MOST_SAMPLES):
                set_metadata(fixed.proto, {SAMPLES: str(len(judge.samples))})
        with stage("writing"):
            if destination is not None and request.strict and request.verify and not result.proven:
                result.warnings.append(f"`strict`: {destination} was not written")
            elif destination is not None:
                result.output = save(fixed, destination)
        if judge.interrupted:
            left = f"{result.output} is written, but not verified to the end" if result.output else ""
            raise KeyboardInterrupt(left)
        if request.save_plan is not None and attempt.plan is None:
            result.warnings.append(
                "`save-plan`: no plan was written, since all of it is FP32: `precision=fp32` gives the same"
            )
        elif request.save_plan is not None and attempt.plan is not None:
            plan_file.write(attempt.plan, Path(request.save_plan))
        if job.weak_typing and result.output is not None and attempt.plan is not None:
            result.constraints, python = weak_typing.write(fixed, attempt.plan, result.output)
            result.warnings.append(
                f"weak typing: {result.output} is FP32; build it with trtexec and the arguments in "
                f"{result.constraints}, or with the code in {python}, which finds all layers of a node that "
                "becomes several"
            )
        return result


def _steps(job: FixJob) -> list[str]:
    """The stages of a run; candidates in the place of the first plan come on top."""
    request, phases = job.request, job.phases
    lowers, builds = (
        bool(phases.lowering) and job.precision.precision != "fp32",
        request.verify and request.build,
    )
    stages = {
        "reading": True,
        "running the original": request.verify,
        "running it unrepaired": request.verify and lowers,
        "rewriting": True,
        "measuring ranges": job.plan is None and (lowers or bool(phases.measuring)),
        "choosing types": lowers,
        "searching": job.goal is not None,
        "comparing outputs": request.verify,
        "building an engine": builds,
        "running the engine": builds and job.deployment.choose().engine is not None,
        "comparing tensors": request.page,
        "writing": True,
    }
    return [stage for stage, runs in stages.items() if runs]


def _checked_to_the_end(result: Result, job: FixJob, workload: Workload) -> Attempt:
    """The attempt with what only the result needs: its build, the causes of a failure, its ports."""
    attempt, judge = result.made, workload.judge
    checks, engine = list(attempt.checks), attempt.engine
    for place, check in enumerate(checks):
        if check.passed is False and check.name in ("emulation", "tf32"):
            wide = attempt.fixed if check.name == "tf32" else attempt.measured.model
            with workload.stage("looking for the cause"):
                checks[place] = explained(check, wide, attempt.fixed, judge.samples, attempt.job.accumulation)
    if not any(check.name in ("build", "run") for check in checks):
        built, engine = judge.built(attempt.fixed, attempt.plan)
        checks += built
    if any(check.name == "build" and check.passed is False and check.built is False for check in checks):
        checks.append(judge.original_build)
    return replace(attempt, checks=(*checks, *_ports_check(attempt, job, result)), engine=engine)


def _ports_check(attempt: Attempt, job: FixJob, result: Result) -> Iterator[Check]:
    """Yields a failed check if inputs and outputs are not of the types of the option."""
    io = job.request.io
    if io in (None, "keep") or (attempt.plan is not None and attempt.plan.io == io):
        return
    wanted = {"fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT}
    ports = (*attempt.fixed.signature.inputs, *attempt.fixed.signature.outputs)
    other = [
        port.name
        for port in ports
        if port.dtype in FLOATS and port.dtype != wanted.get(io_type(io, port.name), port.dtype)
    ]
    if other:
        names = ", ".join(other[:PORTS]) + " ..." * (len(other) > PORTS)
        yield Check("io", False, f"`io={io}` is not kept: {names} as they came; with it, {result.with_ports}")


def _read(job: FixJob) -> tuple[Model, Samples, list[str]]:
    """The model and its samples, with warnings."""
    request, original = job.request, load(job.source)
    refusals.declare_plugins(original, job.precision.plugin_types)
    refusals.refuse_unknown_names(original, job.precision.keep_nodes)
    refusals.refuse_unknown_names(original, job.precision.lower.nodes, "lower")
    refusals.refuse_unknown_ports(original, job.precision.io)
    if request.verify and not job.deployment.plugins:  # a plugin may stand in for any operator
        refusals.refuse_unbuildable(original, job.precision.target, job.precision.plugin_types)
    samples, warnings = _samples(original, job)
    warnings.extend(not_repaired(original, job.precision.target, LOW_TYPES[job.precision.precision]))
    return original, samples, warnings


def _subject(
    job: FixJob, stage: Stopwatch, folder: Path, original: Model, samples: Samples, warnings: list[str]
) -> tuple[FixJob, Workload]:
    """The model, its samples and its outputs; sums that nobody asked for become affordable ones."""
    request = job.request
    fitting, places, judged, expected = samples, list[int](), list[dict[str, Array]](), None
    if request.verify:
        with stage("running the original"):
            try:
                job, places, judged, expected = _judged(job, original, samples)
                fitting = samples.without(places[0], judged=places)
                warnings.extend(nan_warnings(original, judged, expected.exact))
            except ArithmeticRunError as error:
                if isinstance(error.__cause__, NativeError) and error.__cause__.cause == "timeout":
                    raise  # nor would it end when its ranges are measured
                judged = list(islice(samples, 1))
                warnings.append(f"the original does not run on ONNX Runtime: {error.what}")
    limit, fair = job.limit, request.metric is None
    asked = None if limit is None else Tolerance(limit.tolerance, limit.metric, "`tolerance`")
    defaults = TOLERANCES | {"fp32": TOLERANCES["tf32"]}  # results in FP32 run with TF32
    standard = Standard.of(original, defaults["fp32"], asked, fair=fair)
    judge = Verifier(
        source=job.source,
        samples=judged,
        expected=expected,
        places=places,
        standards={n: replace(standard, tolerance=asked or default) for n, default in defaults.items()},
        deployment=job.deployment,
        spans={**fitting.source.spans, **job.deployment.profile},
        timeout_s=request.timeout,
        folder=folder,
        stage=stage,
        asked=asked is not None,
        verify=request.verify,
        build=request.build,
        target=job.precision.target,
        plugin_types=job.precision.plugin_types,
    )
    before: tuple[OutputComparison, ...] = ()
    if expected is not None and job.phases.lowering and job.precision.precision != "fp32":
        with stage("running it unrepaired"):
            low = job.precision.precision
            before = errors_before(original, expected, judged, low, job.accumulation, judge.standards[low])
    return job, Workload(original, samples, fitting, judge, stage, tuple(warnings), before)


def _judged(
    job: FixJob, original: Model, samples: Samples
) -> tuple[FixJob, list[int], list[dict[str, Array]], Expected]:
    """The job with sums that can be afforded, the samples that judge with their places, and their outputs.

    Every sample judges; where there is no time to emulate all, the widest do. The last one, which is kept
    from searches, comes first. Samples in which a detector finds nothing judge only if there are no others:
    an error relative to such outputs means nothing.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the original.
    """
    last, start = len(samples) - 1, processor_s()
    feeds = [samples.feeds(last)]
    first = expected_outputs(original, feeds)
    cost = RunCost.of(original, processor_s() - start)
    if job.accumulation_is_default:  # FP16 sums that nobody asked for
        job = replace(job, accumulation=cost.sums(job.accumulation, CHECKED_S))
    places = [last, *judging(samples, cost.samples(job.accumulation, CHECKED_S, MOST_SAMPLES))[:-1]]
    feeds += [samples.feeds(place) for place in places[1:]]
    more = expected_outputs(original, feeds[1:])
    exact, written = [*first.exact, *more.exact], [*first.as_written, *more.as_written]
    kinds = probabilities(original)
    telling = [n for n, outputs in enumerate(exact) if not finds_nothing(outputs, kinds)]
    telling = telling or [*range(len(places))]
    outputs = Expected([exact[n] for n in telling], [written[n] for n in telling])
    return job, [places[n] for n in telling], [feeds[n] for n in telling], outputs


def _samples(original: Model, job: FixJob) -> tuple[Samples, list[str]]:
    samples = job.request.samples(original, job.deployment)
    warnings = [*original.notes, *data_warnings(original, samples)]
    uses_data = job.request.verify or any(step.stage in (Stage.RANGES, Stage.LOWERING) for step in job.steps)
    if not samples.source.real and uses_data:
        warnings.append(samples.source.text)
    return samples, warnings
