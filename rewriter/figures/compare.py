"""How far a result is from the reference, per output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewriter.model import Array


@dataclass(frozen=True)
class OutputComparison:
    """One output of the rewritten model against the original's.

    Attributes:
        relative_l2: ||a - b|| / ||b|| for floats; the share of differing elements for other types.
        max_abs: Largest absolute difference.
        finite: Whether all values are finite where the original's are.
        tolerance: What `relative_l2` is held to.
        note: How it was compared when not element by element, e.g. as a set of detections.
    """

    name: str
    relative_l2: float
    max_abs: float
    cosine: float
    finite: bool
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.finite and self.relative_l2 <= self.tolerance


SET_SHARE = 0.95
"""Share of rows that a comparison as sets looks at: queries at the threshold of a TopK come and go."""

SET_FACTOR = 2.0
"""How much more than element by element a comparison as sets allows: detections attend to one another,
so one that is exchanged moves its neighbours. Measured: the FP32 engine of an RT-DETR R101, with
TF32, errs by 1.0e-2 as a set on one H200 (benchmarks/gpu_cases.json)."""

MOST_ROWS = 2048
"""Matching takes time with the cube of the rows, and memory with their square (32 MiB at 2048)."""


SMALLEST = float(np.finfo(np.float32).tiny)
"""FP32's smallest normal number, 1.2e-38: below it digits are lost, and kernels may flush to 0."""


def compare(
    expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: float, *, as_sets: bool = False
) -> tuple[OutputComparison, ...]:
    """Compare outputs by name, element by element.

    Args:
        expected, actual: Outputs of the reference and of the result, of equal shapes.
        tolerance: Largest relative L2 error of a float output, and share of differing elements of
            any other output.
        as_sets: Finite outputs [batch, rows] or [batch, rows, features] that fail are compared once
            more with their rows matched, those of equal [batch, rows] together: for models that
            order detections by TopK.
    """
    found = {name: _compare_one(name, expected[name], actual[name], tolerance) for name in expected}
    if as_sets and not all(c.passed for c in found.values()):
        for names in _row_groups(expected, actual):
            if not all(found[name].passed for name in names):
                found.update(_compare_rows(names, expected, actual, tolerance))
    return tuple(found.values())


def worst(rounds: Sequence[Sequence[OutputComparison]]) -> tuple[OutputComparison, ...]:
    """The worst comparison of each output over several samples."""
    by_output = zip(*rounds, strict=True)
    return tuple(max(same, key=lambda c: (not c.finite, c.relative_l2)) for same in by_output)


def relative_l2(expected: Array, actual: Array) -> float:
    """||actual - expected|| / ||expected|| in float64; the numerator alone if the reference is 0."""
    reference = expected.astype(np.float64).reshape(-1)
    difference = actual.astype(np.float64).reshape(-1) - reference
    scale = float(np.linalg.norm(reference))
    return float(np.linalg.norm(difference)) / (scale or 1.0)


def degenerate(expected: Array) -> str:
    """Why a relative error to a reference means nothing; "" if it does mean something."""
    values = expected[np.isfinite(expected)] if is_float(expected) else expected[:0]
    largest = float(np.max(np.abs(values.astype(np.float64)), initial=0.0))
    if largest >= SMALLEST or not values.size:
        return ""
    size = f"no value above {largest:.2g}, too small for FP32" if largest else "0 throughout"
    return f"the original gives {size}"


def _compare_one(
    name: str, expected: Array, actual: Array, tolerance: float, note: str = ""
) -> OutputComparison:
    if expected.shape != actual.shape:
        return OutputComparison(
            name, np.inf, np.inf, 0.0, False, tolerance, f"shape {actual.shape}, expected {expected.shape}"
        )
    if not is_float(expected):
        share = float(np.mean(expected != actual)) if expected.size else 0.0
        note = f"{note}; " if note else ""
        note += "share of differing elements"
        return OutputComparison(name, share, share, 1.0 - share, True, tolerance, note)
    usable = np.isfinite(expected)
    note = "; ".join(part for part in (note, degenerate(expected)) if part)
    finite = bool(np.all(np.isfinite(actual[usable]))) and _same_specials(expected, actual)
    a, b = actual[usable].astype(np.float64), expected[usable].astype(np.float64)
    if not finite or not a.size:
        error = 0.0 if finite else np.inf
        return OutputComparison(name, error, error, 1.0 if finite else 0.0, finite, tolerance, note)
    largest = float(np.max(np.abs(a - b)))
    return OutputComparison(name, relative_l2(b, a), largest, _cosine(a, b), True, tolerance, note)


def is_float(array: Array) -> bool:
    """Whether an array holds floats, those of ml_dtypes among them."""
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _same_specials(expected: Array, actual: Array) -> bool:
    """Infinities and NaN of the reference must be there, too: a mask's -inf is a value."""
    special = ~np.isfinite(expected)
    return bool(np.array_equal(expected[special], actual[special], equal_nan=True))


def _cosine(a: Array, b: Array) -> float:
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else float(np.array_equal(a, b))


def _row_groups(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[list[str]]:
    """Outputs whose first two dims agree: one row of each describes the same detection."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, array in expected.items():
        if array.ndim in (2, 3) and 1 < array.shape[1] <= MOST_ROWS and array.shape == actual[name].shape:
            groups.setdefault(array.shape[:2], []).append(name)
    return [names for names in groups.values() if all(_finite(expected[n], actual[n]) for n in names)]


def _finite(*arrays: Array) -> bool:
    """A row that is not finite must not be among those left out."""
    return all(not is_float(a) or bool(np.all(np.isfinite(a))) for a in arrays)


def _compare_rows(
    names: list[str], expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: float
) -> dict[str, OutputComparison]:
    batch, rows = expected[names[0]].shape[:2]
    keep = math.ceil(rows * SET_SHARE)
    matched = [_match([(expected[n][i], actual[n][i]) for n in names], keep) for i in range(batch)]
    note = f"rows matched as sets, best {keep} of {rows}"
    found = {}
    for name in names:
        pairs = [(expected[name][i][left], actual[name][i][right]) for i, (left, right) in enumerate(matched)]
        both = [np.stack(side) for side in zip(*pairs, strict=True)]
        found[name] = _compare_one(name, both[0], both[1], SET_FACTOR * tolerance, note)
    return found


def _match(pairs: Sequence[tuple[Array, Array]], keep: int) -> tuple[Array, Array]:
    """Row numbers on both sides of the `keep` best pairs; `pairs` hold [rows, ...] of every output."""
    from scipy.optimize import linear_sum_assignment

    cost = np.sum([_distances(a, b) for a, b in pairs], axis=0)
    left, right = linear_sum_assignment(cost)
    best = np.argsort(cost[left, right], kind="stable")[:keep]
    return left[best], right[best]


def _distances(a: Array, b: Array) -> Array:
    """Distances between all rows: squared, in units of the mean squared row of `a`; 0 or 1 otherwise."""
    left, right = a.reshape(len(a), -1), b.reshape(len(b), -1)
    if not is_float(a):
        return np.asarray(np.any(left[:, None] != right[None], axis=2), np.float64)
    left, right = left.astype(np.float64), right.astype(np.float64)
    norms = np.sum(left * left, axis=1)
    squares = norms[:, None] + np.sum(right * right, axis=1)[None] - 2.0 * (left @ right.T)
    return np.asarray(np.maximum(squares, 0.0) / (float(np.mean(norms)) or 1.0))
