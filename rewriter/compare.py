"""How far a result is from the reference, per output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rewriter.model import Array
from rewriter.result import OutputComparison

SET_SHARE = 0.95
"""Share of rows that a comparison as sets looks at: queries at the threshold of a TopK come and go."""


def compare(
    expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: float, *, as_sets: bool = False
) -> tuple[OutputComparison, ...]:
    """Compare outputs by name, element by element.

    Args:
        expected, actual: Outputs of the reference and of the result, of equal shapes.
        tolerance: Largest relative L2 error of a float output, and share of differing elements of
            any other output.
        as_sets: Outputs that fail and have the form [batch, rows, ...] are compared once more with
            their rows matched: for models that order detections by TopK.
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


def _compare_one(
    name: str, expected: Array, actual: Array, tolerance: float, note: str = ""
) -> OutputComparison:
    if expected.shape != actual.shape:
        return OutputComparison(
            name, np.inf, np.inf, 0.0, False, tolerance, f"shape {actual.shape}, expected {expected.shape}"
        )
    if not _is_float(expected):
        share = float(np.mean(expected != actual)) if expected.size else 0.0
        return OutputComparison(name, share, share, 1.0 - share, True, tolerance, "share of differing elements")
    usable = np.isfinite(expected)
    finite = bool(np.all(np.isfinite(actual[usable]))) and _same_specials(expected, actual)
    a, b = actual[usable].astype(np.float64), expected[usable].astype(np.float64)
    if not finite or not a.size:
        error = 0.0 if finite else np.inf
        return OutputComparison(name, error, error, 1.0 if finite else 0.0, finite, tolerance, note)
    largest = float(np.max(np.abs(a - b)))
    return OutputComparison(name, relative_l2(b, a), largest, _cosine(a, b), True, tolerance, note)


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _same_specials(expected: Array, actual: Array) -> bool:
    """Infinities and NaN of the reference must be there, too: a mask's -inf is a value."""
    special = ~np.isfinite(expected)
    return bool(np.array_equal(expected[special], actual[special], equal_nan=True))


def _cosine(a: Array, b: Array) -> float:
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else float(np.array_equal(a, b))


def _row_groups(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[list[str]]:
    """Float outputs whose first two dims agree: one row of each describes the same detection."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, array in expected.items():
        if array.ndim >= 2 and array.shape[1] > 1 and array.shape == actual[name].shape and _is_float(array):
            groups.setdefault(array.shape[:2], []).append(name)
    return list(groups.values())


def _compare_rows(
    names: list[str], expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: float
) -> dict[str, OutputComparison]:
    from scipy.optimize import linear_sum_assignment

    batch, rows = expected[names[0]].shape[:2]
    keep = max(1, int(rows * SET_SHARE))
    pairs: dict[str, list[tuple[Array, Array]]] = {name: [] for name in names}
    for item in range(batch):
        a = {n: expected[n][item].reshape(rows, -1).astype(np.float64) for n in names}
        b = {n: actual[n][item].reshape(rows, -1).astype(np.float64) for n in names}
        cost = sum(_distances(a[n], b[n]) for n in names)
        left, right = linear_sum_assignment(np.nan_to_num(cost, nan=1e30, posinf=1e30))
        best = np.argsort(np.asarray(cost)[left, right], kind="stable")[:keep]
        for name in names:
            pairs[name].append((a[name][left[best]], b[name][right[best]]))
    note = f"rows matched as sets, best {keep} of {rows}"
    return {
        name: _compare_one(
            name,
            np.concatenate([x for x, _ in both]),
            np.concatenate([y for _, y in both]),
            tolerance,
            note,
        )
        for name, both in pairs.items()
    }


def _distances(a: Array, b: Array) -> Array:
    """Squared distances between all rows, in units of the mean squared row of `a`."""
    scale = float(np.mean(np.sum(a * a, axis=1))) or 1.0
    squares = np.sum(a * a, axis=1)[:, None] + np.sum(b * b, axis=1)[None, :] - 2.0 * (a @ b.T)
    return np.maximum(squares, 0.0) / scale
