"""From outputs in files to figures and a verdict on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rewriter.engines.protocol import Outcome
from rewriter.figures.compare import OutputComparison, compare, worst
from rewriter.figures.metrics import Metric, named
from rewriter.figures.statistics import OutputStatistics, statistics, worst_of
from rewriter.figures.tolerances import Tolerance
from rewriter.model import Array
from rewriter.verification.result import BuildRun

Outputs = Mapping[str, Array]


class Truth(Protocol):
    """What the original gives in FP32.

    Attributes:
        selects_rows: Whether rows of the outputs may come in another order.
    """

    @property
    def selects_rows(self) -> bool: ...

    def __len__(self) -> int:
        """How many samples."""
        ...

    def expected(self, sample: int) -> Outputs: ...


@dataclass(frozen=True)
class Known:
    """A `Truth` in memory."""

    outputs: Sequence[Outputs]
    selects_rows: bool

    def __len__(self) -> int:
        return len(self.outputs)

    def expected(self, sample: int) -> Outputs:
        return self.outputs[sample]


@dataclass(frozen=True)
class Judged:
    """What was found out about the builds of one model.

    Attributes:
        outputs: Figures of the worst sample and build of each output.
        comparisons: What the tolerance says of each, in its worst sample and build.
        error: The tolerance's metric in the worst build that ran; `best`: in the best. None if none ran.
        allowed: What `error` is held to: more than the tolerance where rows were matched as sets.
        passed: All builds ran, and all outputs are within the tolerance.
    """

    outputs: tuple[OutputStatistics, ...]
    comparisons: tuple[OutputComparison, ...]
    builds: tuple[BuildRun, ...]
    error: float | None
    best: float | None
    allowed: float
    passed: bool


def judge(truth: Truth, outcomes: Sequence[Outcome], tolerance: Tolerance) -> Judged:
    """Compare every sample of every build with the original's outputs; the worst counts."""
    measure = named(tolerance.metric)
    figures: dict[str, list[OutputStatistics]] = {}
    rounds: list[tuple[OutputComparison, ...]] = []
    runs = []
    for outcome in outcomes:
        values = []
        for sample in range(len(truth)) if outcome.ran else ():
            expected, actual = truth.expected(sample), outcome.values(sample)
            rounds.append(_compared(truth, expected, actual, tolerance))
            values.append(_value(measure, expected, actual, rounds[-1], tolerance))
            for name in expected:
                if expected[name].shape == actual[name].shape:
                    one = statistics(name, expected[name], actual[name], sample=sample, build=outcome.build)
                    figures.setdefault(name, []).append(one)
        error = _worst(measure, values)
        runs.append(BuildRun(outcome.build, outcome.status, outcome.problem, error, outcome.latency))
    comparisons = worst(rounds) if rounds else ()
    errors = [run.error for run in runs if run.error is not None]
    error = _worst(measure, errors)
    within = error is not None and (
        tolerance.metric == "relative-l2" or measure.meets(error, tolerance.value)
    )
    return Judged(
        outputs=tuple(map(worst_of, figures.values())),
        comparisons=comparisons,
        builds=tuple(runs),
        error=error,
        best=(max if measure.least else min)(errors) if errors else None,
        allowed=max((c.tolerance for c in comparisons), default=tolerance.value)
        if tolerance.metric == "relative-l2"
        else tolerance.value,
        passed=within and all(o.ran for o in outcomes) and all(c.passed for c in comparisons),
    )


def _value(
    measure: Metric,
    expected: Outputs,
    actual: Outputs,
    compared: Sequence[OutputComparison],
    tolerance: Tolerance,
) -> float:
    """The metric of the worst output; the worst there is if an output has another shape."""
    if tolerance.metric == "relative-l2":  # as compared: rows of detections may be matched
        return max((c.relative_l2 if c.finite else math.inf for c in compared), default=0.0)
    if any(expected[name].shape != actual[name].shape for name in expected):
        return -math.inf if measure.least else math.inf
    return measure.worst(expected, actual)


def _worst(measure: Metric, values: Sequence[float]) -> float | None:
    return (min if measure.least else max)(values) if values else None


def _compared(
    truth: Truth, expected: Outputs, actual: Outputs, tolerance: Tolerance
) -> tuple[OutputComparison, ...]:
    """Each output against the tolerance; under another metric, only what is not finite fails here."""
    if tolerance.metric == "relative-l2":
        return compare(expected, actual, tolerance.value, as_sets=truth.selects_rows)
    rows = compare(expected, actual, math.inf)
    return tuple(replace(row, note=row.note or f"held to {tolerance.metric}") for row in rows)
