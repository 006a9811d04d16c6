"""The stages of `fix` in order, from the file to the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from rewriter import __version__
from rewriter.base import Stage
from rewriter.data.expectations import data_warnings
from rewriter.data.inputs import Samples, load_samples
from rewriter.errors import ArithmeticRunError
from rewriter.figures.outputs import OutputComparison
from rewriter.jobs.fix.attempt import Attempt, Given, attempt
from rewriter.jobs.fix.before import errors_before
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.provenance import note_verdict, source_hash, stamp
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.repair import Repair
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Model, load
from rewriter.model import facts as tensor_facts
from rewriter.model.stopwatch import Stopwatch
from rewriter.pipeline import text as pipeline
from rewriter.plan import Plan
from rewriter.planning import plan_file, weak_typing
from rewriter.verification.expected import expected_outputs
from rewriter.verification.verdict import Check

VERIFIED_SAMPLES = 1
"""How many samples are compared: each costs three runs of the model. Ranges use the others."""


def run(job: FixJob) -> FixResult:
    """Fix one model; see `rewriter.fix` for what it raises."""
    destination, _, stage = job.destination(), job.phases, Stopwatch(job.progress)  # may refuse the job
    job, given = _given(job, stage)
    before = _before(job, given, stage)
    source_sha = source_hash(job.source, given.original)
    made, repairs = attempt(job, given), list[str]()
    if made.is_wrong and _can_be_repaired(job):
        made, repairs = _repaired(made, given)
    if made.plan is not None and job.request.save_plan is not None:
        plan_file.write(made.plan, Path(job.request.save_plan))
    fixed = weak_typing.named(made.structured) if job.weak_typing else made.fixed
    if made.failed:
        made.proof.explain(made.fixed)
    record, proof, plan, search = made.record, made.proof, made.plan, made.record.search
    causes = made.causes
    steps, spans = made.job.steps, proof.spans
    source, depth = given.fitting.source, made.depth
    del made, given  # their FP32 weights take as much memory as the rest of the run
    changed = any(step.changes for step in record.passes)
    if changed:
        stamp(fixed, job, pipeline.render(steps), plan, source_sha, __version__)
    written = proof.write_and_build(fixed, destination, plan)
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
        search.frontier if search is not None else None,
        record.warnings,
        stage.seconds,
        constraints,
        search.searched if search is not None else None,
        repairs,
        depth,
        causes,
        before,
    )


def _before(job: FixJob, given: Given, stage: Stopwatch) -> tuple[OutputComparison, ...]:
    """The errors of the original in plain FP16 or BF16; () if nothing is verified, or lowered."""
    if given.expected is None or not job.phases.lowering or job.wish.precision == "fp32":
        return ()
    with stage("before"):
        return errors_before(
            given.original, given.expected, given.judging, job.wish.precision, job.accumulation
        )


def _repaired(failed: Attempt, given: Given) -> tuple[Attempt, list[str]]:
    """The best attempt, and what led to it."""
    repair = Repair(given, partial(attempt, given=given), failed.job.request.repair_seconds)
    best = repair.of(failed)
    return best, [_summary(failed.failed), *repair.lines]


def _can_be_repaired(job: FixJob) -> bool:
    """True unless the user gave the plan, or asked for the rules' plan alone."""
    return job.request.repair and job.plan is None and not job.weak_typing and job.wish.precision != "fp32"


def _summary(failed: Sequence[Check]) -> str:
    return "the rules' plan failed: " + "; ".join(f"{check.name}: {check.summary}" for check in failed)


def _given(job: FixJob, stage: Stopwatch) -> tuple[FixJob, Given]:
    """The model, its samples and its outputs; a default opset becomes the one that the model needs."""
    with stage("load"):
        original = load(job.source)
        if job.free_opset:
            wanted = (step.opset_for(original, job.target) for step in job.steps)
            job = replace(job, opset=max(job.opset, *wanted))
        samples, warnings = _samples(original, job)
    fitting, kept = samples.split() if job.request.verify else (samples, samples)
    judging, expected = list(islice(kept, VERIFIED_SAMPLES)), None
    if job.request.verify:
        with stage("reference"):
            try:
                expected = expected_outputs(original, judging)
            except ArithmeticRunError as error:
                warnings.append(f"the original does not run on ONNX Runtime: {error.what}")
    return job, Given(original, fitting, judging, expected, stage, tuple(warnings))


def _samples(original: Model, job: FixJob) -> tuple[Samples, list[str]]:
    samples = load_samples(
        job.request.inputs,
        original,
        input_shapes=job.request.input_shapes,
        seed=job.request.seed,
        deployment=job.deployment,
    )
    warnings = list(data_warnings(original, samples))
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
