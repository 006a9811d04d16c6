"""Compares the outputs of a model with the original's, by name."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.metrics.pairwise_error import Pair, degenerate, is_float
from rewriter.runtime.metrics.parts import Part, Parts, chance, flipped
from rewriter.runtime.metrics.probabilities import (
    GRAIN,
    NOTHING,
    PER_TOLERANCE,
    Probabilities,
    ProbabilityError,
    probability_error,
    same_best,
)
from rewriter.runtime.metrics.row_errors import SET_FACTOR, axis_of_rows, matched, row_groups
from rewriter.runtime.metrics.tolerances import USABLE

ROUNDING_NOISE = "rounding noise"
"""Note of a part whose error is FP16's smallest step, or FP32's rounding of the output's largest value."""

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True)
class Allowance:
    """Why an output may be further from the original than the `usual` tolerance."""

    reason: Literal["conditioning", "as-fp32", "as-set", "as-original"]
    usual: float
    # the error that the network has by itself: when its own sums run in another order, in its FP32 engine, or
    # against the model that it was made from. 0 for rows that are matched as a set
    measured: float = 0.0


@dataclass(frozen=True)
class OutputComparison:
    """The verdict on one output or on a part of one, against a tolerance."""

    name: str
    relative_l2: float  # ||a - b|| / ||b|| for floats and rounded ones; else the share of differing elements
    max_abs: float
    cosine: float
    finite: bool  # True if NaN and infinities are where the original has them
    tolerance: float  # largest `relative_l2` that passes. `allowance`: why it is not the usual one
    note: str = ""  # the way of comparison if it was not element by element, e.g. as a set of detections
    # the fair measure of an output of probabilities, which may excuse a larger `relative_l2`
    probability: ProbabilityError | None = None
    # share of rows with the same best class, if the output holds scores; None if it does not
    same_best: float | None = None
    unit: str = "relative L2"  # of `relative_l2`
    # the output of a part, whose name says which part it is; "" for an output. `part`: that part
    of: str = ""
    chance: float = 1.0  # of a part, as `parts.chance` says; its `tolerance` is for its number of entries
    part: Part | None = None
    allowance: Allowance | None = None
    carriers: float = 0.0  # as `Pair.carriers`; 0 for parts

    @property
    def output(self) -> str:
        """Name of the output."""
        return self.of or self.name

    @property
    def usual(self) -> float:
        """The tolerance without an allowance."""
        return self.tolerance if self.allowance is None else self.allowance.usual

    @property
    def unusable(self) -> bool:
        """True if it or the original is beyond `USABLE` from the model that the original was made from."""
        if self.allowance is None or self.allowance.reason != "as-original":
            return False
        fair = self.probability
        nothing = fair is not None and (fair.empty or fair.difference <= GRAIN)
        return max(self.allowance.measured, self.relative_l2) > USABLE * self.chance and not nothing

    @property
    def counts(self) -> bool:
        """True for outputs, and parts that fail: a part that passes may be allowed more than its output."""
        return not self.of or not self.passed

    @property
    def passed(self) -> bool:
        """True within the tolerance, or if it is an output of probabilities that are as the original's."""
        fair = self.probability is not None and self.probability.passed and self.relative_to_use <= 1.0
        return self.finite and (self.relative_l2 <= self.tolerance or fair)

    @property
    def relative_to_use(self) -> float:
        """The relative error in units of `USABLE`; 0 for probabilities that FP32 does not resolve.

        Nor does it count for classes, if the network's own FP32 engine moves single rows as far.
        """
        fair = self.probability
        if fair is None:
            return self.relative_l2 / USABLE
        single = self.of and fair.mean is not None and fair.difference <= fair.of_fp32
        return 0.0 if single or fair.empty or fair.difference <= GRAIN else self.relative_l2 / USABLE

    @property
    def excess(self) -> float:
        """The error in units of what is allowed: above 1 it fails."""
        if not self.finite or (not self.tolerance and self.relative_l2):
            return math.inf
        relative = self.relative_l2 / self.tolerance if self.tolerance else 0.0
        fair = self.probability
        if fair is None or not fair.fair:
            return relative
        return min(relative, max(fair.excess, self.relative_to_use))


