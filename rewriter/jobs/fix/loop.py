"""The one loop of `fix`: candidates, one judge, one clock, and the objective that chooses the result.

    Of the plans that pass every check, the fastest; of those within 2 % of it, the most accurate.

`--max-latency-cost` puts its share in the place of these 2 %. Latency is measured on an engine of this
machine; where none runs, it is the sum of recorded costs. The candidates, in their order: the rules' plan;
on an engine, FP32 that may cost nothing there, plain FP16, and what is left without single passes and groups
of FP32 nodes; more FP32 where the error is; all of it in FP32.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

from rewriter.base.errors import described
from rewriter.base.stopwatch import LASTING, interrupt_handled, raise_signal
from rewriter.hazards import GraphAnalysis, Hazard, Rule
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.hazards.user_rules import HINT
from rewriter.ir.graph import display_name
from rewriter.ir.graph.ops import PRODUCTS, TENSOR_CORE
from rewriter.jobs.fix.attempt import Attempt, LatencyShare, Result, attempt, estimated_us
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.making import AttemptBuilder, Workload
from rewriter.jobs.search.goal import NOISE, Budget, ErrorLimit
from rewriter.passes.base import Pass, Stage
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.simplify import Simplify
from rewriter.pipeline.presets import PRESETS, with_epilogues
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.target.costs import ORIGIN
from rewriter.verification.arithmetic_checks import AS_FP32, check_structure

PLAIN = "trt11-migrate"
"""The preset that changes types, and what they require, alone."""

AFFORDED_S = 60.0
"""No candidate starts later than this after the first attempt, once a result passes."""

RETIME_WITHIN = 1.1
"""Results within this factor of the fastest are timed again, in turn in one process: latencies of two
processes were measured to differ by 6 to 10 % on one GPU."""

CLEARLY_FASTER = 0.8
"""Without an engine, largest share of a plan's estimated latency at which FP32 is faster for certain: the
estimate of FP32 is 0.83 to 1.51 times the measured latency where that of the plan is known."""

MIN_GAIN_US = 10.0
"""Least estimated gain in us that is believed without an engine: below it launches decide, not arithmetic."""

MAYBE_FASTER = 1.5
"""Largest estimated share at which an engine is asked whether FP32 is faster."""

MAX_ERROR_OVER_PLAIN_FP16 = 1.15
"""Without an engine, least error of a plan over that of plain FP16 at which the plan is not handed out,
where no hazard was found: rounding by chance moves errors of one network by less. No search asks for an error
that is closer to FP32's."""

MOST_FOR_PLAIN: float = PRESETS["accurate"].defaults["max_latency_cost"]
"""Largest share of latency for a plan as close as plain FP16 in the place of one that errs more; it may take
as long as plain FP16, too."""

TIGHTENING = (0.9, 0.87, 0.8, 0.6)
"""Shares of the limit that one search after another is for: a tenth is left for samples that nobody has. A
plan that meets a limit on the sample of a search may miss it on others: the next search asks for so much
less, beside what the last one missed by. Of a user's limit the first search asks for the whole."""

AS_EMULATED = 2.0
"""Largest error of an engine over its emulation's that rounding explains: 1.05 in the mean of 31 networks,
and on none as much (benchmarks/README.md)."""

REFUSALS = 4
"""Most candidates that move refused nodes to FP32: a parser names the first node that it refuses, or few."""


@dataclass(frozen=True)
class Candidate:
    """What is done differently, in words, and the job; `name` is of one that others are compared with."""

    words: str
    job: FixJob
    name: Literal["", "plain FP16", "FP32"] = ""


def best(attempts: Sequence[Attempt], latencies: Sequence[float], latency_tolerance: float = NOISE) -> int:
    """Of the plans that pass every check, the fastest; of those within `slack` of it, the most accurate.

    Args:
        latencies: Of the attempts, in us; infinite if unknown.
        slack: Share of the fastest's latency.

    Returns:
        The place of the best one; of equals the first. If none passes, that with the smallest error, of
        equals the last, which has more in FP32.
    """
    places = range(len(attempts))
    passing = [place for place in places if not attempts[place].failed]
    if not passing:
        return min(reversed(places), key=lambda place: attempts[place].error)
    limit = (1.0 + latency_tolerance) * min(latencies[place] for place in passing)
    near = [place for place in passing if latencies[place] <= limit]
    return min(near, key=lambda place: attempts[place].relative_l2)


