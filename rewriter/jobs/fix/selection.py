"""Selects the attempt that becomes the result, by this objective:

    Of the plans that pass every check, the fastest; of those within 2 % of it, the most accurate.

`--max-latency-cost` replaces these 2 % by its share. Latency is measured on an engine of this machine; where
none runs, it is the sum of recorded costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rewriter.base.stopwatch import interrupt_handled
from rewriter.jobs.fix.attempt import PLAIN, Attempt, Estimate
from rewriter.jobs.fix.workload import Workload
from rewriter.jobs.search.goal import NOISE
from rewriter.pipeline.presets import PRESETS
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.target.costs import KERNEL_US
from rewriter.verification.arithmetic_checks import NO_WORSE
from rewriter.verification.verdict import ARITHMETIC, Check, Remark, remark

AFFORDED_S = 60.0
"""Candidates end so long after the first attempt, once a result passes."""

GRACE = 0.1  # share of `repair-seconds` after which work that began before the deadline is cut off

RETIME_WITHIN = 1.1
"""Results within this factor of the fastest are timed again, in turn in one process: latencies of two
processes were measured to differ by 6 to 10 % on one GPU."""

ALIKE = 1.05
"""Ratio of two errors that TF32 causes, merely by chance, in plans with the same FP32 products."""

BEYOND_CHANCE = 2.33
"""Standard deviations of a difference that chance exceeds in 1 of 100 cases."""

AS_EXACT = TOLERANCES["fp32"].value
"""Error that FP32 in another order of sums has, and below which no result is worse than another."""

MOST_FOR_PLAIN: float = PRESETS["accurate"].defaults["max_latency_cost"]
"""Largest share of latency that a plan as close as plain FP16 may add to a less accurate plan's; it may also
be as slow as plain FP16."""


def best(attempts: Sequence[Attempt], latencies: Sequence[float], latency_tolerance: float = NOISE) -> int:
    """Of the plans that pass every check, the fastest; of those close to it, the most accurate.

    Args:
        latencies: Of the attempts, in us; infinite if unknown.
        latency_tolerance: Share of the fastest's latency that counts as close.

    Returns:
        The index of the best attempt, the first of equals. If none passes, the fastest of those with the
        smallest error that are right with TF32 off; else the one with the smallest error, and the last of
        equals, which has more in FP32, of those whose passes kept the result in FP32: others build on it.
    """
    indices = range(len(attempts))
    passing = [index for index in indices if not attempts[index].failed]
    if not passing and (cured := [index for index in indices if attempts[index].cured]):
        least = min(attempts[index].error for index in cured)
        alike = [index for index in cured if attempts[index].error <= ALIKE * least]
        return min(alike, key=lambda index: latencies[index])
    if not passing:
        sound = [index for index in indices if not attempts[index].has_failed("structure")]
        return min(reversed(sound or indices), key=lambda index: attempts[index].error)
    limit = (1.0 + latency_tolerance) * min(latencies[index] for index in passing)
    near = [index for index in passing if latencies[index] <= limit]
    return min(near, key=lambda index: attempts[index].relative_l2)


@dataclass(frozen=True, order=True)
class OutputError:
    """The relative L2 error of one output over all samples.

    Attributes:
        worst: In the worst sample; `rms`: the root mean square.
        carriers: Number of entries of all samples that carry the error, as `Pair.carriers`.
    """

    worst: float
    rms: float
    carriers: float

    def is_larger(self, other: OutputError) -> bool:
        return self.worst > max(NO_WORSE * other.worst, AS_EXACT)

    def is_worse(self, other: OutputError) -> bool:
        """True if it is larger than the error of another form of the network by more than chance.

        Of 265,000 probabilities of a text recogniser (PP-OCRv4), 2 to 12 carry the error of plain FP16: it is
        0.0061 to 0.011 if the inputs move by 2e-4. Where n entries carry an error, its logarithm varies by
        1 / (2 sqrt(n)), and the difference of two by sqrt(2) times as much.
        """
        few = max(self.carriers, other.carriers, 1.0)
        by_chance = math.exp(BEYOND_CHANCE / math.sqrt(2.0 * few))
        return self.is_larger(other) and self.rms > max(NO_WORSE, by_chance) * other.rms


def output_errors(check: Check) -> dict[str, OutputError]:
    """The error of each output of a check, which has a round for each sample."""
    rows = dict[str, list[tuple[float, float]]]()
    for output in (o for outputs in check.rounds or (check.outputs,) for o in outputs if not o.of):
        rows.setdefault(output.name, []).append((output.relative_l2, output.carriers))
    errors = dict[str, OutputError]()
    for name, pairs in rows.items():
        square, fourth = (sum(e**2 for e, _ in pairs), sum(e**4 / n for e, n in pairs if n))
        carriers = square**2 / fourth if fourth else 0.0
        errors[name] = OutputError(max(e for e, _ in pairs), math.sqrt(square / len(pairs)), carriers)
    return errors


@dataclass(frozen=True)
class LatencyShare:
    """The latency of a result in units of another's: `FP32` or `plain FP16`.

    `measured` is True if both ran on this GPU; False if recorded costs were added up.
    """

    of: str
    share: float
    measured: bool


@dataclass(frozen=True)
class Selection:
    """The attempt that becomes the result, and how it was selected.

    Attributes:
        tried: What failed at first, and what was tried.
        preferred: Why it is not the first attempt that passed; () if it is.
        stopped: Why not every candidate was tried; "" if all were.
        in_fp32: The attempt with all of it in FP32, if that failed.
        worse: Outputs that are less accurate than in plain FP16: names, and both errors.
        with_ports: The best attempt with the inputs and outputs that the user wants, if it is another one.
        ends: When the look for causes of a failure ends, too, by `time.monotonic`.
    """

    attempt: Attempt
    tried: tuple[Remark, ...]
    preferred: tuple[Remark, ...]
    stopped: str
    in_fp32: Attempt | None
    with_ports: Attempt | None
    shares: tuple[LatencyShare, ...]
    worse: tuple[tuple[str, float, float], ...] = ()
    ends: float = math.inf


@dataclass
class Attempts:
    """The attempts of a run so far, in their order, and its clock.

    Attributes:
        estimated: As `estimated_us`, of an attempt.
        build_s: Seconds in which the first attempt was built and run: a search leaves as many for its plan.
        start: When the clock began: after the first attempt, or before its search. `judged`: after both.
        failures: Candidates without an attempt, because one of their steps raised an exception.
    """

    workload: Workload
    attempts: list[Attempt]
    estimated: Callable[[Attempt], Estimate]
    build_s: float = 0.0
    failures: list[Remark] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False
    start: float = field(default_factory=time.monotonic)
    judged: float = field(default_factory=time.monotonic)

    @property
    def runs(self) -> bool:
        """True if an engine of this machine runs the attempts."""
        return self.workload.verifier.settings is not None

    @property
    def first_attempt(self) -> Attempt:
        return self.attempts[0]

    @property
    def latest_attempt(self) -> Attempt:
        return self.attempts[-1]

    @property
    def best_attempt(self) -> Attempt:
        """The best attempt so far, which the next candidates start from."""
        return self.attempts[best(self.attempts, self.latencies(), self.workload.job.latency_tolerance)]

    @property
    def passed(self) -> bool:
        return any(not attempt.failed for attempt in self.attempts)

    @property
    def deadline(self) -> float:
        """When candidates end, by `time.monotonic`; a minute after the first attempt once a result passes."""
        end = self.start + self.workload.job.request.repair_seconds
        return min(end, self.judged + AFFORDED_S) if self.passed else end

    @property
    def grace(self) -> float:
        """Seconds after the deadline in which the check of a candidate may end."""
        return GRACE * self.workload.job.request.repair_seconds

    @property
    def plain_outputs(self) -> dict[str, OutputError]:
        """Errors of the outputs in plain FP16: measured where engines run, else emulated; {} if one fails.

        Of several forms, such as the original and its nodes in another operator set, the largest error.
        """
        forms = [attempt for attempt in self.attempts if attempt.is_plain]
        checks = [*([] if self.runs else [self.workload.plain]), *(form.arithmetic for form in forms)]
        plain = [check for check in checks if check is not None and check.value is None]
        passing = all(output.passed for check in plain for output in check.outputs)
        if not plain or len(plain) < len(checks) or not passing or any(form.failed for form in forms):
            return {}
        errors = dict[str, OutputError]()
        for name, error in (row for check in plain for row in output_errors(check).items()):
            errors[name] = max(error, errors.get(name, error))
        return errors

    @property
    def plain_error(self) -> float:
        """The largest error of an output in plain FP16; infinite if that is unknown, or fails."""
        return max((error.worst for error in self.plain_outputs.values()), default=math.inf)

    def worse_outputs(self, attempt: Attempt) -> list[tuple[str, float, float]]:
        """Outputs that are less accurate than in plain FP16, where that passes: names, and both errors."""
        rows = self._beside_plain(attempt)
        return [(name, own.worst, plain.worst) for name, own, plain in rows if own.is_worse(plain)]

    def _beside_plain(self, attempt: Attempt) -> list[tuple[str, OutputError, OutputError]]:
        """The error of each output beside plain FP16's; () for a form of plain FP16 itself."""
        check, plain = attempt.arithmetic, self.plain_outputs
        errors = {} if check is None or attempt.is_plain else output_errors(check)
        return [(name, errors[name], plain[name]) for name in errors if name in plain]

    def worse_than_plain(self, attempt: Attempt) -> bool:
        """True if plain FP16 may replace a result that has a larger error on an output, by chance or not."""
        job = self.workload.job
        larger = any(own.is_larger(plain) for _, own, plain in self._beside_plain(attempt))
        return job.may_drop_optional_fp32 and job.limit is None and larger

    def slower_than_plain(self, attempt: Attempt) -> bool:
        """True, without an engine, if recorded costs are higher than plain FP16's, where that passes.

        A pass that repairs a known defect, which no emulation has, stays.
        """
        if self.runs or not self.plain_outputs or not self.workload.job.may_drop_optional_fp32:
            return False
        plain = {step.name for step in PRESETS[PLAIN].steps}
        if {quirk.repairing_pass for quirk, _ in attempt.repair_facts.defects} - plain - {""}:
            return False
        costs = self.estimated(attempt)
        return costs.planned > (1.0 + NOISE) * costs.plain

    def latencies(self) -> list[float]:
        """Latencies of the attempts in us: measured on their engines, or else their recorded costs."""
        if self.runs:
            return [math.inf if (us := a.latency_us) is None else us for a in self.attempts]
        return [0.0] if len(self.attempts) == 1 else [self.estimated(a).planned for a in self.attempts]

    def selection(self) -> Selection:
        """The best attempt, and how it was found."""
        latencies, wanted = self._timed_in_turn(), self.workload.job.precision.io
        at = self._chosen(latencies)
        chosen, failed = self.attempts[at], [a for a in self.attempts if a.failed]
        earlier = next((index for index, a in enumerate(self.attempts) if not a.failed), at)
        fp32 = [a for a in failed if a.candidate.precision.precision == "fp32"]
        asked = [a for a in self.attempts if a.plan is not None and a.plan.io == wanted]
        return Selection(
            chosen,
            tuple(self._tried(latencies)),
            () if earlier == at else self._preferred(at, earlier, latencies),
            self.stopped if chosen.failed or self.interrupted else "",
            min(fp32, key=lambda a: a.error, default=None),
            None if chosen in asked else min(asked, key=lambda a: a.error, default=None),
            tuple(self._shares(at, latencies)),
            tuple(self.worse_outputs(chosen)) if not chosen.failed else (),
            self.deadline + self.grace,
        )

    def _chosen(self, latencies: Sequence[float]) -> int:
        """The best attempt; one as close as plain FP16 if it is less accurate though nothing was wrong."""
        at = best(self.attempts, latencies, self.workload.job.latency_tolerance)
        if self.attempts[at].excuse == "as-fp32":  # which excuses what is no worse, and may not replace it
            names = [{check.name for check in attempt.failed} for attempt in self.attempts]
            fair = [index for index, failed in enumerate(names) if failed <= {*ARITHMETIC}]
            nearest = min(fair, key=lambda index: self.attempts[index].relative_l2, default=at)
            at = nearest if self.attempts[nearest].failed else at
        closer = [n for n, a in enumerate(self.attempts) if not (a.failed or self.worse_than_plain(a))]
        if not closer or at in closer:
            return at
        nearest = min(closer, key=lambda index: latencies[index])
        pairs = zip(self.attempts, latencies, strict=True)
        plain = next((us for attempt, us in pairs if attempt.candidate.name == "plain FP16"), 0.0)
        limit = max((1.0 + MOST_FOR_PLAIN) * latencies[at], plain)
        return nearest if latencies[nearest] <= limit else at

    def _timed_in_turn(self) -> list[float]:
        """The latencies, where those near the fastest are timed again in turn.

        Timed in turn, each engine finds another one's weights in the GPU's cache, and is slower than by
        itself. The others' latencies are scaled by the slowdown of the fastest.
        """
        latencies = self.latencies()
        within = max(RETIME_WITHIN, 1.0 + self.workload.job.latency_tolerance)
        passing = {at: attempt.engine for at, attempt in enumerate(self.attempts) if not attempt.failed}
        fastest = min(passing, key=lambda at: latencies[at], default=0)
        alone = latencies[fastest]
        near = {at: engine for at, engine in passing.items() if engine and latencies[at] <= within * alone}
        if len(near) < 2 or not self.runs:
            return latencies
        try:
            for at, us in zip(near, self.workload.verifier.timed_in_turn([*near.values()]), strict=True):
                latencies[at] = latencies[at] if us is None else us
            for at in passing.keys() - near.keys():
                latencies[at] *= latencies[fastest] / alone
        except KeyboardInterrupt:
            interrupt_handled()
            self.interrupted |= not self.stopped
            self.stopped = self.stopped or "interrupted while the best attempts were timed"
        return latencies

    def _shares(self, at: int, latencies: Sequence[float]) -> Iterator[LatencyShare]:
        """Shares of FP32's and plain FP16's latency: measured where their engines ran, or else estimated.

        Recorded costs of less than a kernel's time say nothing.
        """
        chosen = self.attempts[at]
        if chosen.plan is None or chosen.all_fp32 or not self.workload.verifier.samples:
            return
        costs = self.estimated(chosen)
        for name, estimate in (("FP32", costs.fp32), ("plain FP16", costs.plain)):
            pairs = zip(self.attempts, latencies, strict=True)
            us = next((us for attempt, us in pairs if attempt.candidate.name == name), math.inf)
            if self.runs and math.isfinite(us):
                yield LatencyShare(name, latencies[at] / us, measured=True)
            elif min(costs.planned, estimate) >= KERNEL_US:
                yield LatencyShare(name, costs.planned / estimate, measured=False)

    def _tried(self, latencies: Sequence[float]) -> Iterator[Remark]:
        if len(self.attempts) == 1 and not self.stopped and not self.failures:
            return
        for attempt, latency in zip(self.attempts, latencies, strict=True):
            failed = tuple(replace(check, rounds=(), pictures=()) for check in attempt.failed)
            us = None if attempt.latency_us is None else latency
            yield from remark("tried", difference=attempt.candidate.difference, failed=failed, us=us)
        yield from (*self.failures, *(remark("reason", reason=self.stopped) if self.stopped else ()))

    def _preferred(self, at: int, earlier: int, latencies: Sequence[float]) -> tuple[Remark]:
        chosen, other = self.attempts[at], self.attempts[earlier]
        return remark(
            "preferred",
            difference=chosen.candidate.difference,
            latencies=(latencies[at], latencies[earlier]),
            errors=(chosen.relative_l2, other.relative_l2),
            ran_on=next((check.device for check in chosen.checks if check.name == "run"), None),
        )
