"""The stages of `fix` in order, from the file to the verdict."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from rewriter import __version__
from rewriter.base import Stage
from rewriter.data.expectations import data_warnings
from rewriter.data.inputs import Samples, load_samples
from rewriter.engines.protocol import MeasureSettings
from rewriter.errors import ArithmeticRunError
from rewriter.figures.outputs import OutputComparison
from rewriter.figures.probabilities import finds_nothing, probabilities
from rewriter.figures.tolerances import TOLERANCES, Tolerance
from rewriter.jobs.fix.attempt import Attempt, Given, attempt
from rewriter.jobs.fix.before import errors_before
from rewriter.jobs.fix.build_repair import buildable
from rewriter.jobs.fix.conclusion import Tried, conclude
from rewriter.jobs.fix.fp32_instead import fp32_instead
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.measured_budget import within_budget
from rewriter.jobs.fix.other_plans import best_plan
from rewriter.jobs.fix.provenance import note_verdict, source_hash, stamp
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.refusals import refuse_unbuildable, refuse_unknown_names
from rewriter.jobs.fix.repair import Repair, can_be_repaired
from rewriter.jobs.fix.result import FixResult
from rewriter.jobs.fix.yardstick import Yardstick
from rewriter.model import Array, Model, load
from rewriter.model import facts as tensor_facts
from rewriter.model.stopwatch import Stopwatch
from rewriter.pipeline import text as pipeline
from rewriter.plan import Plan, plan_file
from rewriter.planning import weak_typing
from rewriter.search.effort import RunCost, with_sums
from rewriter.search.goal import ErrorLimit
from rewriter.verification.expected import Expected, expected_outputs
from rewriter.verification.judge import Standard
from rewriter.verification.not_finite import nan_warnings

VERIFIED_SAMPLES = 1
"""How many samples are compared: each costs three runs of the model. Ranges use the others."""

KEPT_TRIES = 4
"""Samples, from the last one on, that are looked through for one in which the original finds something."""

NO_PLAN = "--save-plan: no plan was written, since all of it is FP32: --precision fp32 gives the same"

CHECKED_S = 60.0
"""Most processor seconds of a check's emulation with FP16 sums that nobody asked for."""


def run(job: FixJob) -> FixResult:
    """Fix one model; see `rewriter.fix` for what it raises."""
    return buildable(job, _once)


def _once(job: FixJob) -> FixResult:
    """Fix one model, and build the result at last."""
    destination, _, stage = job.destination(), job.phases, Stopwatch(job.progress)  # may refuse the job
    job, given = _given(job, stage)
    before = _before(job, given, stage)
    source_sha = source_hash(job.source, given.original)
    made, repairs, tried = _best(job, given)
    if job.request.save_plan is not None:
        if made.plan is not None:
            plan_file.write(made.plan, Path(job.request.save_plan))
        else:
            made.record.warnings.append(NO_PLAN)
    fixed = weak_typing.named(made.structured) if job.weak_typing else made.fixed
    if made.failed:
        made.proof.explain(made.fixed)
    record, proof, plan = made.record, made.proof, made.plan
    causes = made.causes
    steps, spans = made.job.steps, proof.spans
    source, depth = given.fitting.source, made.depth
    del made, given  # their FP32 weights take as much memory as the rest of the run
    changed = any(step.changes for step in record.passes)
    if changed:
        stamp(fixed, job, pipeline.render(steps), plan, source_sha, __version__)
    written = proof.write_and_build(fixed, destination, plan)
    proof.check_original()
    if changed:
        note_verdict(fixed, written, proof.verdict)
    constraints = None
    if job.weak_typing and written is not None and plan is not None:
        constraints = _write_constraints(fixed, plan, written, record)
    return FixResult(
        fixed,
        written,
        pipeline.render(steps),
        job.target,
        record.passes,
        plan,
        replace(source, spans=spans),
        proof.verdict,
        record.warnings,
        stage.seconds,
        constraints,
        repairs,
        depth,
        causes,
        before,
        conclude(proof.done, tried),
    )


def _best(job: FixJob, given: Given) -> tuple[Attempt, list[str], Tried]:
    """The attempt to hand out, what was repaired, and what a conclusion needs to know of it."""
    again = partial(attempt, given=given)
    made = again(job)
    lines, stopped, in_fp32, remark = list[str](), "", None, ""
    if made.is_wrong and can_be_repaired(job):
        repair = Repair(given, again, job.request.repair_seconds)
        lines.append("the rules' plan failed: " + "; ".join(f"{c.name}: {c.summary}" for c in made.failed))
        made = repair.of(made)
        lines.extend(repair.lines)
        stopped, in_fp32 = repair.stopped, repair.in_fp32
    if not lines:
        chosen = best_plan if job.goal is None else within_budget
        made, remark = chosen(made, again)
    if not stopped:
        made, in_its_place = fp32_instead(made, again)
        remark = in_its_place or remark
    if made.all_fp32 and not remark and job.wish.precision != "fp32":
        low = job.wish.precision.upper()
        why = (
            f"no plan with {low} passed every check" if lines else f"rules and options leave nothing in {low}"
        )
        remark = f"all of it is FP32: {'the most accurate of what was tried' if made.failed else why}"
    remarks, changed = (remark,) if remark else (), (one.name for one in made.record.passes if one.changes)
    return made, lines, Tried(job, made.plan is not None, in_fp32, stopped, remarks, tuple(changed))


