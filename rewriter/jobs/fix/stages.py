"""The stages of `fix` in order, from the file to the verdict."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from onnx import TensorProto

from rewriter.base.stopwatch import OutOfTimeError, Stopwatch, within
from rewriter.ir.graph.ops import QUANTISING
from rewriter.ir.model import Model, save, set_metadata, walk_nodes
from rewriter.ir.model.output_files import work_folder
from rewriter.ir.model.tensors import FLOATS
from rewriter.ir.plan import io_type
from rewriter.jobs import plugins
from rewriter.jobs.fix import candidates
from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.before import check_before, side_by_side
from rewriter.jobs.fix.job import FixJob, require_space
from rewriter.jobs.fix.provenance import SAMPLES, UNFINISHED, WORSE, source_hash, stamp, worse_text
from rewriter.jobs.fix.result import FixOutcome, end_of
from rewriter.jobs.fix.selection import Selection
from rewriter.jobs.fix.workload import Workload, prepare, read
from rewriter.jobs.search.effort import pays_on_cuda
from rewriter.pipeline import text as pipeline
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.onnxruntime import on_cuda
from rewriter.runtime.inputs.samples import Room
from rewriter.runtime.inputs.sizes import room
from rewriter.runtime.metrics.tolerances import precision_of
from rewriter.runtime.ranges import along_depth
from rewriter.verification.arithmetic_checks import explained, quantisers
from rewriter.verification.expected import MOST_SAMPLES, unshown
from rewriter.verification.verdict import ARITHMETIC, Check, Verdict, deciding, remark

EXPLAINED, LEAST_EXPLAINED_S = 0.1, 10.0
"""Share of `repair-seconds`, and least wall time, in which a failed emulation is compared node by node."""

QUANTISED_OPSET = 19
"""First operator set in which scales and results of QuantizeLinear and DequantizeLinear may be FP16."""

PORTS = 3  # inputs and outputs that the check of their types names


def run(job: FixJob) -> FixOutcome:
    """Fix one model; see `rewriter.fix` for what it raises."""
    destination, stage = job.destination(), Stopwatch(job.progress, _steps(job))  # may refuse the job
    request = job.request
    with stage("reading"):
        original, samples, warnings = read(job)
        deployment = job.deployment.filled(samples.source.all_spans)
        job = replace(job, deployment=deployment, opset=_opset(job, original))
        require_space(destination, original)
        source_sha = source_hash(job.source, original)
        types = job.precision.plugin_types
        split = plugins.parts(original, job.deployment, types) if request.verify else None
        if split is not None:
            original, job = split.head, plugins.without_inner_ports(job, split)
    cuda = pays_on_cuda(original, samples)
    with work_folder() as folder, on_cuda(cuda) as notes:
        workload = prepare(job, stage, folder, original, samples, warnings)
        job, verifier = workload.job, workload.verifier
        if job.lowers:
            workload = _with_plain(workload)
        selection = candidates.run(workload)
        sizes = _room(workload)
        selection = replace(selection, attempt=_checked_to_the_end(selection, workload, sizes))
        attempt, data = selection.attempt, workload.fitting.source
        fixed, checks = attempt.fixed, attempt.checks
        if split is not None:
            fixed, checks = plugins.whole(split, fixed), (*checks, plugins.plugin_check(split))
        result = FixOutcome(
            model=fixed,
            output=None,
            pipeline=pipeline.render(attempt.candidate.steps),
            target=job.precision.target,
            passes=list(attempt.passes),
            plan=attempt.plan,
            data=replace(
                data,
                spans=verifier.spans,
                room=sizes,
                profiled=data.profiled | job.deployment.profile.keys(),
                beyond=job.deployment.beyond(samples.source.spans),
                unshown=unshown([] if verifier.expected is None else verifier.expected.of_model),
            ),
            verdict=Verdict(tuple(checks)) if request.verify or checks else None,
            warnings=[*attempt.warnings, *verifier.not_run(), *notes],
            seconds=stage.seconds,
            tried=selection.tried,
            depth=along_depth(attempt.calibrated.model, attempt.calibrated.ranges),
            repair_facts=attempt.repair_facts,
            precision=job.precision.precision,
            before=workload.before,
            before_value=None if workload.plain is None else workload.plain.value,
            end=end_of(job, selection),
            side_by_side=side_by_side(attempt, workload) if request.page else None,
            judged=len(verifier.samples),
            against=verifier.against.path if verifier.against is not None else None,
            latency_shares=selection.shares,
            request=request,
        )
        if any(step.changes for step in attempt.passes):
            noted = UNFINISHED if verifier.interrupted else job.ending(result)
            stamp(fixed, job, result.pipeline, attempt.plan, source_sha, noted)
            if selection.worse:
                set_metadata(fixed.proto, {WORSE: worse_text(selection.worse)})
            if 0 < len(verifier.samples) < min(data.samples, MOST_SAMPLES):
                set_metadata(fixed.proto, {SAMPLES: str(len(verifier.samples))})
        with stage("writing"):
            if destination is not None and request.strict and request.verify and not result.accepted:
                result.warnings.append(f"`strict`: {destination} was not written")
            elif destination is not None:
                result.output = save(fixed, destination)
        if verifier.interrupted:
            left = f"{result.output} is written, but not verified to the end" if result.output else ""
            raise KeyboardInterrupt(left)
        _write_plan(job, result)
        return result


def _opset(job: FixJob, original: Model) -> int:
    """The operator set of the run: by default one in which Q/DQ nodes of the model can have FP16 beside them.

    Where they cannot, the neighbours stay in FP32 with them, and theirs: of a ViT in INT8, 893 of 942 nodes.
    """
    quantised = any(node.op_type in QUANTISING for node in walk_nodes(original.proto.graph))
    chosen = job.request.opset is not None or not job.lowers
    return job.opset if chosen or not quantised else max(job.opset, QUANTISED_OPSET)


def _with_plain(workload: Workload) -> Workload:
    """Adds the emulation of plain FP16 or BF16, by the limits of results, if it ends in `repair-seconds`."""
    job, verifier = workload.job, workload.verifier
    if verifier.expected is None:
        return workload
    low, sums, original = job.precision.precision, job.accumulation, verifier.original
    ends, standard = time.monotonic() + job.request.repair_seconds, verifier.standards[low]
    try:
        with within(ends), workload.stage("running it unrepaired", verifier.emulation_s):
            check = check_before(original, verifier.expected, verifier.samples, low, sums, standard)
            raised = verifier.against is not None or bool(quantisers(original))
            check = verifier.excused(check) if check is not None and raised else check
    except OutOfTimeError:
        skipped = f"plain {low.upper()} is not compared (`repair-seconds`)"
        return replace(workload, warnings=(*workload.warnings, skipped))
    return replace(workload, plain=check)


def _write_plan(job: FixJob, result: FixOutcome) -> None:
    request, plan = job.request, result.plan
    if request.save_plan is not None and plan is None:
        result.warnings.append(
            "`save-plan`: no plan was written, since all of it is FP32: `precision=fp32` gives the same"
        )
    elif request.save_plan is not None and plan is not None:
        plan.save(request.save_plan)


def _room(workload: Workload) -> Room:
    """The sizes that the original takes, for the profile of the next step; none if no step follows."""
    job, verifier = workload.job, workload.verifier
    shapes = [port.shape for port in verifier.original.signature.inputs]
    fixed = all(shape is not None and all(isinstance(size, int) for size in shape) for shape in shapes)
    if fixed or verifier.expected is None or job.request.dry_run or job.output is None:
        return Room()
    with workload.stage("running the original"):
        return room(reference(verifier.original), verifier.samples[0])


def _steps(job: FixJob) -> list[str]:
    """The stages of a run, without the stages of other candidates."""
    request, phases, lowers = job.request, job.first.phases, job.lowers
    builds = request.verify and request.build
    stages = {
        "reading": True,
        "running the original": request.verify,
        "running it unrepaired": request.verify and lowers,
        "rewriting": True,
        "measuring ranges": job.plan is None and (lowers or bool(phases.measuring)),
        "choosing types": lowers,
        "searching": job.first.goal is not None,
        "comparing outputs": request.verify,
        "building an engine": builds,
        "running the engine": builds and job.deployment.choose().engine is not None,
        "comparing tensors": request.page,
        "writing": True,
    }
    return [stage for stage, runs in stages.items() if runs]


def _checked_to_the_end(selection: Selection, workload: Workload, sizes: Room) -> Attempt:
    """The attempt with what only the result needs: its build, the causes of a failure, its ports."""
    attempt, verifier, sums = selection.attempt, workload.verifier, workload.job.accumulation
    checks, engine = list(attempt.checks), attempt.engine
    for index, check in enumerate(checks):
        if check.name in ARITHMETIC and deciding(checks) is check:
            precision = precision_of(attempt.fixed) if attempt.plan is None else attempt.plan.precision
            checks[index] = check = verifier.at_last(check, attempt.fixed, precision)
        if check.passed is False and check.name in ("emulation", "tf32"):
            wide = attempt.fixed if check.name == "tf32" else attempt.calibrated.model
            limit_s = max(LEAST_EXPLAINED_S, EXPLAINED * workload.job.request.repair_seconds)
            limit_s = max(0.0, min(limit_s, selection.ends - time.monotonic()))
            try:
                with within(time.monotonic() + limit_s), workload.stage("looking for the cause"):
                    checks[index] = explained(check, wide, attempt.fixed, verifier.samples, sums)
            except OutOfTimeError:
                words = f"not explained: that takes more than {limit_s:.0f} s here"
                checks[index] = replace(check, details=(*check.details, words))
    if not any(check.name in ("build", "run") for check in checks):
        built, engine = verifier.built(attempt.fixed, attempt.plan)
        checks += built
    if any(check.name == "build" and check.passed is False and check.built is False for check in checks):
        checks.append(verifier.original_build)
    checks += _at_profile(attempt, workload, sizes, checks, engine)
    return replace(attempt, checks=(*checks, *_ports_check(selection, workload.job)), engine=engine)


def _at_profile(
    attempt: Attempt, workload: Workload, sizes: Room, checks: Sequence[Check], engine: Path | None
) -> Iterator[Check]:
    """Yields the check at shapes of the user's profile, or the proposed one, that no sample has."""
    run = next((check for check in checks if check.name == "run" and check.passed), None)
    verifier, spans = workload.verifier, workload.job.deployment.profile
    if run is None:
        return
    if not spans and sizes.least:
        ports = [port for port in verifier.original.signature.inputs if port.name in sizes.least]
        spans = {port.name: sizes.profile(port, verifier.spans[port.name]) for port in ports}
    precision = precision_of(attempt.fixed) if attempt.plan is None else attempt.plan.precision
    own = all(verifier.spans[name] == span for name, span in spans.items())
    check = verifier.at_profile(attempt.fixed, precision, run, spans, engine if own else None)
    if check is not None:
        yield check


def _ports_check(selection: Selection, job: FixJob) -> Iterator[Check]:
    """Yields a failed check if inputs and outputs are not of the types of the option."""
    attempt = selection.attempt
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
        failed = selection.with_ports.failed if selection.with_ports is not None else None
        yield Check("io", False, remark("ports", io=io, names=names, failed=failed))
