"""`fix`: the way of a model through the tool, from the file to the verdict."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rewriter.base.errors import UsageError
from rewriter.base.stopwatch import Progress, silent
from rewriter.hazards.analysis import LOW_TYPES, PrecisionRequest
from rewriter.hazards.user_rules import rules_of_the_user
from rewriter.ir.plan import InputsOutputs, NodePatterns, Plan, Precision
from rewriter.ir.plan.plan_file import given_plan
from rewriter.jobs.fix.job import Candidate, FixJob
from rewriter.jobs.fix.links import io_of_model, type_of_links
from rewriter.jobs.fix.provenance import recorded_sums
from rewriter.jobs.fix.result import FixOutcome
from rewriter.jobs.fix.stages import run
from rewriter.jobs.search.goal import Budget, ErrorLimit, Goal
from rewriter.passes.base import Pass, Stage
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.options import FixOptions
from rewriter.pipeline.presets import DEFAULT_OPSETS, OTHERWISE, Preset, preset_named, select
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.probing import known_target
from rewriter.runtime.metrics.metrics import named
from rewriter.target import Target
from rewriter.target.quirks import repairs


def fix(
    model: Any,
    output: str | os.PathLike[str] | None,
    request: FixOptions,
    progress: Progress = silent,
    ending: Callable[[FixOutcome], str] = lambda outcome: outcome.end.kind,
) -> FixOutcome:
    """Fixes a model; see `rewriter.fix`. `ending` says in words how it ended, for the file's metadata."""
    if type_of_links(request.io):
        request = replace(request, io=io_of_model(model, request))
    return run(replace(_job(model, output, request, progress), ending=ending))


def _job(
    model: Any, output: str | os.PathLike[str] | None, request: FixOptions, progress: Progress
) -> FixJob:
    """The request, checked and completed from its preset and its plan."""
    chosen = preset_named(request.preset)
    names = ("keep_fp32", "keep_fp32_op", "lower", "lower_op", "plugin_types")
    excluded = {name: getattr(request, name) for name in names}
    plan = given_plan(request.plan, request.precision, request.io, **excluded)
    precision = plan.precision if plan is not None else request.precision or chosen.precision
    io: InputsOutputs = plan.io if plan is not None else chosen.choose("io", request.io)
    rtx = this_machine.choose(request.engine).engine == "tensorrt-rtx"
    judge = "tensorrt-rtx" if rtx else OTHERWISE["target"]
    target = known_target(Target.parse(request.target or chosen.defaults.get("target", judge)))
    sums: Accumulation | None = chosen.choose("accumulation", request.accumulation)
    opset = chosen.choose("opset", request.opset)
    steps = _steps(request, precision, target)
    lowers = any(step.stage is Stage.LOWERING for step in steps)
    goal = _goal(request, plan, chosen, lowers=lowers)
    if not lowers:
        needing = {
            "io": request.io not in (None, "keep"),
            "plan": plan is not None,
            "save-plan": request.save_plan is not None,
            goal.option if goal is not None else "": goal is not None,
        }
        if (option := next((name for name, given in needing.items() if given), None)) is not None:
            hint = "the pipeline has no mixed-precision pass"
            raise UsageError("no plan is needed", option=option, hint=hint)
    if request.deploy == "triton" and target.library == "tensorrt-rtx":
        raise UsageError("Triton has no TensorRT-RTX", option="deploy", hint="name another tool or `target`")
    limit = goal if isinstance(goal, ErrorLimit) else None
    lowering = next((step for step in steps if isinstance(step, MixedPrecision)), MixedPrecision())
    types = PrecisionRequest(
        precision,
        io,
        tuple(request.keep_fp32),
        tuple(request.keep_fp32_op),
        NodePatterns(tuple(request.lower), tuple(request.lower_op)),
        tuple(request.plugin_types if plan is None else plan.plugin_types),
        epilogues=lowering.epilogues,
        target=target,
        rules=rules_of_the_user(request.hazards),
    )
    job = FixJob(
        source=model,
        output=output,
        request=request,
        first=Candidate(steps, types, goal),
        opset=DEFAULT_OPSETS[precision] if opset is None else opset,
        progress=progress,
        plan=plan,
        accumulation=sums or recorded_sums(target),
        metric=request.metric or str(chosen.choose("metric")),
        deployment=request.deployment(),
        accumulation_is_default=sums is None,
        limit=limit,
    )
    # the rules' plan is tried first, and a search follows if that misses a tolerance
    return replace(job, first=Candidate(steps, types)) if limit is not None and job.may_change else job


def _steps(request: FixOptions, precision: Precision, target: Target) -> tuple[Pass, ...]:
    """The user's passes, or the preset's with those that repair defects of the target."""
    passes = request.passes
    steps = select(request.preset, passes, request.skip, request.add)
    if passes is None:
        present = {step.name for step in steps} | set(request.skip)
        repairing = [quirk.steps for quirk in repairs(target, LOW_TYPES[precision]) if quirk.steps]
        steps = select(passes=steps, add=[text for text in repairing if text not in present])
    own = passes is None or (isinstance(passes, tuple) and ... in passes)
    return tuple(
        step
        for step in steps
        if (not own or precision in step.requires.precisions)
        and (not request.refittable or step.refittable)
        and (precision != "fp32" or step.stage is not Stage.LOWERING)
    )


def _goal(request: FixOptions, plan: Plan | None, preset: Preset, *, lowers: bool) -> Goal | None:
    """Returns the goal of the search: the user's, or the preset's if the pipeline needs a plan."""
    tolerance, cost = request.tolerance, request.max_latency_cost
    metric = request.metric or str(preset.choose("metric"))
    measure = named(metric)
    if tolerance is None and cost is None:
        own = preset.choose("max_latency_cost")
        return None if own is None or plan is not None or not lowers else Budget(own, metric)
    option = "tolerance" if tolerance is not None else "max-latency-cost"
    if plan is not None:
        raise UsageError("the plan is given", option=option, hint="leave one of the two out")
    if tolerance is None:
        assert cost is not None
        return Budget(cost, metric)
    if cost is not None:
        raise UsageError("one goal at a time", option=option, hint="or leave out `max-latency-cost`")
    if tolerance < 0 and not measure.least:
        raise UsageError(f"it cannot be {tolerance}", option=option, hint="such as 1e-3")
    return ErrorLimit(tolerance, metric)
