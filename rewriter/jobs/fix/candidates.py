"""The candidates of `fix`, in their order; each may depend on the attempts before it.

First the rules' plan; on an engine, FP32 that may cost nothing there, plain FP16, and the plan without single
passes and groups of FP32 nodes; more FP32 where the error is; all nodes in FP32.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

from rewriter.base.errors import described
from rewriter.base.stopwatch import LASTING, OutOfTimeError, interrupt_handled, raise_signal, within
from rewriter.hazards import GraphAnalysis, Hazard, Rule
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.graph import display_name
from rewriter.ir.graph.ops import PRODUCTS, TENSOR_CORE
from rewriter.jobs.fix.attempt import (
    PLAIN,
    PLAIN_STEPS,
    Attempt,
    attempt,
    calibrate,
    changing,
    estimated_us,
    rewrite,
)
from rewriter.jobs.fix.job import Candidate, FixJob
from rewriter.jobs.fix.selection import MOST_FOR_PLAIN, Attempts, Selection
from rewriter.jobs.fix.workload import Workload
from rewriter.jobs.search.goal import NOISE, Budget, ErrorLimit
from rewriter.passes.base import Pass, Stage
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.simplify import Simplify
from rewriter.pipeline.presets import with_epilogues
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.verification.arithmetic_checks import AS_FP32, NO_WORSE, check_structure
from rewriter.verification.verdict import remark

CLEARLY_FASTER = 0.8
"""Without an engine, largest share of a plan's estimated latency at which FP32 is faster for certain: where
the plan's latency is known, the estimate for FP32 is 0.83 to 1.51 times the measured latency."""

MIN_GAIN_US = 10.0
"""Least estimated gain in us that is believed without an engine: below it launches decide, not arithmetic."""

MAYBE_FASTER = 1.5  # largest estimated share at which an engine is asked whether FP32 is faster

TIGHTENING = (0.9, 0.87, 0.8, 0.6)
"""Successive search targets, as shares of the limit: the first leaves a tenth for unseen samples. A plan that
meets a limit on the sample of a search may miss it on others: the next target is lower by this factor, and by
the factor that the last plan missed it by. For a user's limit the first target is the limit itself."""

AS_EMULATED = 2.0
"""Largest error of an engine over its emulation's that rounding explains: 1.05 in the mean of 31 networks,
and on none as much (benchmarks/README.md)."""

REFUSALS = 4
"""Most candidates that move refused nodes to FP32: a parser names the first node that it refuses, or few."""

BUILDING = ("building an engine", "running the engine")
"""Stages of an attempt after its search and its emulation."""

SEARCHING = 0.8
"""Largest share of the time left for a search and the check of its plan: FP32 may have to follow."""

IN_FP32 = "all of it in FP32 (TF32)"


def run(workload: Workload) -> Selection:
    """Tries the user's candidate, then others until the time is up, and returns the best attempt.

    Ctrl-C ends the loop, and the best so far is the result; before the first result it ends the run.
    """
    job = workload.job
    calibrate(job.first, workload)  # before the clock of a search starts
    start = time.monotonic()
    try:
        first = attempt(job.first, workload, start + SEARCHING * job.request.repair_seconds)
    except OutOfTimeError:
        words = "the rules' plan, as no other was tried in time"
        first = attempt(job.first.changed(words, goal=None), workload)
    if first.search is not None:  # the goals of other candidates are not the user's
        first = replace(first, checks=(*first.checks, first.search.check))
    # no cycle through the attempts themselves: their models would stay until the next garbage collection
    build_s = sum(workload.stage.seconds.get(stage, 0.0) for stage in BUILDING)
    attempts = Attempts(workload, [first], cache(partial(estimated_us, workload=workload)), build_s)
    if job.first.goal is not None:  # the clock began before its search
        attempts.start = start
    if job.may_change and not workload.verifier.interrupted:
        _try_all(attempts)
        workload.stage.trying = ""
    return attempts.selection()


