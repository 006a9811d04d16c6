"""What a tolerance may be about: one number for how far an output is from the original."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.compare import relative_l2
from rewriter.model import Array


@dataclass(frozen=True)
class Metric:
    """A measure of one output, in float64.

    Attributes:
        of: From the original's output and the result's, of equal shape.
        least: True if the tolerance is the least that is allowed (PSNR), not the most (an error).
    """

    of: Callable[[Array, Array], float]
    least: bool = False

    def meets(self, value: float, tolerance: float) -> bool:
        return value >= tolerance if self.least else value <= tolerance

    def worst(self, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> float:
        """The worst value over all outputs; NaN and infinity where the original is finite are the worst."""
        values = [self._one(expected[name], actual[name]) for name in expected]
        return (min if self.least else max)(values, default=math.inf if self.least else 0.0)

    def _one(self, expected: Array, actual: Array) -> float:
        if expected.dtype.kind != "f":
            return self.of(expected.astype(np.float64), actual.astype(np.float64))
        usable = np.isfinite(expected)
        if not np.all(np.isfinite(actual[usable])):
            return -math.inf if self.least else math.inf
        if not np.array_equal(expected[~usable], actual[~usable], equal_nan=True):
            return -math.inf if self.least else math.inf
        zero = np.zeros((), np.float64)
        return self.of(np.where(usable, expected, zero), np.where(usable, actual, zero))


def max_abs(expected: Array, actual: Array) -> float:
    """Largest absolute difference, in the output's unit."""
    return float(np.max(np.abs(actual - expected), initial=0.0))


def cosine(expected: Array, actual: Array) -> float:
    """Cosine of the angle between the outputs as vectors; 1 for two zero vectors."""
    scale = float(np.linalg.norm(expected) * np.linalg.norm(actual))
    if not scale:
        return float(np.array_equal(expected, actual))
    return float(np.vdot(expected, actual)) / scale


def psnr(expected: Array, actual: Array) -> float:
    """Peak signal-to-noise ratio in dB: 20 log10(peak / RMSE), peak = the span of the original's values."""
    error = float(np.sqrt(np.mean(np.square(actual - expected)))) if expected.size else 0.0
    span = float(np.ptp(expected)) if expected.size else 0.0
    return 20.0 * math.log10((span or 1.0) / error) if error else math.inf


def top_k(k: int) -> Callable[[Array, Array], float]:
    """Share of rows along the last axis whose `k` largest entries are the same set."""

    def agreement(expected: Array, actual: Array) -> float:
        sides = [_best(array, k) for array in (expected, actual)]
        return float(np.mean(np.all(sides[0] == sides[1], axis=-1))) if expected.size else 1.0

    return agreement


def _best(array: Array, k: int) -> Array:
    """Positions of the `k` largest entries of each row, in order of position; ties go to the first."""
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    return np.sort(np.argsort(-rows, axis=-1, kind="stable")[:, :k], axis=-1)


METRICS: dict[str, Metric] = {
    "relative-l2": Metric(relative_l2),
    "max-abs": Metric(max_abs),
    "cosine": Metric(cosine, least=True),
    "psnr": Metric(psnr, least=True),
    "top-1": Metric(top_k(1), least=True),
    "top-5": Metric(top_k(5), least=True),
}
"""By the name that `--metric` takes."""
