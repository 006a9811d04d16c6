"""The figures of one output against the original's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.figures.compare import relative_l2
from rewriter.figures.metrics import cosine, psnr
from rewriter.model import Array


@dataclass(frozen=True)
class OutputStatistics:
    """How far one output is from the original's, in one sample of one build; floats in the output's unit.

    What is not finite in the original is left out of all figures, for it must be the same.

    Attributes:
        sample, build: Numbers from 0.
        not_finite: How many elements are NaN or infinite where the original's are finite, or the reverse.
        relative_l2: ||fixed - original|| / ||original||; infinite if `not_finite`.
        max_abs: Largest absolute difference, found at index `at`, where the original has `expected` and the
            fixed model `actual`.
        psnr: Peak signal-to-noise ratio in dB, the peak being the span of the original's values.
        rms: Root mean square of the original: the scale of `histogram`.
        percentiles: Absolute error that this share (in %) of the elements does not exceed.
        histogram: Elements whose absolute error, in units of `rms`, lies in each decade of
            `statistics.DECADES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sample: int
    build: int
    not_finite: int
    relative_l2: float
    max_abs: float
    at: tuple[int, ...]
    expected: float
    actual: float
    cosine: float
    psnr: float
    rms: float
    percentiles: Mapping[str, float]
    histogram: tuple[int, ...]


PERCENTILES = (50.0, 90.0, 99.0, 99.9)

DECADES = tuple(range(-7, 1))
"""Histogram: the bins are below 1e-7, then each decade, then 1 and more, of the error over the RMS. FP16
rounds by up to 5e-4 of a value (2^-11), so a sound FP16 result lies round 1e-4 to 1e-3."""


def statistics(
    name: str, expected: Array, actual: Array, *, sample: int = 0, build: int = 0
) -> OutputStatistics:
    """All figures, in float64.

    Args:
        expected, actual: Of one shape, any type of number or bool.
    """
    a, b = (np.asarray(side).astype(np.float64) for side in (actual, expected))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    usable = np.isfinite(a) & np.isfinite(b)
    difference = np.where(usable, np.abs(np.subtract(a, b, where=usable, out=np.zeros_like(b))), 0.0)
    broken = int(np.count_nonzero(~usable & ~same))
    worst = int(np.argmax(np.where(~usable & ~same, np.inf, difference))) if difference.size else 0
    at = tuple(int(i) for i in np.unravel_index(worst, b.shape)) if difference.size else ()
    left, right = np.where(usable, b, 0.0), np.where(usable, a, 0.0)
    rms = float(np.sqrt(np.mean(np.square(left)))) if left.size else 0.0
    return OutputStatistics(
        name=name,
        shape=tuple(expected.shape),
        dtype=actual.dtype.name,
        sample=sample,
        build=build,
        not_finite=broken,
        relative_l2=np.inf if broken else relative_l2(left, right),
        max_abs=np.inf if broken else float(np.max(difference, initial=0.0)),
        at=at,
        expected=float(b[at]) if difference.size else 0.0,
        actual=float(a[at]) if difference.size else 0.0,
        cosine=0.0 if broken else cosine(left, right),
        psnr=-np.inf if broken else psnr(left, right),
        rms=rms,
        percentiles=_percentiles(difference[usable]),
        histogram=_histogram(difference[usable], rms),
    )


def _percentiles(errors: Array) -> dict[str, float]:
    if not errors.size:
        return {}
    values = np.percentile(errors, PERCENTILES)
    return {f"{share:g}": float(value) for share, value in zip(PERCENTILES, values, strict=True)}


def _histogram(errors: Array, rms: float) -> tuple[int, ...]:
    edges = [10.0**decade for decade in DECADES]
    bins = np.searchsorted(edges, errors / (rms or 1.0), side="right")
    return tuple(int(count) for count in np.bincount(bins.reshape(-1), minlength=len(edges) + 1))


def worst_of(figures: list[OutputStatistics]) -> OutputStatistics:
    """The worst sample and build of one output."""
    return max(figures, key=lambda one: (one.not_finite > 0, one.not_finite, one.relative_l2))