def _try_all(attempts: Attempts) -> None:
    candidates, numbers = _candidates(attempts), count(1)
    try:
        while (left := attempts.deadline - time.monotonic()) > 0.0:
            with within(attempts.deadline + attempts.grace):  # the choice of a candidate may run a model, too
                if (candidate := next(candidates, None)) is None:
                    return
                words = f"candidate {next(numbers)}, at most {left:.0f} s left: {candidate.difference}"
                attempts.workload.stage.trying = LASTING + words
                _try(attempts, candidate)
    except OutOfTimeError:
        pass
    except KeyboardInterrupt:
        interrupt_handled()
        attempts.interrupted, spent = True, time.monotonic() - attempts.start
        attempts.stopped = f"interrupted after {spent:.0f} s: the best attempt so far is the result"
        return
    attempts.stopped = f"stopped after {time.monotonic() - attempts.start:.0f} s (`repair-seconds`)"


def _try(attempts: Attempts, candidate: Candidate) -> None:
    """Adds the attempt of a candidate, or why there is none; a search leaves time to build its plan."""
    left = attempts.deadline - time.monotonic()
    try:
        end = attempts.deadline - max(min(attempts.build_s, left / 2.0), (1.0 - SEARCHING) * left)
        attempts.attempts.append(attempt(candidate, attempts.workload, end))
    except OutOfTimeError:
        attempts.failures.extend(remark("too-late", difference=candidate.difference))
    except Exception as error:
        raise_signal()
        why = described(error)
        attempts.failures.extend(remark("raised", difference=candidate.difference, reason=why))


def _candidates(attempts: Attempts) -> Iterator[Candidate]:
    first = attempts.first_attempt
    if first.is_unbuilt() and not attempts.workload.verifier.original_build.passed:
        return
    yield from _without_culprits(attempts)
    yield from _without_what_is_refused(attempts)
    lowers = first.candidate.phases.lowering
    errors = {check.name: check.error for check in attempts.latest_attempt.failed}
    foretold = attempts.runs and errors.get("run", math.inf) <= AS_EMULATED * errors.get("emulation", 0.0)
    if lowers and foretold:
        yield from _with_more_fp32(attempts)  # a search by emulation repairs what the emulation has seen
    if attempts.runs:
        yield from _measured_candidates(attempts)
    elif attempts.worse_than_plain(first):
        yield from _match_plain_fp16(attempts)
    elif not first.failed and attempts.slower_than_plain(first):
        yield _plain(first.candidate, emulated=True)
    if not attempts.passed and lowers:
        if not foretold:
            yield from _with_more_fp32(attempts)
        yield from _without_what_is_refused(attempts)
        yield from _with_original_ports(attempts)
    yield from _in_fp32(attempts)


def _match_plain_fp16(attempts: Attempts) -> Iterator[Candidate]:
    """Weights rounded to nearest; more FP32 where passes gain something; plain FP16 if neither helps."""
    first = attempts.first_attempt
    steps = _with_options(first.candidate.steps, rounding="nearest")
    yield (nearest := first.candidate.changed("weights rounded to nearest", steps=steps))
    faster = any(first.changed(step) for step in _preferred_steps(first.candidate))
    if faster and attempts.worse_than_plain(attempts.latest_attempt):
        limit = NO_WORSE * attempts.plain_error
        worst = _worst_sample(attempts, first)
        goal = ErrorLimit(limit, attempts.workload.job.metric, (attempts.workload.verifier.indices[worst],))
        yield first.candidate.changed("FP32 until it is as close as plain FP16", goal=goal)
    us, latest = attempts.latencies(), attempts.latest_attempt
    if latest.failed or attempts.worse_than_plain(latest) or us[-1] > (1.0 + MOST_FOR_PLAIN) * us[0]:
        yield _plain(nearest, emulated=True)


def _with_original_ports(attempts: Attempts) -> Iterator[Candidate]:
    """A candidate with the original's input and output types, for inputs that FP16 cannot hold."""
    if attempts.passed or attempts.workload.job.precision.io == "keep":
        return
    precision = replace(attempts.workload.job.precision, io="keep")
    candidate = attempts.best_attempt.candidate
    yield candidate.changed("original types of inputs and outputs", precision=precision, goal=None)
    yield from _with_more_fp32(attempts)


def _without_culprits(attempts: Attempts) -> Iterator[Candidate]:
    """Candidates without the passes that changed the FP32 result, the largest change first."""
    if not attempts.latest_attempt.has_failed("structure"):
        return
    candidate = attempts.first_attempt.candidate
    for culprit in _culprits(attempts):
        candidate = candidate.without(culprit, ", which changed the result in FP32")
        yield candidate
        if not attempts.latest_attempt.has_failed("structure"):
            return