@dataclass(frozen=True)
class OutputStatistics:
    """The errors of one output in one sample of one build, element by element; floats in the output's unit.

    Elements that are not finite in the original are left out of all figures but `not_finite`.
    """

    name: str
    # sample, build: numbers from 0
    sample: int
    build: int
    not_finite: int  # number of elements that are NaN or infinite on one side only, or differ in it
    # relative_l2, max_abs, psnr: as in `Pair`
    relative_l2: float
    max_abs: float
    # index of the largest difference, where the original has `expected` and the fixed model `actual`
    at: tuple[int, ...]
    expected: float
    actual: float
    psnr: float
    percentiles: Mapping[str, float]  # absolute error that this share (in %) of the elements does not exceed

    @property
    def badness(self) -> tuple[int, float]:
        """Orders the samples and builds of one output, the worst last."""
        return self.not_finite, self.relative_l2


def compare(
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    # largest relative L2 error of a float output, and largest share of differing elements of any other output
    tolerance: float,
    *,
    # axes of the rows of outputs: match rows of finite outputs that fail, and compare them again, for models
    # whose TopK orders detections. 1 in [batch, rows] or [batch, rows, features], 0 in [rows] or
    # [rows, features]
    as_sets: Mapping[str, Collection[int]] | None = None,
    # outputs that are probabilities: they pass by these, too
    kinds: Mapping[str, Probabilities] | None = None,
    # of each output that is judged by its parts, too; slices of the rows of `as_sets` do not count
    parts: Parts | None = None,
) -> tuple[tuple[OutputComparison, Pair], ...]:
    """Compares outputs by name, element by element, and then their parts.

    Returns:
        Each output and part with the arrays that were compared: rows are in matching order where they are a
        set.
    """
    kinds, parts, as_sets = kinds or {}, parts or {}, as_sets or {}
    pairs = {
        name: Pair(one, _with_masks(one, actual[name], parts.get(name, ()))) for name, one in expected.items()
    }

    def judged(name: str, limit: float, note: str = "") -> tuple[OutputComparison, ...]:
        rounded = name in kinds and kinds[name].rounded
        whole = _compared(name, replace(pairs[name]), limit, note, rounded=rounded)
        rows = axis_of_rows(name, expected, as_sets.get(name, ()))
        axis = 1 if rows is None else rows
        found = [part for part in parts.get(name, ()) if not (name in as_sets and axis in part.axes)]
        own = _parts(whole, pairs[name], found, kinds.get(name)) if name in parts else ()
        return whole, *own

    outputs = {name: judged(name, tolerance) for name in pairs}
    for axis, names in row_groups(expected, actual, as_sets):
        if not all(output.passed for name in names for output in outputs[name]):
            for name, pair, note in matched(names, expected, actual, axis):
                pairs[name] = pair
                allowance = Allowance("as-set", tolerance)
                sets = judged(name, SET_FACTOR * tolerance, note)
                outputs[name] = tuple(replace(output, allowance=allowance) for output in sets)
    for name, kind in kinds.items():
        whole, *own = outputs[name]
        if whole.finite and not (kind.partly or kind.rounded):
            whole = _with_probabilities(whole, kind, Pair(expected[name], actual[name]), tolerance)
        outputs[name] = whole, *own
    return tuple((output, pairs[name]) for name, ones in outputs.items() for output in ones)


def _with_masks(expected: Array, actual: Array, parts: Sequence[Part]) -> Array:
    """`actual` with the original's masks in place of infinities of their sign: FP16 has no larger number."""
    floor = min((part.mask for part in parts), default=math.inf)
    if floor == math.inf or expected.shape != actual.shape:
        return actual
    masks = np.isinf(actual) & np.isfinite(expected) & (np.sign(actual) * expected >= floor)
    return np.where(masks, expected, actual) if masks.any() else actual


def _with_probabilities(
    whole: OutputComparison, kind: Probabilities, pair: Pair, tolerance: float
) -> OutputComparison:
    if kind.raw:
        return replace(whole, same_best=same_best(pair))
    if not math.isfinite(tolerance):
        return whole
    return replace(whole, probability=probability_error(kind, pair, tolerance))


def _parts(
    whole: OutputComparison, pair: Pair, parts: Sequence[Part], kind: Probabilities | None
) -> Iterator[OutputComparison]:
    """The parts of an output in one sample, each as an output of its own."""
    if not is_float(pair.expected):
        yield from _slices(whole, pair, kind is not None and kind.rounded)
        return
    if kind is not None and (kind.raw or kind.logarithms or not math.isfinite(whole.tolerance)):
        kind = None
    rows = None
    if parts and whole.finite and kind is not None and kind.classes is not None:
        rows = probability_error(kind, pair, whole.tolerance)
    alone = kind is not None and rows is None and not kind.partly
    for part in parts:
        scores = kind if kind is not None and (part.in_unit or not kind.partly) else None
        places = any((axis or 0) > 1 for axis in part.axes)
        if not (alone and pair.expected.ndim == 4 and places):  # places in a map are no parts
            yield _part(whole, pair, part, scores, rows)


