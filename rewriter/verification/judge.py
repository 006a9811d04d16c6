"""Compares the outputs of builds with those of the original."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rewriter.engines.protocol import EngineOutcome, Latency
from rewriter.figures.metrics import Metric, named
from rewriter.figures.outputs import (
    OutputComparison,
    OutputStatistics,
    compare,
    worst_of_samples,
)
from rewriter.figures.pair import Pair
from rewriter.figures.pictures import Picture
from rewriter.figures.tolerances import RELATIVE_L2, Tolerance
from rewriter.figures.worst import WorstOutputs
from rewriter.verification.expected import Outputs


@dataclass(frozen=True)
class BuildRun:
    """One build of the fixed model, run over all samples.

    Attributes:
        status, problem: As in `engines.protocol.EngineOutcome`.
        error: The tolerance's metric, the worst over outputs and samples; None if it did not run.
    """

    number: int
    status: str
    problem: str
    error: float | None
    latency: Latency | None


@dataclass(frozen=True)
class Judged:
    """The verdict on all builds of one model.

    Attributes:
        outputs: Statistics of the worst sample and build of each output.
        comparisons: Each output against the tolerance, in its worst sample and build.
        error: The tolerance's metric in the worst build; `best`: in the best build; None if none ran.
        allowed: The limit on `error`: above the tolerance where rows were matched as sets.
        passed: True if all builds ran, and all outputs are within the tolerance.
        pictures: Of the worst samples of outputs that look like images.
    """

    outputs: tuple[OutputStatistics, ...]
    comparisons: tuple[OutputComparison, ...]
    builds: tuple[BuildRun, ...]
    error: float | None
    best: float | None
    allowed: float
    passed: bool
    pictures: tuple[Picture, ...] = ()


def judge(
    expected: Iterable[Outputs],
    outcomes: Sequence[EngineOutcome],
    tolerance: Tolerance,
    *,
    as_sets: bool = False,
) -> Judged:
    """Compares every sample of every build with the original's outputs; the worst counts.

    Args:
        expected: The original's outputs in FP32 for each sample; iterated once for each build.
        as_sets: True if the rows of the outputs may be in another order.
    """
    metric = named(tolerance.metric)
    worst = WorstOutputs()
    rounds: list[tuple[OutputComparison, ...]] = []
    runs = []
    for outcome in outcomes:
        values = []
        for sample, exact in enumerate(expected) if outcome.ran else ():
            actual = outcome.values(sample)
            rounds.append(_compared(exact, actual, tolerance, as_sets))
            values.append(_value(metric, exact, actual, rounds[-1], tolerance))
            for name in exact:
                pair = Pair(exact[name], actual[name])
                worst.add(name, pair, sample=sample, build=outcome.build)
        error = metric.worst_of(values)
        runs.append(BuildRun(outcome.build, outcome.status, outcome.problem, error, outcome.latency))
    comparisons = worst_of_samples(rounds) if rounds else ()
    errors = [run.error for run in runs if run.error is not None]
    error = metric.worst_of(errors)
    by_output = tolerance.metric == RELATIVE_L2
    allowed = max((c.tolerance for c in comparisons if by_output), default=tolerance.value)
    return Judged(
        outputs=worst.statistics,
        comparisons=comparisons,
        builds=tuple(runs),
        error=error,
        best=(max if metric.least else min)(errors, default=None),
        allowed=allowed,
        passed=error is not None
        and metric.meets(error, allowed)
        and all(o.ran for o in outcomes)
        and all(c.passed for c in comparisons),
        pictures=worst.pictures,
    )


def _compared(
    expected: Outputs, actual: Outputs, tolerance: Tolerance, as_sets: bool
) -> tuple[OutputComparison, ...]:
    """Compares each output with the tolerance; under another metric, only non-finite outputs fail."""
    found = compare(expected, actual, tolerance.of_each_output, as_sets=as_sets)
    if tolerance.metric == RELATIVE_L2:
        return found
    return tuple(replace(one, note=one.note or f"judged by {tolerance.metric}") for one in found)


def _value(
    metric: Metric,
    expected: Outputs,
    actual: Outputs,
    compared: Sequence[OutputComparison],
    tolerance: Tolerance,
) -> float:
    """Returns the metric of the worst output; the worst possible value if an output has another shape."""
    if tolerance.metric == RELATIVE_L2:  # as compared: rows of detections may be matched
        return max((c.relative_l2 if c.finite else metric.failed for c in compared), default=0.0)
    if any(expected[name].shape != actual[name].shape for name in expected):
        return metric.failed
    return metric.worst(expected, actual)
