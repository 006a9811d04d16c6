"""`fix`: the way of a model through the tool, from the file to the verdict."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Unpack

from rewriter.hazards.quirks import repairs
from rewriter.hazards.survey import LOW_TYPES, PrecisionRequest
from rewriter.hazards.user_rules import rules_of_the_user
from rewriter.ir.base import Kept, Stage, Target
from rewriter.ir.errors import UsageError
from rewriter.ir.model.stopwatch import Progress
from rewriter.ir.plan import InputsOutputs, Plan
from rewriter.ir.plan.plan_file import given_plan
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.result import FixResult
from rewriter.jobs.fix.stages import run
from rewriter.jobs.search.goal import Budget, ErrorLimit, Goal
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.keywords import FixKeywords
from rewriter.pipeline.options import FixOptions, combined, documented
from rewriter.pipeline.presets import DEFAULT_OPSETS, Preset, preset_named, select
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.engines.deployment import deployment
from rewriter.runtime.engines.probe.answers import known_target
from rewriter.runtime.figures.metrics import named


@documented(FixOptions)
def fix(
    model: str | os.PathLike[str] | Any,
    output: str | os.PathLike[str] | None = None,
    options: FixOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Unpack[FixKeywords],
) -> FixResult:
    """Make a model safe for a strongly typed TensorRT build in reduced precision, and check it.

    Args:
        model: Path, onnx.ModelProto or onnx_graphsurgeon.Graph; FP32, FP16 or mixed.
        output: Where to write; None writes nothing.
        options: Options as a whole; keywords replace single ones.
        progress: Called with the stage, and with how many of how many steps of it are done.

    Raises:
        RewriterError: bad model, data, option or output path; nothing is written then.
    """
    request = combined(FixOptions, options, keywords)
    return run(_job(model, output, request, progress or (lambda stage, done, total: None)))


def _job(
    model: Any, output: str | os.PathLike[str] | None, request: FixOptions, progress: Progress
) -> FixJob:
    """The request, checked and completed from its preset and its plan."""
    passes, metric, plan, save_plan = request.passes, request.metric, request.plan, request.save_plan
    precision, io = request.precision, request.io
    chosen = preset_named(request.preset)
    given = given_plan(
        plan,
        precision,
        io,
        keep_fp32=request.keep_fp32,
        keep_fp32_op=request.keep_fp32_op,
        lower=request.lower,
        lower_op=request.lower_op,
        plugin_types=request.plugin_types,
    )
    if given is not None:
        precision, io = given.precision, given.io
    chosen_precision = precision or chosen.precision
    chosen_io: InputsOutputs = chosen.choose("io", io)
    known = known_target(Target.parse(chosen.choose("target", request.target)))
    asked_sums: Accumulation | None = chosen.choose("accumulation", request.accumulation)
    sums: Accumulation = asked_sums or _recorded_sums(known)
    opset = chosen.choose("opset", request.opset)
    chosen_opset = DEFAULT_OPSETS[chosen_precision] if opset is None else opset
    steps = select(request.preset, passes, request.skip, request.add)
    if passes is None:
        present = {step.name for step in steps} | set(request.skip)
        repairing = [quirk.steps for quirk in repairs(known, LOW_TYPES[chosen_precision]) if quirk.steps]
        steps = select(passes=steps, add=[text for text in repairing if text not in present])
    if passes is None or (isinstance(passes, tuple) and ... in passes):
        steps = tuple(step for step in steps if chosen_precision in step.requires.precisions)
    if request.refittable:
        steps = tuple(step for step in steps if step.refittable)
    if chosen_precision == "fp32":
        steps = tuple(step for step in steps if step.stage is not Stage.LOWERING)
    lowers = any(step.stage is Stage.LOWERING for step in steps)
    goal: Goal | None = _goal(
        request.tolerance, request.max_latency_cost, metric, given, chosen, lowers=lowers
    )
    limit = goal if isinstance(goal, ErrorLimit) else None
    weak = bool(chosen.choose("weak_typing", request.weak_typing))
    typed = request.io not in (None, "keep")
    if (given or save_plan or goal or weak or typed) and not lowers:
        option = "`io`" if typed else _planning(given, save_plan, goal)
        raise UsageError("no plan is needed", where=option, hint="the pipeline has no mixed-precision pass")
    deployed = deployment(
        request.engine,
        request.plugin_lib,
        request.min_shapes,
        request.opt_shapes,
        request.max_shapes,
    )
    if weak and typed:
        raise UsageError(
            "with `weak-typing` the file stays FP32", where="`io`", hint="leave one of the two out"
        )
    if weak and not known.weakly_typed:
        raise UsageError(
            f"{known} has strongly typed networks alone, which take no precisions of layers",
            where="`weak-typing`",
            hint="omit it: the model's types hold there; for TensorRT 8 to 10, name one with `target`",
        )
    job = FixJob(
        source=model,
        output=output,
        request=request,
        steps=steps,
        wish=PrecisionRequest(
            chosen_precision,
            chosen_io,
            tuple(request.keep_fp32),
            tuple(request.keep_fp32_op),
            Kept(tuple(request.lower), tuple(request.lower_op)),
            tuple(given.plugin_types if given is not None else request.plugin_types),
            epilogues=next((step.epilogues for step in steps if isinstance(step, MixedPrecision)), "none"),
            target=known,
            rules=rules_of_the_user(request.hazards),
        ),
        opset=chosen_opset,
        target=known,
        progress=progress,
        plan=given,
        plan_source="the plan" if plan is None or isinstance(plan, Plan) else str(plan),
        accumulation=sums,
        goal=goal,
        metric=metric or str(chosen.choose("metric")),
        weak_typing=weak,
        deployment=deployed,
        free_sums=asked_sums is None,
        limit=limit,
    )
    # the loop tries the rules' plan first, and searches for a tolerance that it misses
    return replace(job, goal=None) if limit is not None and job.may_change else job


def _recorded_sums(target: Target) -> Accumulation:
    """The type in which the target sums FP16 products, by its answers; FP32 if it was never asked."""
    asked = ("matmul-accumulation", "conv-accumulation")
    return "fp16" if any(target.answers.get(probe) == "fp16" for probe in asked) else "fp32"


def _planning(given: Plan | None, save_plan: object, goal: Goal | None) -> str:
    """Returns the option that needs a plan."""
    if given or save_plan:
        return "`plan`" if given else "`save-plan`"
    return "`weak-typing`" if goal is None else f"`{goal.option}`"


def _goal(
    tolerance: float | None,
    max_latency_cost: float | None,
    metric: str | None,
    given: Plan | None,
    preset: Preset,
    *,
    lowers: bool,
) -> ErrorLimit | Budget | None:
    """Returns the goal of the search: the user's, or the preset's if the pipeline needs a plan."""
    metric = metric or str(preset.choose("metric"))
    measure = named(metric)
    if tolerance is None and max_latency_cost is None:
        own = preset.choose("max_latency_cost")
        return None if own is None or given is not None or not lowers else Budget(own, metric)
    option = "`tolerance`" if tolerance is not None else "`max-latency-cost`"
    if given is not None:
        raise UsageError("the plan is given", where=option, hint="leave one of the two out")
    if tolerance is not None and max_latency_cost is not None:
        raise UsageError("one goal at a time", where=option, hint="or leave out `max-latency-cost`")
    if max_latency_cost is not None:
        return Budget(max_latency_cost, metric)
    assert tolerance is not None
    if tolerance < 0 and not measure.least:
        raise UsageError(f"it cannot be {tolerance}", where=option, hint="such as 1e-3")
    return ErrorLimit(tolerance, metric)