def run(job: FixJob, workload: Workload) -> Result:
    """Tries a job, then candidates in its place until the time is up, and returns the best.

    Ctrl-C ends the loop, and the best so far is the result; before the first result it ends the run.
    """
    first = attempt(job, workload)
    # no cycle through the loop itself: its models would stay until the next collection of garbage
    estimated, start = cache(partial(estimated_us, workload=workload)), Candidate("the rules' plan", job)
    loop = _Loop(workload, job, first, [first], estimated, [start])
    if first.job.may_change and not workload.judge.interrupted:
        loop.try_all()
        workload.stage.trying = ""
    return loop.result()


@dataclass
class _Loop:
    """Attempts so far, and the candidates that they came from, in their order.

    `failures` are candidates of which no attempt came, because one of its steps raised an exception.
    """

    workload: Workload
    job: FixJob
    first: Attempt
    attempts: list[Attempt]
    estimated: Callable[[Attempt], tuple[float, float, float]]
    candidates: list[Candidate]
    stopped: str = ""
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    start: float = field(default_factory=time.monotonic)

    @property
    def runs(self) -> bool:
        """True if an engine of this machine runs the attempts."""
        return self.workload.judge.settings is not None

    @property
    def latest(self) -> Attempt:
        return self.attempts[-1]

    @property
    def base(self) -> Attempt:
        """The best attempt so far, which the next candidates start from."""
        return self.attempts[best(self.attempts, self._latencies(), self.job.latency_tolerance)]

    @property
    def passed(self) -> bool:
        return any(not one.failed for one in self.attempts)

    def try_all(self) -> None:
        """Tries the candidates, each of which may depend on what came before it."""
        try:
            for candidate in self._candidates():
                spent = time.monotonic() - self.start
                if spent > self._seconds():
                    self.stopped = f"stopped after {spent:.0f} s (`repair-seconds`)"
                    break
                place = len(self.candidates) + len(self.failures)
                number = f"candidate {place}, at most {self._seconds() - spent:.0f} s left"
                self.workload.stage.trying = f"{LASTING}{number}: {candidate.words}"
                self._try(candidate)
        except KeyboardInterrupt:
            interrupt_handled()
            self.interrupted, spent = True, time.monotonic() - self.start
            self.stopped = f"interrupted after {spent:.0f} s: the best attempt so far is the result"

    def _try(self, candidate: Candidate) -> None:
        try:
            # what is emulated already for the first attempt is left to the engine
            self.attempts.append(attempt(replace(candidate.job, repairing=True), self.workload))
        except Exception as error:
            raise_signal()
            self.failures.append(f"{candidate.words}: no result ({described(error)})")
        else:
            self.candidates.append(candidate)

    def result(self) -> Result:
        """The best attempt, and how it was found."""
        latencies = self._timed_in_turn()
        at = self._chosen(latencies)
        chosen = self.attempts[at]
        lines = (
            tuple(self._lines(latencies)) if len(self.attempts) > 1 or self.stopped or self.failures else ()
        )
        earlier = next((n for n, one in enumerate(self.attempts) if not one.failed), at)
        remark = self._remark(at, earlier, latencies) if earlier != at else ""
        fp32 = [one.error for one in self.attempts if one.failed and one.job.precision.precision == "fp32"]
        stopped = self.stopped if chosen.failed or self.interrupted else ""
        asked = [
            one for one in self.attempts if one.plan is not None and one.plan.io == self.job.precision.io
        ]
        with_ports = "" if chosen in asked or not asked else _summary(min(asked, key=lambda one: one.error))
        shares = tuple(self._shares(at, latencies))
        return Result(chosen, lines, remark, stopped, min(fp32, default=None), with_ports, shares)

    def _chosen(self, latencies: Sequence[float]) -> int:
        """The best attempt; one as close as plain FP16 where a plan errs more though nothing was wrong."""
        at = best(self.attempts, latencies, self.job.latency_tolerance)
        closer = [n for n, one in enumerate(self.attempts) if not (one.failed or self._worse_than_plain(one))]
        if not closer or at in closer:
            return at
        nearest = min(closer, key=lambda place: latencies[place])
        pairs = zip(self.candidates, latencies, strict=True)
        plain = next((us for one, us in pairs if one.name == "plain FP16"), 0.0)
        limit = max((1.0 + MOST_FOR_PLAIN) * latencies[at], plain)
        return nearest if latencies[nearest] <= limit else at

    def _seconds(self) -> float:
        """Latest start of a candidate: a minute where there is a result, or as long as a repair may take."""
        limit = self.job.request.repair_seconds
        return min(AFFORDED_S, limit) if self.passed else limit

    def _latencies(self) -> list[float]:
        """Of each attempt, in us: of its engine, or else its recorded costs."""
        if self.runs:
            return [math.inf if one.latency_us is None else one.latency_us for one in self.attempts]
        if len(self.attempts) == 1:
            return [0.0]
        return [self.estimated(one)[0] for one in self.attempts]

    def _timed_in_turn(self) -> list[float]:
        """The latencies, where those near the fastest are timed again in turn.

        There, each engine finds another one's weights in the GPU's cache, and takes longer than alone: the
        others count as if they were as much longer as the fastest.
        """
        latencies, latency_tolerance = self._latencies(), max(RETIME_WITHIN, 1.0 + self.job.latency_tolerance)
        passing = {at: one.engine for at, one in enumerate(self.attempts) if not one.failed}
        fastest = min(passing, key=lambda at: latencies[at], default=0)
        alone = latencies[fastest]
        near = {
            at: engine
            for at, engine in passing.items()
            if engine and latencies[at] <= latency_tolerance * alone
        }
        if len(near) < 2 or not self.runs:
            return latencies
        try:
            for at, us in zip(near, self.workload.judge.timed_in_turn([*near.values()]), strict=True):
                latencies[at] = latencies[at] if us is None else us
            for at in passing.keys() - near.keys():
                latencies[at] *= latencies[fastest] / alone
        except KeyboardInterrupt:
            interrupt_handled()
            self.interrupted |= not self.stopped
            self.stopped = self.stopped or "interrupted while the best attempts were timed"
        return latencies

    def _shares(self, at: int, latencies: Sequence[float]) -> Iterator[LatencyShare]:
        """Of FP32's latency and of plain FP16's: measured where an engine of those ran, or else estimated."""
        chosen = self.attempts[at]
        if chosen.plan is None or chosen.all_fp32 or not self.workload.judge.samples:
            return
        planned, fp32, plain = self.estimated(chosen)
        for name, estimate in (("FP32", fp32), ("plain FP16", plain)):
            ran = [us for us, one in zip(latencies, self.candidates, strict=False) if one.name == name]
            if self.runs and ran and math.isfinite(ran[0]):
                yield LatencyShare(name, latencies[at] / ran[0], measured=True)
            elif planned and estimate:
                yield LatencyShare(name, planned / estimate, measured=False)

    def _lines(self, latencies: Sequence[float]) -> Iterator[str]:
        for candidate, one, us in zip(self.candidates, self.attempts, latencies, strict=True):
            outcome = _summary(one) if one.failed else "every check passes"
            timed = f", {us:.3g} us" if one.latency_us is not None else ""
            yield f"{candidate.words}: {outcome}{timed}"
        yield from self.failures
        if self.stopped:
            yield self.stopped

    def _remark(self, at: int, earlier: int, latencies: Sequence[float]) -> str:
        chosen, other, words = self.attempts[at], self.attempts[earlier], self.candidates[at].words
        ran = next((f"measured {check.place}" for check in chosen.checks if check.name == "run"), "")
        source = ran or f"estimated, {ORIGIN}"
        return (
            f"{words}: {latencies[at]:.3g} us instead of {latencies[earlier]:.3g} us ({source}), "
            f"error {chosen.relative_l2:.2g} instead of {other.relative_l2:.2g}"
        )

    # -- candidates ---------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Candidate]:
        if self._unbuilt() and not self.workload.judge.original_build.passed:
            return
        yield from self._without_culprits()
        yield from self._without_what_is_refused()
        lowers = self.job.phases.lowering
        errors = {check.name: check.error for check in self.latest.failed}
        foretold = errors.get("run", math.inf) <= AS_EMULATED * errors.get("emulation", 0.0)
        if lowers and self.runs and foretold:
            yield from self._with_more_fp32()  # a search by emulation mends what the emulation has seen
        if self.runs:
            yield from self._measured_candidates()
        elif self._worse_than_plain(self.first):
            yield from self._match_plain_fp16()
        if not self.passed and lowers:
            if not (self.runs and foretold):
                yield from self._with_more_fp32()
            yield from self._without_what_is_refused()
            yield from self._with_ports_as_they_came()
        yield from self._in_fp32()

    @property
    def _plain_error(self) -> float:
        """The error of plain FP16, emulated; infinite unless it passes, and no hazard was found."""
        before, first = self.workload.before, self.first
        wrong = not before or first.causes or not all(one.passed for one in before)
        if wrong or self.runs or not first.job.may_drop_optional_fp32 or self.job.limit is not None:
            return math.inf
        return max(one.relative_l2 for one in before if one.counts)

    def _worse_than_plain(self, attempt: Attempt) -> bool:
        """True, without an engine, if a result errs more than plain FP16 though nothing was wrong."""
        return attempt.relative_l2 > MAX_ERROR_OVER_PLAIN_FP16 * self._plain_error

    def _match_plain_fp16(self) -> Iterator[Candidate]:
        """Weights rounded to nearest; more FP32 where passes gain something; plain FP16 if neither helps."""
        first, job = self.first, self.first.job
        nearest = replace(job, steps=_with_options(job.steps, rounding="nearest"))
        yield Candidate("weights rounded to nearest", nearest)
        faster = any(first.changed(step) for step in _preferred_steps(job))
        if faster and self._worse_than_plain(self.latest):
            goal = ErrorLimit(MAX_ERROR_OVER_PLAIN_FP16 * self._plain_error, job.metric, one_sample=True)
            yield Candidate("FP32 until it is as close as plain FP16", replace(job, goal=goal))
        us = self._latencies()
        dear = us[-1] > (1.0 + MOST_FOR_PLAIN) * us[0]
        if self.latest.failed or self._worse_than_plain(self.latest) or dear:
            yield Candidate(f"plain FP16, as {PLAIN}", replace(_plain(nearest), emulated=True), "plain FP16")

    def _with_ports_as_they_came(self) -> Iterator[Candidate]:
        """No plan of nodes mends an input that FP16 cannot hold."""
        if self.passed or self.job.precision.io == "keep":
            return
        precision = replace(self.job.precision, io="keep")
        yield Candidate(
            "inputs and outputs as they came", replace(self.base.job, precision=precision, goal=None)
        )
        yield from self._with_more_fp32()

    def _without_culprits(self) -> Iterator[Candidate]:
        """Without the passes that changed the FP32 result, the largest change first."""
        if not self._failed("structure"):
            return
        job = self.first.job
        for culprit in self._culprits():
            job = job.without(culprit)
            yield Candidate(f"without {culprit.name}, which changed the result in FP32", job)
            if not self._failed("structure"):
                return

    def _culprits(self) -> list[Pass]:
        """Each is left out alone; the structure check runs without ranges, plan and emulation."""
        judge, changes = self.workload.judge, []
        assert judge.expected is not None
        for step in filter(self.first.changed, self.first.job.phases.structural):
            job = self.first.job.without(step)
            making = AttemptBuilder(job, self.workload)
            model = making.rewrite(self.workload.original, job.phases.structural)
            check = check_structure(judge.expected, model, making.changed(), judge.samples)
            changes.append((max((o.relative_l2 for o in check.outputs), default=0.0), step))
        return [step for _, step in sorted(changes, key=lambda pair: pair[0])]

    def _without_what_is_refused(self) -> Iterator[Candidate]:
        """Refused nodes in FP32; then without a pass that changed something: the original builds."""
        if not self._unbuilt():
            return
        yield from self._refused_in_fp32()
        for step in self.first.job.steps:
            if not self._unbuilt():
                return
            if self.first.changed(step) and step.stage is not Stage.LOWERING:
                yield Candidate(f"without {step.name}", self.first.job.without(step))

    def _refused_in_fp32(self) -> Iterator[Candidate]:
        """All nodes of an operator if they have no name, or another one of it is refused."""
        names, operators, seen = set[str](), set[str](), set[str]()
        for _ in range(REFUSALS):
            refused = [node for check in self.latest.failed for node in check.refused]
            whole = {op for name, op in refused if not name or op in seen} - operators
            single = {name for name, op in refused if name and op not in seen} - names
            if not whole | single:
                return
            names, operators, seen = names | single, operators | whole, seen | {op for _, op in refused}
            job = self.latest.job
            rules = (*job.precision.rules, _refused(frozenset(names), frozenset(operators)))
            words = ", ".join([*(f"all {op}" for op in sorted(whole)), *sorted(single)])
            yield Candidate(f"{words} in FP32", replace(job, precision=replace(job.precision, rules=rules)))

    def _measured_candidates(self) -> Iterator[Candidate]:
        """What pays on some networks and costs on others: an engine shows it."""
        yield from self._within_budget()
        first = self.first
        if first.plan is None or not first.job.may_drop_optional_fp32:
            return
        job = replace(self.base.job, goal=None)  # without passes that were shown to be wrong
        if any(node.op_type in PRODUCTS for node in first.measured.model.proto.graph.node):
            yield Candidate("FP32 epilogues", _with_epilogues(job, self.job))
        if any(first.changed(step) for step in _preferred_steps(job)):
            yield Candidate(f"plain FP16, as {PLAIN}", _plain(job), "plain FP16")
        if self.base.search is not None:
            return  # without a part of it, what was searched for would be another plan
        for step in self._folding():
            yield Candidate(f"without {step.name}", self.base.job.without(step))
        for rule in _preferred(self.base):
            base = self.base
            if rule in _preferred(base):
                job = replace(base.job, emulated=False, released=base.job.released | {rule})
                yield Candidate(f"without FP32 by the rule {rule}", job)
        for step in _preferred_steps(self.base.job):
            base = self.base
            if base.changed(step) and step in base.job.steps:
                yield Candidate(f"without {step.name}", base.job.without(step))

    def _folding(self) -> list[Pass]:
        """The pass that computed products of constants, if there are some: with one left in the graph,
        TensorRT-RTX may run other branches, too, side by side (docs/engines.md#branches)."""
        graph = self.workload.original.proto.graph
        fed = {port.name for port in graph.input} - {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            if not fed.isdisjoint(node.input):
                fed.update(node.output)
            elif node.op_type in TENSOR_CORE:
                return [step for step in self.base.job.steps if isinstance(step, Simplify)]
        return []

    def _within_budget(self) -> Iterator[Candidate]:
        """The rules' plan, and cheaper ones if the plan for a budget takes more of it than it may."""
        goal, first = self.job.goal, self.first
        if not isinstance(goal, Budget) or first.failed:
            return
        yield Candidate("the rules' plan", replace(first.job, goal=None))
        rules, spent = self.latest.latency_us, first.latency_us
        if rules is None or spent is None or spent <= (1.0 + goal.share + NOISE) * rules:
            return
        cheaper = replace(goal, share=goal.share * goal.share / (spent / rules - 1.0))
        yield Candidate(f"a plan for {cheaper}", replace(first.job, goal=cheaper))

    def _with_more_fp32(self) -> Iterator[Candidate]:
        """Plans that are searched for, by emulation, for the limit that was missed."""
        last: ErrorLimit | None = None
        for share in TIGHTENING:
            if self.passed or (wanted := self._wanted(share)) in (None, last):
                return
            last = wanted
            job = replace(self.base.job, goal=wanted, emulated=True)
            yield Candidate(f"more nodes in FP32, for {wanted}", job)
            if (search := self.latest.search) and not search.met:  # a stricter goal would be missed, too
                return

    def _wanted(self, share: float) -> ErrorLimit | None:
        """Returns the limit to search for on the samples of the search; None: no search helps.

        Where all samples, or an engine, erred more than those of a search, these have to be that much better.
        """
        attempt = self.latest if _limit_of(self.latest) is not None else self.base
        limit = _limit_of(attempt)
        if limit is None:
            return None
        asked, closer = self.job.limit, share * _optimism(attempt)
        if asked is not None:
            less = (
                1.0 if asked.measure.least else closer / TIGHTENING[0]
            )  # where more is better, it has no share
            return replace(asked, tolerance=asked.tolerance * less)
        fp32 = 0.0 if (check := attempt.arithmetic) is None else self.workload.judge.error_in_fp32(check)
        limit = max(max(limit, AS_FP32 * fp32) * closer, MAX_ERROR_OVER_PLAIN_FP16 * fp32)
        return ErrorLimit(limit, self.job.metric, one_sample=True)

    def _in_fp32(self) -> Iterator[Candidate]:
        """All of it in FP32 if nothing passes, or if it may be faster; unchanged if nothing builds."""
        if self.job.precision.precision != "fp32" and (not self.passed or self._fp32_may_be_faster()):
            structural = (step for step in self.base.job.steps if step.stage is Stage.STRUCTURE)
            steps = tuple(step for step in structural if "fp32" in step.requires.precisions)
            yield Candidate("all of it in FP32 (TF32)", _fp32(self.base.job, steps), "FP32")
        if self._unbuilt() and not self.passed:
            yield Candidate("all of it in FP32 (TF32), unchanged", _fp32(self.first.job, ()), "FP32")

    def _fp32_may_be_faster(self) -> bool:
        """By recorded costs: a network of many small kernels, or with most products in FP32 anyway."""
        base = self.base
        if base.plan is None or self.job.request.save_plan is not None:
            return False  # who wants the plan wants the model that it makes
        planned, fp32, _ = self.estimated(base)
        if self.runs:
            return fp32 <= MAYBE_FASTER * planned
        return fp32 <= CLEARLY_FASTER * planned and planned - fp32 >= MIN_GAIN_US

    def _unbuilt(self) -> bool:
        """True if TensorRT gave no engine for the latest attempt."""
        return any(one.name == "build" and one.built is False for one in self.latest.failed)

    def _failed(self, check: str) -> bool:
        return any(one.name == check for one in self.latest.failed)


def _summary(attempt: Attempt) -> str:
    return "; ".join(check.summary for check in attempt.failed)


def _with_epilogues(job: FixJob, first: FixJob) -> FixJob:
    """The job with FP32 after products and in Softmax, without the passes that were left out of `first`."""
    left_out = {step.name for step in first.steps} - {step.name for step in job.steps}
    skipped = left_out.union(job.request.skip or ())
    steps = tuple(step for step in with_epilogues() if step.name not in skipped)
    if job.request.refittable:
        steps = tuple(step for step in steps if step.refittable)
    precision = replace(job.precision, epilogues="all")
    return replace(job, steps=steps, precision=precision, emulated=False)


def _preferred(attempt: Attempt) -> list[str]:
    """Rules of FP32 nodes that no hazard asks for, or a hint, the rule with most nodes first."""
    decisions = attempt.plan.decisions if attempt.plan is not None else ()
    sizes = Counter(one.rule for one in decisions if one.rule in FREE | {HINT})
    return [rule for rule, _ in sizes.most_common()]


def _preferred_steps(job: FixJob) -> list[Pass]:
    """The passes that only make a result faster or more accurate."""
    plain = {type(step) for step in PRESETS[PLAIN].steps}
    return [step for step in job.steps if type(step) not in plain]


def _plain(job: FixJob) -> FixJob:
    """The job with those of its steps that plain FP16 has, too, and no FP32 that is only preferred."""
    shared = [step for step in job.steps if step not in _preferred_steps(job)]
    precision = replace(job.precision, epilogues="none")
    return replace(job, steps=_with_options(shared, epilogues="none"), precision=precision, emulated=False)


def _with_options(steps: Iterable[Pass], **options: Any) -> tuple[Pass, ...]:
    """The steps, where the pass mixed-precision has these options."""
    return tuple(replace(s, **options) if isinstance(s, MixedPrecision) else s for s in steps)


def _fp32(job: FixJob, steps: tuple[Pass, ...]) -> FixJob:
    precision = replace(job.precision, precision="fp32")
    return replace(job, steps=steps, precision=precision, goal=None, emulated=True)


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


def _optimism(attempt: Attempt) -> float:
    """The error that a search sees, in its own or the emulation, over the one that decides; at most 1.0.

    Of several samples the first is kept from searches.
    """
    decides = attempt.relative_l2
    if attempt.search is not None and attempt.search.goal.metric == RELATIVE_L2 and decides:
        return min(1.0, attempt.search.value / decides)
    rounds = next((check.rounds for check in attempt.checks if check.name == "emulation"), ())
    seen = max(
        (o.relative_l2 for outputs in rounds[1:] or rounds for o in outputs if o.finite and o.counts),
        default=0.0,
    )
    return min(1.0, seen / decides) if seen and 0.0 < decides < math.inf else 1.0