def _before(job: FixJob, given: Given, stage: Stopwatch) -> tuple[OutputComparison, ...]:
    """The errors of the original in plain FP16 or BF16; () if nothing is verified, or lowered."""
    expected, judging = given.yardstick.expected, given.yardstick.judging
    if expected is None or not job.phases.lowering or job.wish.precision == "fp32":
        return ()
    with stage("before"):
        return errors_before(given.original, expected, judging, job.wish.precision, job.accumulation)


def _given(job: FixJob, stage: Stopwatch) -> tuple[FixJob, Given]:
    """The model, its samples and its outputs; a default opset becomes the one that the model needs."""
    with stage("load"):
        original = load(job.source)
        refuse_unknown_names(original, job.wish.keep_nodes)
        if job.free_opset:
            wanted = (step.opset_for(original, job.target) for step in job.steps)
            job = replace(job, opset=max((job.opset, *wanted)))
        if not job.deployment.plugins:  # a plugin may stand in for any operator
            refuse_unbuildable(original)
        samples, warnings = _samples(original, job)
    fitting, kept = samples.split() if job.request.verify else (samples, samples)
    judging, expected = list(islice(kept, VERIFIED_SAMPLES)), None
    if job.request.verify:
        with stage("reference"):
            start = time.process_time()
            try:
                fitting, judging, expected = _kept(original, samples)
            except ArithmeticRunError as error:
                warnings.append(f"the original does not run on ONNX Runtime: {error.what}")
            else:
                warnings.extend(nan_warnings(original, judging, expected.exact))
                job = _affordable_sums(job, original, time.process_time() - start)
    asked = None
    if isinstance(job.goal, ErrorLimit):
        asked = Tolerance(job.goal.tolerance, job.goal.metric, "--tolerance")
    yardstick = Yardstick(
        job.source,
        judging,
        expected,
        _standards(job, original, asked),
        _engine_settings(job),
        {**fitting.source.spans, **job.deployment.profile},
        asked is not None,
    )
    return job, Given(original, fitting, yardstick, stage, tuple(warnings))


def _kept(original: Model, samples: Samples) -> tuple[Samples, list[dict[str, Array]], Expected]:
    """The samples to fit to, those to judge by, and the original's outputs for these.

    Kept aside is the last sample in which the original finds something, of the last `KEPT_TRIES`: where a
    detector finds nothing, an error relative to its output means nothing. If there is none, the last one.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the original.
    """
    kinds, first = probabilities(original), None
    for number in range(1, min(len(samples), KEPT_TRIES) + 1):
        fitting, kept = samples.split(-number)
        judging = list(islice(kept, VERIFIED_SAMPLES))
        found = fitting, judging, expected_outputs(original, judging)
        first = first or found
        if not all(finds_nothing(outputs, kinds) for outputs in found[2].exact):
            return found
    assert first is not None
    return first


def _standards(job: FixJob, original: Model, asked: Tolerance | None) -> dict[str, Standard]:
    """By precision: the user's tolerance or the precision's own, and a fair measure unless one is named."""
    fair = job.request.metric is None
    return {name: Standard.of(original, default, asked, fair=fair) for name, default in TOLERANCES.items()}


def _affordable_sums(job: FixJob, original: Model, run_s: float) -> FixJob:
    """The job with FP32 sums if the target's FP16 sums, which nobody asked for, take too long to emulate."""
    if not job.free_sums or job.accumulation == "fp32":
        return job
    cost = RunCost.of(original, tensor_facts.infer(original), run_s)
    return replace(job, accumulation=with_sums(cost, job.accumulation, CHECKED_S))


def _engine_settings(job: FixJob) -> MeasureSettings | None:
    """How engines of this machine judge attempts; None if none is to be built, or none runs."""
    if not (job.request.verify and job.request.build):
        return None
    engine, timeout = job.deployment.choose().engine, job.request.build_timeout
    if engine is None:
        return None
    return MeasureSettings(
        engine, plugins=job.deployment.plugins, build_timeout_s=timeout, run_timeout_s=timeout
    )


def _samples(original: Model, job: FixJob) -> tuple[Samples, list[str]]:
    samples = load_samples(
        job.request.inputs,
        original,
        input_shapes=job.request.input_shapes,
        seed=job.request.seed,
        deployment=job.deployment,
        image_preprocess=job.request.image_preprocess,
    )
    warnings = [*original.notes, *data_warnings(original, samples)]
    uses_data = job.request.verify or any(step.stage in (Stage.RANGES, Stage.LOWERING) for step in job.steps)
    if not samples.source.real and uses_data:
        warnings.append(samples.source.text)
    return samples, warnings


def _write_constraints(model: Model, plan: Plan, path: Path, record: Record) -> Path:
    files = weak_typing.write(model, tensor_facts.infer(model), plan, path)
    record.warnings.append(
        f"weak typing: {path} is FP32; build it with trtexec and the arguments in {files.trtexec}, or "
        f"with the code in {files.python}, which finds all layers of a node that becomes several"
    )
    return files.trtexec
