"""The figures of a pair of arrays: how far a result is from its reference."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rewriter.ir.model import Array

SMALLEST = float(np.finfo(np.float32).tiny)
"""FP32's smallest normal number, 1.2e-38: below it digits are lost, and kernels may flush to 0."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A reference and a result, with measures of their difference in float64.

    NaN and infinities of the reference (a mask's -inf) must be in the result, too; the measures are over the
    other elements. If they are not, or the shapes differ, all measures are the worst possible.
    """

    expected: Array
    actual: Array

    @property
    def same_shape(self) -> bool:
        return bool(self.expected.shape == self.actual.shape)

    @cached_property
    def wide(self) -> tuple[Array, Array]:
        """Reference and result in float64."""
        return np.asarray(self.expected).astype(np.float64), np.asarray(self.actual).astype(np.float64)

    @cached_property
    def usable(self) -> Array:
        """Mask of the elements that are finite on both sides."""
        expected, actual = self.wide
        return np.asarray(np.isfinite(expected) & np.isfinite(actual))

    @cached_property
    def broken(self) -> Array:
        """Mask of the elements that are NaN or infinite on one side, and not the same on the other."""
        expected, actual = self.wide
        same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
        return np.asarray(~self.usable & ~same)

    @cached_property
    def finite(self) -> bool:
        """True if the shapes are equal and no element is broken: only then are figures meaningful."""
        return self.same_shape and not self.broken.any()

    @cached_property
    def values(self) -> tuple[Array, Array]:
        """The usable elements of reference and result, flat."""
        expected, actual = self.wide
        return expected[self.usable], actual[self.usable]

    @cached_property
    def differences(self) -> Array:
        """Absolute differences of the usable elements, flat."""
        expected, actual = self.values
        return np.asarray(np.abs(actual - expected))

    @property
    def squares(self) -> tuple[float, float]:
        """Squared norms of the difference and of the reference; infinity and 1 if not `finite`."""
        if not self.finite:
            return math.inf, 1.0
        expected = self.values[0]
        return float(self.differences @ self.differences), float(expected @ expected)

    @property
    def relative_l2(self) -> float:
        """||actual - expected|| / ||expected||; only the numerator if the reference is 0."""
        return relative_l2(*self.values) if self.finite else math.inf

    @property
    def max_abs(self) -> float:
        """Largest absolute difference, in the unit of the values."""
        return float(np.max(self.differences, initial=0.0)) if self.finite else math.inf

    @property
    def carriers(self) -> float:
        """Number of entries that carry the error, (sum d^2)^2 / sum d^4; 0 if there is none."""
        unit = self.max_abs
        if not self.finite or not unit:
            return 0.0
        squares = np.square(self.differences / unit)
        return float(squares.sum()) ** 2 / float(squares @ squares)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between both as vectors; 1 for two zero vectors."""
        if not self.finite:
            return 0.0
        expected, actual = self.values
        scale = float(np.linalg.norm(actual) * np.linalg.norm(expected))
        return float(actual @ expected) / scale if scale else float(np.array_equal(actual, expected))

    @property
    def psnr(self) -> float:
        """Peak signal-to-noise ratio in dB: 20 log10(peak / RMSE); the peak is the span of the reference."""
        if not self.finite:
            return -math.inf
        error = float(np.sqrt(np.mean(np.square(self.differences)))) if self.differences.size else 0.0
        span = float(np.ptp(self.values[0])) if error else 0.0
        return 20.0 * math.log10((span or 1.0) / error) if error else math.inf


def relative_l2(expected: Array, actual: Array) -> float:
    """||actual - expected|| / ||expected|| of finite arrays of one size; see `Pair.relative_l2`."""
    reference = expected.astype(np.float64).ravel()
    difference = actual.astype(np.float64).ravel() - reference
    scale = float(np.linalg.norm(reference))
    return float(np.linalg.norm(difference)) / (scale or 1.0)


def is_float(array: Array) -> bool:
    """True for arrays of floats, including the types of ml_dtypes (BF16, FP8, FP4)."""
    return array.dtype.name.startswith(("float", "bfloat"))


def degenerate(expected: Array) -> str:
    """The reason why an error relative to this reference means nothing; "" if it does mean something."""
    if not is_float(expected):
        return ""
    values = expected[np.isfinite(expected)]
    largest = float(np.max(np.abs(values.astype(np.float64)), initial=0.0))
    if largest >= SMALLEST or not values.size:
        return ""
    size = f"no value above {largest:.2g}, too small for FP32" if largest else "0 throughout"
    return f"the original gives {size}"
