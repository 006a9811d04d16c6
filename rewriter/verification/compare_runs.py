"""Compares the outputs of results with the original's, and judges builds that ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rewriter.ir.model import Model
from rewriter.runtime.engines.protocol import EngineOutcome, Latency
from rewriter.runtime.metrics import detections
from rewriter.runtime.metrics.detections import Detections
from rewriter.runtime.metrics.metrics import Metric, named
from rewriter.runtime.metrics.outputs import OutputComparison, compare, worst_of_samples
from rewriter.runtime.metrics.parts import Parts
from rewriter.runtime.metrics.pictures import WorstOutputs
from rewriter.runtime.metrics.probabilities import Probabilities, probabilities
from rewriter.runtime.metrics.tolerances import RELATIVE_L2, Tolerance
from rewriter.verification.expected import Outputs, selected_axes
from rewriter.verification.verdict import Check, MetricValue, log_lines, remark


@dataclass(frozen=True)
class BuildRun:
    """One build of the fixed model, run over all samples.

    `error` is the tolerance's metric, the worst over outputs and samples; None if it did not run.
    """

    number: int
    status: str
    problem: str
    error: float | None
    latency: Latency | None


@dataclass(frozen=True)
class RunComparison:
    """Results of one model, compared with the original's over all samples.

    Attributes:
        rounds: The outputs of each sample, build by build.
        error: The tolerance's metric in the worst build; None if none ran.
        allowed: The limit on `error`: above the tolerance where rows were matched as sets.
        passed: True if all builds ran, and all outputs are within the tolerance.
        detections: The boxes that the outputs hold, where the original's are recognised as boxes.
    """

    rounds: tuple[tuple[OutputComparison, ...], ...] = ()
    error: float | None = None
    allowed: float = 0.0
    passed: bool = False
    worst: WorstOutputs = field(default_factory=WorstOutputs)
    builds: tuple[BuildRun, ...] = ()
    detections: Detections | None = None

    @cached_property
    def comparisons(self) -> tuple[OutputComparison, ...]:
        """Each output in its worst sample and build."""
        return worst_of_samples(self.rounds)

    def value(self, tolerance: Tolerance) -> MetricValue | None:
        """The value of a metric that judges all outputs together; None for relative L2, or if none ran."""
        if self.error is None or tolerance.metric == RELATIVE_L2:
            return None
        met = named(tolerance.metric).meets(self.error, self.allowed)
        return MetricValue(tolerance.metric, self.error, self.allowed, met)

    def check(self, name: str, passed: bool, tolerance: Tolerance, **more: Any) -> Check:
        """A check with these figures."""
        more |= {"statistics": self.worst.statistics, "pictures": self.worst.pictures}
        more |= {"value": self.value(tolerance), "rounds": self.rounds, "detections": self.detections}
        return Check(name, passed, more.pop("remarks", ()), self.comparisons, **more)


@dataclass(frozen=True)
class Standard:
    """How close outputs have to be to the original's: to the user's tolerance, or to the precision's.

    `kinds` has outputs of the original that are probabilities, or rounded numbers: only these if the user
    chose the measure. The rows of the outputs in `as_sets`, on these axes, may be in another order.
    `asked`: the tolerance is the user's own.
    """

    tolerance: Tolerance
    kinds: Mapping[str, Probabilities] = field(default_factory=dict)
    as_sets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    asked: bool = False

    @classmethod
    def of(
        cls, original: Model, default: Tolerance, asked: Tolerance | None = None, *, fair: bool = True
    ) -> Standard:
        """The standard for results of a model: only the user's tolerance, if there is one.

        Args:
            fair: False if the user named the metric.
        """
        kinds = probabilities(original)
        if not fair or asked is not None:
            kinds = {name: kind for name, kind in kinds.items() if kind.rounded}
        return cls(asked or default, kinds, selected_axes(original), asked is not None)


def compare_outputs(
    expected: Sequence[Outputs],
    actual: Iterable[Outputs],
    standard: Standard,
    worst: WorstOutputs | None = None,
    build: int = 0,
    parts: Parts | None = None,
) -> RunComparison:
    """Compares outputs of one result with the original's, sample by sample; the worst counts.

    Args:
        worst: Collects the figures of several builds; `build` is the number of this one.
        parts: Of the outputs, which relative L2 judges, too.
    """
    worst, layout = worst or WorstOutputs(), detections.layout_of(expected) if parts is not None else None
    tolerance, boxes = standard.tolerance, list[Detections | None]()
    metric, by_output = named(tolerance.metric), tolerance.metric == RELATIVE_L2
    own = parts if by_output else None
    rounds: list[tuple[OutputComparison, ...]] = []
    values = []
    for sample, (exact, outputs) in enumerate(zip(expected, actual, strict=True)):
        limit, kinds = tolerance.value if by_output else math.inf, standard.kinds
        pairs = compare(exact, outputs, limit, as_sets=standard.as_sets, kinds=kinds, parts=own)
        for output, pair in pairs:
            if not output.of:
                worst.add(output.name, pair, sample=sample, build=build)
        compared = tuple(output for output, _ in pairs)
        if not by_output:  # only outputs that are not finite fail by themselves
            compared = tuple(replace(c, note=c.note or f"judged by {tolerance.metric}") for c in compared)
        rounds.append(compared)
        values.append(_value(metric, exact, outputs, compared, tolerance))
        boxes += [detections.compared(layout, exact, outputs)] if layout is not None else ()
    comparisons = worst_of_samples(rounds)
    value = metric.worst_of(values)
    value = metric.failed if value is None else value
    limits = (c.tolerance for c in comparisons if by_output and not c.of)
    allowed = max(limits, default=tolerance.value)
    met = by_output or metric.meets(value, allowed)
    found = sum((b for b in boxes if b is not None), Detections()) if boxes and None not in boxes else None
    right = found is None or found.passed or standard.asked or not by_output
    passed = met and right and all(c.passed for c in comparisons)
    return RunComparison(tuple(rounds), value, allowed, passed, worst, detections=found)


def run_check(
    expected: Sequence[Outputs],
    outcomes: Sequence[EngineOutcome],
    standard: Standard,
    seconds: float = 0.0,
    parts: Parts | None = None,
) -> tuple[Check, RunComparison]:
    """Compares every sample of every build with the original's outputs; the worst counts.

    Args:
        expected: The original's outputs in FP32 for each sample.

    Returns:
        The check of the builds, and their figures.
    """
    metric, worst = named(standard.tolerance.metric), WorstOutputs()
    weighed, runs, tolerance = list[RunComparison](), list[BuildRun](), standard.tolerance
    for outcome in outcomes:
        error = None
        if outcome.ran:
            values = (outcome.values(sample) for sample in range(len(outcome.outputs)))
            weighed.append(compare_outputs(expected, values, standard, worst, outcome.build, parts))
            error = weighed[-1].error
        runs.append(BuildRun(outcome.build, outcome.status, outcome.problem, error, outcome.latency))
    errors = [run.error for run in runs if run.error is not None]
    judged = RunComparison(
        tuple(outputs for run in weighed for outputs in run.rounds),
        metric.worst_of(errors),
        max((run.allowed for run in weighed), default=tolerance.value),
        bool(weighed) and all(o.ran for o in outcomes) and all(run.passed for run in weighed),
        worst,
        tuple(runs),
        min(
            (run.detections for run in weighed if run.detections),
            key=lambda d: d.found - d.boxes,
            default=None,
        ),
    )
    failed = [outcome for outcome in outcomes if not outcome.ran]
    details = [f"allowed: {tolerance.source}"]
    for outcome in failed:
        details.append(f"build {outcome.build}: {outcome.status}: {outcome.problem}")
        details += log_lines(outcome.log) if outcome.status in ("crashed", "timeout") else ()
        details += [f"what to do: {outcome.hint}"] if outcome.hint else []
    where = next((outcome for outcome in outcomes if outcome.ran), outcomes[0])
    least, most = (min(errors), max(errors)) if errors and len(outcomes) > 1 else (None, None)
    builds = {"least": least, "most": most, "builds": len(outcomes), "missing": len(failed) or None}
    check = judged.check(
        "run",
        judged.passed,
        tolerance,
        remarks=remark("ran", library=where.library, **builds)
        if errors
        else remark("ran-not", reason=outcomes[0].problem),
        details=tuple(details),
        seconds=seconds,
        device=where.device,
        advice=next((outcome.hint for outcome in failed if outcome.hint), ""),
    )
    return check, judged


def _value(
    metric: Metric,
    expected: Outputs,
    actual: Outputs,
    compared: Sequence[OutputComparison],
    tolerance: Tolerance,
) -> float:
    """Returns the metric of the worst output; the worst possible value if an output has another shape."""
    if tolerance.metric == RELATIVE_L2:  # as compared: rows of detections may be matched
        return max((c.relative_l2 if c.finite else metric.failed for c in compared if c.counts), default=0.0)
    if any(expected[name].shape != actual[name].shape for name in expected):
        return metric.failed
    return metric.worst(expected, actual)