def _culprits(attempts: Attempts) -> list[Pass]:
    """Structural passes, first the one whose removal leaves the least error; needs no plan or emulation."""
    workload, first, changes = attempts.workload, attempts.first_attempt, list[tuple[float, Pass]]()
    expected, samples = workload.verifier.expected, workload.verifier.samples
    assert expected is not None
    for step in filter(first.changed, first.candidate.phases.structural):
        candidate = first.candidate.without(step)
        model, passes = rewrite(candidate, workload, workload.original, candidate.phases.structural)
        check = check_structure(expected, model, changing(candidate, passes), samples)
        changes.append((max((o.relative_l2 for o in check.outputs), default=0.0), step))
    return [step for _, step in sorted(changes, key=lambda pair: pair[0])]


def _without_what_is_refused(attempts: Attempts) -> Iterator[Candidate]:
    """Candidates with refused nodes in FP32, or without the search; then without one pass each.

    The original builds, so one of these may.
    """
    if not attempts.latest_attempt.is_unbuilt():
        return
    yield from _refused_in_fp32(attempts)
    first = attempts.first_attempt
    if first.search is not None and first.search.cost_us and attempts.latest_attempt.is_unbuilt():
        yield first.candidate.changed("without what the search added", goal=None)
    for step in first.candidate.steps:
        if not attempts.latest_attempt.is_unbuilt():
            return
        if first.changed(step) and step.stage is not Stage.LOWERING:
            yield first.candidate.without(step)


def _refused_in_fp32(attempts: Attempts) -> Iterator[Candidate]:
    """All nodes of an operator if they have no name, or another one of it is refused."""
    names, operators, seen = set[str](), set[str](), set[str]()
    for _ in range(REFUSALS):
        latest = attempts.latest_attempt
        refused = [node for check in latest.failed for node in check.refused]
        whole = {op for name, op in refused if not name or op in seen} - operators
        single = {name for name, op in refused if name and op not in seen} - names
        if not whole | single:
            return
        names, operators, seen = names | single, operators | whole, seen | {op for _, op in refused}
        precision = latest.candidate.precision
        rules = (*precision.rules, _refused(frozenset(names), frozenset(operators)))
        words = ", ".join([*(f"all {op}" for op in sorted(whole)), *sorted(single)])
        yield latest.candidate.changed(f"{words} in FP32", precision=replace(precision, rules=rules))


def _measured_candidates(attempts: Attempts) -> Iterator[Candidate]:
    """Candidates whose benefit depends on the network, so they are measured on an engine."""
    yield from _within_budget(attempts)
    first = attempts.first_attempt
    if first.plan is None or not attempts.workload.job.may_drop_optional_fp32:
        return
    candidate = replace(attempts.best_attempt.candidate, goal=None)  # without passes that were wrong
    if any(node.op_type in PRODUCTS for node in first.calibrated.model.proto.graph.node):
        yield _with_epilogues(candidate, attempts.workload.job)
    if any(first.changed(step) for step in _preferred_steps(candidate)):
        yield _plain(candidate, emulated=False)
    if attempts.best_attempt.search is not None:
        return  # without a part of it, what was searched for would be another plan
    for step in _folding(attempts):
        yield attempts.best_attempt.candidate.without(step)
    for rule in _preferred(attempts.best_attempt):
        best = attempts.best_attempt
        if rule in _preferred(best):
            released = best.candidate.released | {rule}
            words = f"without FP32 by the rule {rule}"
            yield best.candidate.changed(words, emulated=False, released=released)
    for step in _preferred_steps(attempts.best_attempt.candidate):
        best = attempts.best_attempt
        if best.changed(step) and step in best.candidate.steps:
            yield best.candidate.without(step)


