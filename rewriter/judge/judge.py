"""Compares the outputs of builds with those of the original."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rewriter.ir.model import Model
from rewriter.judge.expected import Outputs, selects_rows
from rewriter.runtime.engines.protocol import EngineOutcome, Latency
from rewriter.runtime.figures.metrics import Metric, named
from rewriter.runtime.figures.outputs import (
    OutputComparison,
    OutputStatistics,
    compared_pairs,
    worst_of_samples,
)
from rewriter.runtime.figures.pictures import Picture, WorstOutputs
from rewriter.runtime.figures.probabilities import Probabilities, probabilities
from rewriter.runtime.figures.tolerances import RELATIVE_L2, Tolerance


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


@dataclass(frozen=True)
class Standard:
    """How close outputs have to be to the original's: to the user's tolerance, or to the precision's.

    `kinds` has outputs of the original that are probabilities, none if the user chose the measure. With
    `as_sets` the rows of the outputs may be in another order.
    """

    tolerance: Tolerance
    kinds: Mapping[str, Probabilities] = field(default_factory=dict)
    as_sets: bool = False

    @classmethod
    def of(
        cls, original: Model, default: Tolerance, asked: Tolerance | None = None, *, fair: bool = True
    ) -> Standard:
        """The standard for results of a model: the user's tolerance alone, if there is one.

        Args:
            fair: False if the user named the metric.
        """
        kinds = probabilities(original) if fair and asked is None else {}
        return cls(asked or default, kinds, selects_rows(original))


@dataclass(frozen=True)
class Weighed:
    """Outputs of one result in their worst samples, compared as in `Judged`."""

    comparisons: tuple[OutputComparison, ...]
    value: float
    allowed: float
    passed: bool
    worst: WorstOutputs


def weigh(
    expected: Iterable[Outputs],
    actual: Iterable[Outputs],
    standard: Standard,
    worst: WorstOutputs | None = None,
    build: int = 0,
) -> Weighed:
    """Compares outputs with the original's, sample by sample; the worst counts.

    Args:
        worst: Collects the figures of several builds; `build` is the number of this one.
    """
    worst = worst or WorstOutputs()
    tolerance = standard.tolerance
    metric, by_output = named(tolerance.metric), tolerance.metric == RELATIVE_L2
    rounds: list[tuple[OutputComparison, ...]] = []
    values = []
    for sample, (exact, found) in enumerate(zip(expected, actual, strict=True)):
        limit, kinds = tolerance.of_each_output, standard.kinds
        pairs = compared_pairs(exact, found, limit, as_sets=standard.as_sets, kinds=kinds)
        for one, pair in pairs:
            worst.add(one.name, pair, sample=sample, build=build)
        compared = tuple(one for one, _ in pairs)
        if not by_output:  # only outputs that are not finite fail by themselves
            compared = tuple(replace(c, note=c.note or f"judged by {tolerance.metric}") for c in compared)
        rounds.append(compared)
        values.append(_value(metric, exact, found, compared, tolerance))
    comparisons = worst_of_samples(rounds) if rounds else ()
    value = metric.worst_of(values)
    value = metric.failed if value is None else value
    allowed = max((c.tolerance for c in comparisons if by_output), default=tolerance.value)
    met = by_output or metric.meets(value, allowed)
    return Weighed(comparisons, value, allowed, met and all(c.passed for c in comparisons), worst)


def against(comparisons: Iterable[OutputComparison], *, passed: bool, default: float) -> str:
    """`0.002, within 0.005`: the error that is closest to its tolerance, or furthest beyond.

    Args:
        default: The tolerance where there are no outputs.
    """
    worst = max(comparisons, key=lambda one: (one.excess, one.relative_l2, one.tolerance), default=None)
    error, allowed = (0.0, default) if worst is None else (worst.relative_l2, worst.tolerance)
    relation = "within" if error <= allowed else "beyond" if passed else "NOT within"
    return f"{error:.2g}, {relation} {allowed:.2g}"


def fair_words(comparisons: Iterable[OutputComparison]) -> str:
    """What a summary adds where outputs are probabilities."""
    return "".join(f"; {one.fair_text}" for one in comparisons if one.fair_text)


def judge(expected: Iterable[Outputs], outcomes: Sequence[EngineOutcome], standard: Standard) -> Judged:
    """Compares every sample of every build with the original's outputs; the worst counts.

    Args:
        expected: The original's outputs in FP32 for each sample; iterated once for each build.
    """
    metric = named(standard.tolerance.metric)
    worst = WorstOutputs()
    weighed: list[Weighed] = []
    runs = []
    for outcome in outcomes:
        error = None
        if outcome.ran:
            found = (outcome.values(sample) for sample in range(len(outcome.outputs)))
            one = weigh(expected, found, standard, worst, outcome.build)
            weighed.append(one)
            error = one.value
        runs.append(BuildRun(outcome.build, outcome.status, outcome.problem, error, outcome.latency))
    errors = [run.error for run in runs if run.error is not None]
    return Judged(
        outputs=worst.statistics,
        comparisons=worst_of_samples([one.comparisons for one in weighed]) if weighed else (),
        builds=tuple(runs),
        error=metric.worst_of(errors),
        best=(max if metric.least else min)(errors, default=None),
        allowed=max((one.allowed for one in weighed), default=standard.tolerance.value),
        passed=bool(weighed) and all(o.ran for o in outcomes) and all(one.passed for one in weighed),
        pictures=worst.pictures,
    )


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
