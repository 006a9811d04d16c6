"""The stages of `fix` in order, from the file to the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rewriter.base import Stage
from rewriter.data.expectations import data_warnings
from rewriter.data.inputs import Samples, load_samples
from rewriter.data.ranges import Ranges
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.phases import Phases
from rewriter.jobs.fix.planning import Planning
from rewriter.jobs.fix.proof import Proof
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.result import FixResult
from rewriter.jobs.fix.rewriting import Rewriting
from rewriter.model import Model, load
from rewriter.model import facts as tensor_facts
from rewriter.model.stopwatch import Stopwatch
from rewriter.pipeline import text as pipeline
from rewriter.plan import Plan
from rewriter.planning import plan_file, weak_typing


def run(job: FixJob) -> FixResult:
    """Fix one model; see `rewriter.fix` for what it raises."""
    destination, phases, record = job.destination(), job.phases, Record(Stopwatch(job.progress))
    job, original, samples = _loaded(job, record)
    rewriting = Rewriting(job, record)
    planning = Planning(job, record, rewriting, samples)
    proof = Proof(job, record, rewriting, samples)
    if job.request.verify:
        proof.run_original(original)
    structured, ranges = _structured(rewriting.rewrite(original, phases.structural), phases, planning)
    if job.request.verify:
        proof.check_structure(structured)
    plan = planning.plan(structured, ranges) if phases.lowering else None
    plan, structured = planning.fitted(original, structured, plan)
    if plan is not None and job.plan is None:
        plan = replace(plan, exponents=record.exponents())
    fixed = rewriting.rewrite(structured, phases.lowering, plan)
    if plan is not None and job.request.save_plan is not None:
        plan_file.write(plan, Path(job.request.save_plan))
    given = weak_typing.named(structured) if job.weak_typing else fixed
    del original, structured  # their FP32 weights take as much memory as the rest of the run
    search = record.search
    if search is not None and search.check is not None:
        proof.done.append(search.check)
    proof.check_types(fixed, plan)
    written = proof.write_and_build(given, destination, plan)
    constraints = None
    if job.weak_typing and written is not None and plan is not None:
        constraints = _write_constraints(given, plan, written, record)
    return FixResult(
        given,
        written,
        pipeline.render(job.steps),
        job.target,
        record.passes,
        plan,
        replace(samples.source, spans=proof.spans),
        proof.verdict,
        search.frontier if search is not None else None,
        record.warnings,
        record.stage.seconds,
        constraints,
        search.searched if search is not None else None,
    )


def _structured(model: Model, phases: Phases, planning: Planning) -> tuple[Model, Ranges]:
    """Returns the model that a plan is made for, and its ranges unless the plan is given."""
    given = planning.job.plan
    if given is not None:  # it holds the results of the measuring passes
        found = planning.rewriting.rewrite(model, phases.measuring, given) if phases.measuring else model
        return found, Ranges()
    ranges = planning.ranges(model) if phases.measuring or phases.lowering else Ranges()
    return (
        planning.rewritten_by_ranges(model, phases.measuring, ranges) if phases.measuring else (model, ranges)
    )


def _loaded(job: FixJob, record: Record) -> tuple[FixJob, Model, Samples]:
    """The model and its samples; a default opset becomes the one that the model needs."""
    with record.stage("load"):
        original = load(job.source)
        samples = _samples(original, job, record)
        if job.free_opset:
            wanted = (step.opset_for(original, job.target) for step in job.steps)
            job = replace(job, opset=max(job.opset, *wanted))
    return job, original, samples


def _samples(original: Model, job: FixJob, record: Record) -> Samples:
    samples = load_samples(
        job.request.inputs,
        original,
        input_shapes=job.request.input_shapes,
        seed=job.request.seed,
        deployment=job.deployment,
    )
    record.warnings.extend(data_warnings(original, samples))
    uses_data = job.request.verify or any(step.stage in (Stage.RANGES, Stage.LOWERING) for step in job.steps)
    if not samples.source.real and uses_data:
        record.warnings.append(samples.source.text)
    return samples


def _write_constraints(model: Model, plan: Plan, path: Path, record: Record) -> Path:
    files = weak_typing.write(model, tensor_facts.infer(model), plan, path)
    record.warnings.append(
        f"weak typing: {path} is FP32; build it with trtexec and the arguments in {files.trtexec}, or "
        f"with the code in {files.python}, which finds all layers of a node that becomes several"
    )
    return files.trtexec