def _folding(attempts: Attempts) -> list[Pass]:
    """The pass that computed products of constants, if there are some: with one left in the graph,
    TensorRT-RTX may run other branches, too, side by side (docs/engines.md#branches)."""
    graph = attempts.workload.original.proto.graph
    fed = {port.name for port in graph.input} - {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if not fed.isdisjoint(node.input):
            fed.update(node.output)
        elif node.op_type in TENSOR_CORE:
            return [step for step in attempts.best_attempt.candidate.steps if isinstance(step, Simplify)]
    return []


def _within_budget(attempts: Attempts) -> Iterator[Candidate]:
    """The rules' plan, and cheaper ones if the plan for a budget takes more of it than it may."""
    first, goal = attempts.first_attempt, attempts.workload.job.first.goal
    if not isinstance(goal, Budget) or first.failed:
        return
    yield first.candidate.changed("the rules' plan", goal=None)
    rules, spent = attempts.latest_attempt.latency_us, first.latency_us
    if rules is None or spent is None or spent <= (1.0 + goal.share + NOISE) * rules:
        return
    cheaper = replace(goal, share=goal.share * goal.share / (spent / rules - 1.0))
    yield first.candidate.changed(f"a plan for {cheaper}", goal=cheaper)


def _with_more_fp32(attempts: Attempts) -> Iterator[Candidate]:
    """Plans that are searched for, by emulation, for the limit that was missed."""
    last: ErrorLimit | None = None
    for share in TIGHTENING:
        if attempts.passed or (goal := _wanted(attempts, share, last.worst if last else ())) in (None, last):
            return
        last = goal
        candidate = attempts.best_attempt.candidate
        yield candidate.changed(f"more nodes in FP32, for {goal}", goal=goal, emulated=True)
        latest = attempts.latest_attempt
        if latest.candidate.goal is not goal or (latest.search is not None and not latest.search.met):
            return  # a stricter goal is missed, or has no result in time, too


def _wanted(attempts: Attempts, share: float, seen: tuple[int, ...]) -> ErrorLimit | None:
    """Returns the limit to search for, on the worst samples of all attempts; None: no search helps.

    If the error of a sample was larger on an engine, or than in a search that saw the sample, the search has
    to be better by this factor. A sample that no search has seen asks for no more than the limit: its error
    is not the others' times a constant, and scaling theirs kept most of a cloud mask's network in FP32.

    Args:
        seen: Places of the samples of the last search.
    """
    job, missed = attempts.workload.job, attempts.latest_attempt
    if (limit := _limit_of(missed)) is None:
        missed = attempts.best_attempt
        limit = _limit_of(missed)
    if limit is None:
        return None
    at, places = _worst_sample(attempts, missed), attempts.workload.verifier.indices
    worst = tuple(dict.fromkeys((*seen, places[at])))
    asked, closer, check = job.limit, share * _optimism(missed, at, places), missed.arithmetic
    fp32 = 0.0 if check is None else attempts.workload.verifier.error_in_fp32(check)
    if asked is not None:  # where more is better, it has no share
        less = 1.0 if asked.measure.least else closer / TIGHTENING[0]
        return replace(
            asked,
            tolerance=asked.tolerance * less,
            worst=worst,
            fp32=fp32 if asked.metric == RELATIVE_L2 else 0.0,
        )
    limit = max(max(limit, AS_FP32 * fp32) * closer, NO_WORSE * fp32)
    return ErrorLimit(limit, job.metric, worst, fp32)


def _in_fp32(attempts: Attempts) -> Iterator[Candidate]:
    """All of it in FP32 if nothing passes, or if it may be faster; unchanged if nothing builds."""
    fp32 = attempts.workload.job.precision.precision == "fp32"
    if not fp32 and (not attempts.passed or _fp32_may_be_faster(attempts)):
        candidate = attempts.best_attempt.candidate
        structural = (step for step in candidate.steps if step.stage is Stage.STRUCTURE)
        steps = tuple(step for step in structural if "fp32" in step.requires.precisions)
        yield _fp32(candidate, IN_FP32, steps)
    if attempts.latest_attempt.is_unbuilt() and not attempts.passed:
        yield _fp32(attempts.first_attempt.candidate, f"{IN_FP32}, unchanged", ())


def _fp32_may_be_faster(attempts: Attempts) -> bool:
    """True by recorded costs: a network of many small kernels, or with most products in FP32 anyway."""
    best = attempts.best_attempt
    if best.plan is None or attempts.workload.job.request.save_plan is not None:
        return False  # who wants the plan wants the model that it makes
    costs = attempts.estimated(best)
    planned, fp32 = costs.planned, costs.rewritten
    if attempts.runs:
        return fp32 <= MAYBE_FASTER * planned
    return fp32 <= CLEARLY_FASTER * planned and planned - fp32 >= MIN_GAIN_US


def _with_epilogues(candidate: Candidate, job: FixJob) -> Candidate:
    """The candidate with FP32 after products and in Softmax, but without passes that it has dropped."""
    left_out = {step.name for step in job.first.steps} - {step.name for step in candidate.steps}
    skipped = left_out.union(job.request.skip or ())
    steps = tuple(step for step in with_epilogues() if step.name not in skipped)
    if job.request.refittable:
        steps = tuple(step for step in steps if step.refittable)
    precision = replace(candidate.precision, epilogues="all")
    return candidate.changed("FP32 epilogues", steps=steps, precision=precision, emulated=False)


def _preferred(attempt: Attempt) -> list[str]:
    """Rules of optional FP32 nodes, without a hazard, the rule with most nodes first."""
    decisions = attempt.plan.decisions if attempt.plan is not None else ()
    sizes = Counter(decision.rule for decision in decisions if decision.rule in FREE)
    return [rule for rule, _ in sizes.most_common()]


def _preferred_steps(candidate: Candidate) -> list[Pass]:
    """The passes that only make a result faster or more accurate."""
    return [step for step in candidate.steps if type(step) not in PLAIN_STEPS]


def _plain(candidate: Candidate, *, emulated: bool) -> Candidate:
    """The candidate with only the steps of plain FP16, and no optional FP32."""
    shared = [step for step in candidate.steps if step not in _preferred_steps(candidate)]
    steps, precision = _with_options(shared, epilogues="none"), replace(candidate.precision, epilogues="none")
    fields: dict[str, Any] = {"steps": steps, "precision": precision, "emulated": emulated}
    return candidate.changed(f"plain FP16, as {PLAIN}", "plain FP16", **fields)


def _with_options(steps: Iterable[Pass], **options: Any) -> tuple[Pass, ...]:
    """The steps, where the pass mixed-precision has these options."""
    return tuple(replace(s, **options) if isinstance(s, MixedPrecision) else s for s in steps)


def _fp32(candidate: Candidate, words: str, steps: tuple[Pass, ...]) -> Candidate:
    precision = replace(candidate.precision, precision="fp32")
    return candidate.changed(words, "FP32", steps=steps, precision=precision, goal=None, emulated=True)


def _refused(names: frozenset[str], operators: frozenset[str]) -> Rule:
    """A rule for nodes that the parser of TensorRT refuses."""

    def refused(analysis: GraphAnalysis) -> Iterator[Hazard]:
        for node in analysis.nodes:
            if node.name in names or node.op_type in operators:
                reason = f"TensorRT refuses {display_name(node)} ({node.op_type}) in {analysis.low_name}"
                yield Hazard(node, "no-lower-type", reason)

    return refused


def _limit_of(attempt: Attempt) -> float | None:
    """The smallest tolerance of an output of the failed check of the arithmetic; None if it did not fail."""
    check = attempt.arithmetic
    return None if check is None or check.passed is not False else min(o.tolerance for o in check.outputs)


def _worst_sample(attempts: Attempts, attempt: Attempt) -> int:
    """Position of the sample with the largest error, in units of what is allowed, among those that judge."""
    rounds = attempt.arithmetic.rounds if attempt.arithmetic is not None else ()
    errors = [max((o.excess for o in outputs if o.counts), default=0.0) for outputs in rounds] or [0.0]
    return errors.index(max(errors)) % len(attempts.workload.verifier.indices)


def _optimism(attempt: Attempt, at: int, places: Sequence[int]) -> float:
    """The error that a search or else the emulation sees in a sample, over the one that decides; at most 1.0.

    The first of the places is kept from the search for a user's goal.

    Args:
        at: Position of the worst sample. `places`: of the samples that judge.
    """
    decides, search = attempt.relative_l2, attempt.search
    seen = 0.0
    if search is not None and places[at] in (search.goal.worst or places[1:]):
        seen = search.value if search.goal.metric == RELATIVE_L2 else 0.0
    if not seen:
        rounds = next((check.rounds for check in attempt.checks if check.name == "emulation"), ())
        outputs = rounds[at] if at < len(rounds) else ()
        seen = max((o.relative_l2 for o in outputs if o.finite and o.counts), default=0.0)
    return min(1.0, seen / decides) if seen and 0.0 < decides < math.inf else 1.0
