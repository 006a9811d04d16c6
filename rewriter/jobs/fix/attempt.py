"""One attempt at a model: the passes of a candidate, its plan, and the checks of the result."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from math import fsum
from pathlib import Path

from rewriter.base.stopwatch import OutOfTimeError
from rewriter.hazards.planning import free_fp32
from rewriter.hazards.planning.planner import extend_plan, fit, kept_by_user, make_plan, unscaled_overflows
from rewriter.ir.graph import display_name
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.plan import SEARCHED, NodePatterns, Plan, Range, node_key
from rewriter.jobs.fix.job import Candidate
from rewriter.jobs.fix.refusals import near_names
from rewriter.jobs.fix.repair_facts import RepairFacts, folded_statistics, fused_norms, repaired_defects
from rewriter.jobs.fix.workload import CalibratedModel, Workload
from rewriter.jobs.search.goal import Found
from rewriter.jobs.search.run import search
from rewriter.passes.base import Context, Pass, Rescaled, Shared, Stage
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.driver import Driver, PassResult
from rewriter.pipeline.presets import PRESETS
from rewriter.runtime.emulation import reference
from rewriter.runtime.ranges import Ranges, measure
from rewriter.runtime.ranges.profile_end import scale_to_profile
from rewriter.target.costs import Prices, priced
from rewriter.verification.verdict import GOALS, Check, deciding
from rewriter.verification.verifier import engine_first

PLAIN = "trt11-migrate"  # the preset that only changes types, and what they require

OPTIONAL = frozenset({free_fp32.RULE, free_fp32.NORM_RULE, free_fp32.SOFTMAX_RULE, SEARCHED})
"""Rules of nodes that plain FP16 does not keep in FP32."""

ROUNDED_ONCE = 2**31  # bytes of weights up to which their rounding is kept for searches and other attempts

PLAIN_STEPS = frozenset(type(step) for step in PRESETS[PLAIN].steps)


@dataclass(frozen=True, eq=False)
class Attempt:
    """A rewritten model with its plan and the checks of the result.

    `calibrated` has the model in FP32, before its types changed. `search` is the outcome of the search for
    its plan, if there was one.
    """

    candidate: Candidate
    calibrated: CalibratedModel
    fixed: Model
    plan: Plan | None
    passes: tuple[PassResult, ...]
    checks: tuple[Check, ...]
    engine: Path | None
    search: Found | None
    warnings: tuple[str, ...]
    repair_facts: RepairFacts

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def arithmetic(self) -> Check | None:
        """The check that decides on the arithmetic; None if nothing was compared."""
        return deciding(check for check in self.checks if check.outputs)

    @property
    def error(self) -> float:
        """Largest error of the deciding check in units of its tolerance; infinite if another check failed."""
        check = self.arithmetic
        others = [other for other in self.failed if other is not check and other.name not in GOALS]
        if others or check is None:
            return max((check.error for check in others), default=math.inf if self.failed else 0.0)
        return check.error

    @property
    def excuse(self) -> str:
        """Of the deciding check, if it passed beyond its tolerance."""
        return self.arithmetic.excuse if self.arithmetic is not None else ""

    @property
    def cured(self) -> bool:
        """True if nothing fails but the arithmetic, and that is right with TF32 off."""
        check = self.arithmetic
        off = check.tf32_off if check is not None else None
        return self.failed == (check,) and off is not None and off <= 1.0

    @property
    def relative_l2(self) -> float:
        """Largest relative L2 error of an output, from the deciding check; 0.0 if nothing was compared."""
        check = self.arithmetic
        return 0.0 if check is None else max(output.relative_l2 for output in check.outputs if output.counts)

    @property
    def latency_us(self) -> float | None:
        """Median latency of its engine; None if none ran."""
        timed = (check.latency for check in self.checks if check.latency is not None)
        return next((latency.median_us for latency in timed), None)

    @property
    def all_fp32(self) -> bool:
        """True if our plan puts nothing of it in reduced precision."""
        return self.candidate.precision.precision == "fp32" or (
            self.plan is not None and len(self.plan.fp32) == self.plan.float_nodes > 0
        )

    @property
    def is_plain(self) -> bool:
        """True if it is a form of plain FP16: no pass or FP32 node only makes it faster or more accurate."""
        if self.plan is None or self.all_fp32:
            return False
        steps, rules = self.candidate.steps, {decision.rule for decision in self.plan.decisions}
        nearest = all(step.rounding == "nearest" for step in steps if isinstance(step, MixedPrecision))
        extra = any(type(step) not in PLAIN_STEPS and self.changed(step) for step in steps)
        return nearest and not extra and rules.isdisjoint(OPTIONAL | {"user"})

    def is_unbuilt(self) -> bool:
        return any(check.name == "build" and check.built is False for check in self.failed)

    def has_failed(self, check: str) -> bool:
        return any(failed.name == check for failed in self.failed)

    def changed(self, step: Pass) -> bool:
        return any(result.name == step.name and result.changes for result in self.passes)


def attempt(candidate: Candidate, workload: Workload, deadline: float = math.inf) -> Attempt:
    """Runs the passes of a candidate and checks their result; a search ends at the deadline.

    Raises:
        OutOfTimeError: a search found no better plan by its deadline, or the block's time is up (`within`).
    """
    job, calibrated, lowering = workload.job, calibrate(candidate, workload), candidate.phases.lowering
    ranges, warnings, found = calibrated.ranges, list(calibrated.warnings), None
    plan = _plan(candidate, workload, calibrated, warnings) if lowering else None
    if plan is not None and candidate.goal is not None:
        worst = [workload.samples.feeds(place) for place in candidate.goal.worst]
        with workload.stage("searching"):
            found, remarks = search(
                workload.original,
                calibrated.model,
                worst or workload.fitting,
                plan,
                candidate.goal,
                job.accumulation,
                candidate.precision.target,
                Context(ranges=ranges, means=ranges.means, rounded=calibrated.memory.rounded)
                if candidate.phases.unbiased
                else None,
                deadline,
                workload.verifier.expected.parts if workload.verifier.expected is not None else None,
                len(workload.verifier.samples),
                calibrated.memory,
                workload.verifier.outputs_of(candidate.goal.worst),
                candidate.precision.lower,
            )
        if candidate is not job.first and not found.met and found.plan.fp32 == plan.fp32:
            raise OutOfTimeError
        plan = found.plan
        warnings.extend(remarks)
    unscaled: Mapping[tuple[int, str], Range] = {}
    if plan is not None and job.plan is None:
        changes = (change for result in calibrated.passes for change in result.changes)
        scaled = (change for change in changes if isinstance(change, Rescaled))
        plan = replace(plan, exponents=tuple(e for change in scaled for e in change.exponents))
        unscaled = unscaled_overflows(plan, ranges)
    weights, earlier = calibrated.model.weights.values(), calibrated.passes
    rounded = calibrated.memory.rounded if sum(w.nbytes for w in weights) <= ROUNDED_ONCE else None
    fixed, passes = rewrite(candidate, workload, calibrated.model, lowering, earlier, plan, ranges, rounded)
    workload.drafts.clear()  # nothing starts from this result, and checks need the memory
    for result in (result for result in passes if result.failure):
        text = f"pass {result.name} failed on this model and was left out: {result.failure}"
        warnings.append(f"{text}; please report it with the model")
    checks, engine = _checked(candidate, workload, calibrated.checks, fixed, plan)
    folded, low = folded_statistics(workload.original, calibrated.model), candidate.precision.precision
    defects = tuple(repaired_defects(workload.original, candidate.precision.target, low, passes))
    facts = RepairFacts(fused_norms(calibrated.model, ranges), unscaled, folded, defects, low)
    remarks = tuple(warnings)
    return Attempt(candidate, calibrated, fixed, plan, passes, checks, engine, found, remarks, facts)


def rewrite(
    candidate: Candidate,
    workload: Workload,
    model: Model,
    steps: Sequence[Pass],
    earlier: Sequence[PassResult] = (),
    plan: Plan | None = None,
    ranges: Ranges | None = None,
    rounded: Shared | None = None,
) -> tuple[Model, tuple[PassResult, ...]]:
    """Returns the model after passes, and the results of all passes so far: the `earlier` ones come first."""
    job, stage, numbers = workload.job, workload.stage, count(len(earlier))
    report = partial(stage.report, "rewriting", total=len(candidate.steps))
    driver = Driver(lambda step: report(next(numbers), detail=f": {step.name}"), True, workload.drafts)
    precision = candidate.precision  # a given plan excludes these options, and holds what the user keeps
    asked = NodePatterns(precision.keep_nodes, precision.keep_ops)
    kept = asked if job.plan is None else kept_by_user(job.plan)
    with stage("rewriting"):
        means = ranges.means if ranges is not None else {}
        context = Context(job.opset, precision.target, plan, ranges, means, kept, workload.sample, rounded)
        rewritten, results = driver.run(model, steps, context)
    return rewritten, (*earlier, *results)


def changing(candidate: Candidate, passes: Sequence[PassResult]) -> list[Pass]:
    steps = (*candidate.phases.structural, *candidate.phases.measuring)
    return [step for step, result in zip(steps, passes, strict=False) if result.changes]


def calibrate(candidate: Candidate, workload: Workload) -> CalibratedModel:
    """Returns the model that the plan is made for; candidates with the same passes before it share one."""
    phases, given = candidate.phases, workload.job.plan
    key = (*phases.structural, *phases.measuring)
    if key in workload.calibrated:
        return workload.calibrated[key]
    shared = tuple(takewhile(lambda step: type(step) in PLAIN_STEPS, phases.structural))
    if shared not in workload.started:
        workload.started[shared] = rewrite(candidate, workload, workload.original, shared)
    plain, passes = workload.started[shared]
    model, passes = rewrite(candidate, workload, plain, phases.structural[len(shared) :], passes)
    ranges, warnings = Ranges(), [*workload.warnings]
    if given is not None and phases.measuring:  # it holds their results
        model, passes = rewrite(candidate, workload, model, phases.measuring, passes, given)
    if given is None and phases.measuring:
        model, passes, ranges = _measured(candidate, workload, model, passes)
    elif phases.unbiased or (given is None and phases.lowering):
        ranges = _ranges(model, workload)
    if ranges.unsupported:
        warnings.append(
            f"ONNX Runtime has no kernel for {', '.join(ranges.unsupported)}: what depends on it was not "
            "measured and stays in FP32"
        )
    outputs, ranges.outputs = ranges.outputs, {}  # once compared, they need no memory any more
    checks = workload.verifier.structure(model, changing(candidate, passes), outputs)
    result = CalibratedModel(model, plain, ranges, passes, tuple(checks), tuple(warnings))
    return workload.calibrated.setdefault(key, result)


def _measured(
    candidate: Candidate, workload: Workload, model: Model, earlier: Sequence[PassResult]
) -> tuple[Model, tuple[PassResult, ...], Ranges]:
    """Runs the measuring passes, and returns the ranges after them.

    Passes that read no ranges run ahead: where the others find every tensor in range, as in most networks,
    one measurement serves all. Else they run in their order, and change the ranges.
    """
    steps = candidate.phases.measuring
    reading, others = ([s for s in steps if (s.stage is Stage.RANGES) is own] for own in (True, False))
    ahead, results = rewrite(candidate, workload, model, others)
    ranges = _ranges(ahead, workload)
    _, tried = rewrite(candidate, workload, ahead, reading, ranges=ranges)
    if not any(result.changes or result.refusals or result.failure for result in tried):
        by_step = dict(zip((*others, *reading), (*results, *tried), strict=True))
        return ahead, (*earlier, *(by_step[step] for step in steps)), ranges
    if ahead is not model:
        ranges = _ranges(model, workload)
    changed, passes = rewrite(candidate, workload, model, steps, earlier, ranges=ranges)
    return changed, passes, ranges if changed is model else _ranges(changed, workload)


def _ranges(model: Model, workload: Workload) -> Ranges:
    """Measures the ranges of every tensor on the samples."""
    stage, samples = workload.stage, workload.samples
    with stage("measuring ranges"):
        done, wide = partial(stage.report, "measuring ranges", total=len(samples)), reference(model)
        # the outputs of a model in FP32 are what the check of its structure compares
        verified = workload.verifier.indices if wide is model else ()
        ranges = measure(
            wide, samples, outputs_of=verified, channels=True, steps=samples.source.steps, progress=done
        )
    ranges.real = samples.source.real
    scale_to_profile(model, ranges, workload.job.deployment.beyond(samples.source.spans))
    return ranges


def _plan(candidate: Candidate, workload: Workload, calibrated: CalibratedModel, warnings: list[str]) -> Plan:
    """Returns the user's plan, or the rules' plan for the measured ranges; adds to the warnings."""
    job, precision, model = workload.job, candidate.precision, calibrated.model
    with workload.stage("choosing types"):
        if job.plan is not None:
            named = isinstance(job.request.plan, (str, os.PathLike))
            return fit(model, job.plan, str(job.request.plan) if named else "the plan")
        request = replace(precision, sample=workload.sample)
        plan = make_plan(model, calibrated.ranges, request, real=workload.samples.source.real)
        released = {d.key for d in plan.decisions if d.rule in candidate.released}
        plan = extend_plan(model, plan, {}, frozenset(released))
    warnings.extend(_unmatched(candidate, plan, model))
    if precision.epilogues != "none" and precision.precision == "fp16":
        warnings.extend(free_fp32.refusals(precision.target))
    return plan


def _unmatched(candidate: Candidate, plan: Plan, model: Model) -> Iterator[str]:
    """Warns of names that keep no node: it does not compute on floats, or a pass removed it."""
    precision, nodes = candidate.precision, list(model.proto.graph.node)
    keys = {d.key for d in plan.decisions if d.rule == "user"}
    scopes = enumerate(walk_graphs(model.proto.graph) if keys else ())
    lower = [node for scope, graph in scopes for node in graph.node if node_key(scope, node) in keys]
    requests = [
        *(("`keep-fp32`", name, NodePatterns(nodes=(name,))) for name in precision.keep_nodes),
        *(("`keep-fp32-op`", name, NodePatterns(ops=(name,))) for name in precision.keep_ops),
    ]
    for option, name, request in requests:
        if not any(any(request.requests(node)) for node in lower):
            there = map(display_name, nodes) if option == "`keep-fp32`" else (node.op_type for node in nodes)
            near = near_names(name, there)
            instead = f": there are {near}" if near else ""
            yield f"{option} {name!r} names no node that computes on floats{instead}"
    operators = [node.op_type for node in walk_nodes(model.proto.graph)] if precision.lower.ops else []
    for name in precision.lower.ops:
        if name not in operators:
            yield f"`lower-op` {name!r} names no node: there are {near_names(name, operators)}"


def _checked(
    candidate: Candidate, workload: Workload, structure: tuple[Check, ...], fixed: Model, plan: Plan | None
) -> tuple[tuple[Check, ...], Path | None]:
    """All checks of a result: a model that is wrong already is not built, since a repair follows."""
    job, verifier, checks = workload.job, workload.verifier, list(structure)
    fp32 = candidate.precision.precision == "fp32"
    if candidate.emulated and verifier.expected is not None and (plan is not None or fp32):
        precision = "fp32" if plan is None else plan.precision
        checks.append(verifier.emulated(fixed, precision, job.accumulation))
    wrong = {check.name for check in checks if check.passed is False}
    if "structure" in wrong or (wrong and verifier.settings is None):
        return tuple(checks), None
    built, engine = verifier.built(fixed, plan)
    return engine_first((*checks, *built)), engine


@dataclass(frozen=True)
class Estimate:
    """Recorded costs in us, at the shapes of the first sample."""

    planned: float
    rewritten: float  # the attempt's graph in FP32
    fp32: float = math.inf  # the original's: without passes of ours
    plain: float = math.inf  # the original's in FP16 (or BF16) but for hazards


def estimated_us(attempt: Attempt, workload: Workload) -> Estimate:
    if not workload.verifier.samples:
        return Estimate(math.inf, math.inf)
    sample, target = workload.verifier.samples[0], attempt.candidate.precision.target
    calibrated = attempt.calibrated
    prices = priced(calibrated.model.at_sizes(sample), target)
    fp32 = _fp32_us(prices)
    if attempt.plan is None:
        return Estimate(fp32, fp32, fp32)
    same = calibrated.plain is calibrated.model
    plain = prices if same else priced(calibrated.plain.at_sizes(sample), target)
    hazards = tuple(d for d in attempt.plan.decisions if d.rule not in OPTIONAL)
    plain_us = plain.total_us(replace(attempt.plan, decisions=hazards))
    return Estimate(prices.total_us(attempt.plan), fp32, _fp32_us(plain), plain_us)


def _fp32_us(prices: Prices) -> float:
    broken = fsum(attention.us for attention in prices.attentions)
    return fsum(prices.base.values()) + fsum(prices.own.values()) + broken