def _part(
    whole: OutputComparison,
    pair: Pair,
    part: Part,
    scores: Probabilities | None,
    rows: ProbabilityError | None,
) -> OutputComparison:
    """One part; scores pass by their differences, too, and scores of classes by the difference of `rows`."""
    name = f"{whole.name} ({part})"
    if not whole.finite:
        return replace(whole, name=name, of=whole.name, part=part)
    own = part.pair(pair)
    error, few = part.error(own), chance(own.expected.size)
    if part.axis is None:
        error = max(error, part.unmasked(pair))
    if scores is not None and rows is None:
        allowed = PER_TOLERANCE * whole.tolerance
        empty = not scores.partly and float(np.max(own.expected, initial=0.0)) < NOTHING
        rows = ProbabilityError(scores.reason, own.max_abs, None, allowed, None, True, empty=empty)
    limit = max(whole.tolerance, USABLE) if part.gradual else whole.tolerance
    note = ROUNDING_NOISE if error == 0.0 < own.max_abs else ""
    one = OutputComparison(name, error, own.max_abs, own.cosine, True, few * limit, note, probability=rows)
    return replace(one, of=whole.name, chance=few, part=part)


def _slices(whole: OutputComparison, pair: Pair, rounded: bool) -> Iterator[OutputComparison]:
    """The worst slice along each axis of an output of Booleans or whole numbers."""
    for axis in range(pair.expected.ndim):
        worst, share = flipped(axis, pair.expected, pair.actual, rounded) if pair.same_shape else (0, 1.0)
        name, limit = f"{whole.name} (slices of axis {axis})", max(whole.tolerance, USABLE)
        unit = "error" if rounded else "share of its entries that are not 0"
        note = f"slice {worst} of axis {axis} ({unit})"
        yield replace(whole, name=name, relative_l2=share, tolerance=limit, note=note, of=whole.name)


def _compared(
    name: str, pair: Pair, tolerance: float, note: str = "", *, rounded: bool = False
) -> OutputComparison:
    expected, actual = pair.expected, pair.actual
    if not pair.same_shape:
        note = f"shape {actual.shape}, expected {expected.shape}"
    elif is_float(expected):
        note = "; ".join(filter(None, (note, degenerate(expected))))
    elif not (rounded and pair.relative_l2 < _share(pair)):
        share = _share(pair)
        unit = "share of differing elements"
        note = "; ".join(filter(None, (note, unit)))
        shares = (share, share, 1.0 - share, True)
        own = share * expected.size / 4.0  # a count varies twice as much as the root of a sum
        return OutputComparison(name, *shares, tolerance, note, unit=unit, carriers=own)
    figures = (pair.relative_l2, pair.max_abs, pair.cosine, pair.finite)
    return OutputComparison(name, *figures, tolerance, note, carriers=pair.carriers)


def _share(pair: Pair) -> float:
    return float(np.mean(pair.expected != pair.actual)) if pair.expected.size else 0.0


def worst_of_samples(rounds: Sequence[Sequence[OutputComparison]]) -> tuple[OutputComparison, ...]:
    """The worst comparison of each output; one round for each sample and build."""
    by_output = zip(*rounds, strict=True)
    return tuple(max(same, key=lambda c: (not c.finite, not c.passed, c.relative_l2)) for same in by_output)


def statistics(name: str, pair: Pair, *, sample: int = 0, build: int = 0) -> OutputStatistics:
    """All figures of an output of any numeric type or bool; the shapes of the pair are equal."""
    expected, actual = pair.wide
    errors = np.zeros(expected.shape)
    errors[pair.usable] = pair.differences
    errors[pair.broken] = np.inf
    at = tuple(int(i) for i in np.unravel_index(np.argmax(errors), errors.shape)) if errors.size else ()
    shares = np.percentile(pair.differences, PERCENTILES).tolist() if pair.differences.size else ()
    return OutputStatistics(
        name=name,
        sample=sample,
        build=build,
        not_finite=int(np.count_nonzero(pair.broken)),
        relative_l2=pair.relative_l2,
        max_abs=pair.max_abs,
        at=at,
        expected=float(expected[at]) if errors.size else 0.0,
        actual=float(actual[at]) if errors.size else 0.0,
        psnr=pair.psnr,
        percentiles={f"{share:g}": value for share, value in zip(PERCENTILES, shares, strict=False)},
    )
