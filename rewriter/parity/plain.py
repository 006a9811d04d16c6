"""Relates two arrays that are no images: token ids, masks, features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.code import run
from rewriter.parity.comparison import ArrayComparison, Difference, dtype_difference, shape_difference
from rewriter.runtime.figures.pair import relative_l2

MOST_AXES = 5
"""Largest rank for which all transpositions (120) are tried."""

ROUNDING = 1e-6
"""Relative L2 distance that float32 arithmetic explains: a few times 2^-24."""


def compare_plain(name: str, ours: Array, theirs: Array) -> ArrayComparison:
    """Compares element types, shapes, axes, padding sides, and finds an affine relation of all values."""
    differences = [*dtype_difference(ours.dtype, theirs.dtype)]
    axes, code = _axes(ours, theirs), "ours"
    if axes is None:
        differences.append(shape_difference(ours.shape, theirs.shape))
        return ArrayComparison(name, tuple(differences), (), np.inf, np.inf)
    if ours.shape != theirs.shape:
        code = f"ours.transpose({', '.join(map(str, axes))})"
        differences.append(Difference("layout", f"has the axes {list(axes)} of ours", f"theirs is {code}"))
        ours, before = ours.transpose(axes), float("inf")
    else:
        before = distance(ours, theirs)
    left, relation = distance(ours, theirs), "ours"
    if left > ROUNDING:
        step = next(_relations(ours, theirs), None)
        if step is None:
            return ArrayComparison(name, (*differences, _unrelated(ours, theirs)), (), before, left)
        differences.append(step[0])
        relation = step[1]
    if not differences:
        return ArrayComparison(name, (), (), before, before)
    line = f"theirs = ({relation}).astype(np.{theirs.dtype})"
    after = distance(run((line,), ours), theirs)
    return ArrayComparison(name, tuple(differences), (line.replace("ours", code),), before, after)


def distance(ours: Array, theirs: Array) -> float:
    """Relative L2 distance; infinite if shapes, or the places of NaN and infinities, differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not all(a.dtype.kind in "fiub" or a.dtype.isbuiltin == 2 for a in (ours, theirs)):
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    mine, other = ours.astype(np.float64), theirs.astype(np.float64)
    usable = np.isfinite(mine)
    same = np.array_equal(mine[~usable], other[~usable], equal_nan=True) and np.isfinite(other[usable]).all()
    return relative_l2(other[usable], mine[usable]) if same else float("inf")


def _axes(ours: Array, theirs: Array) -> tuple[int, ...] | None:
    """The transposition with the smallest distance, if any gives the shape of theirs."""
    same = tuple(range(ours.ndim))
    if ours.shape == theirs.shape or ours.ndim != theirs.ndim or ours.ndim > MOST_AXES:
        return same if ours.shape == theirs.shape else None
    fitting = [a for a in itertools.permutations(same) if tuple(ours.shape[i] for i in a) == theirs.shape]
    return min(fitting, key=lambda axes: distance(ours.transpose(axes), theirs), default=None)


def _relations(ours: Array, theirs: Array) -> Iterator[tuple[Difference, str]]:
    """Relations that hold for all elements, the likeliest first, each with its expression."""
    if ours.dtype.kind in "iu" and theirs.dtype.kind in "iu" and ours.ndim and ours.shape[-1] > 1:
        yield from _other_side(ours, theirs)
    x, y = (side.astype(np.float64).reshape(-1) for side in (ours, theirs))
    if x.size < 3 or not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0:
        return
    a, b = (float(v) for v in np.polyfit(x, y, 1))
    if relative_l2(y, a * x + b) <= 10 * ROUNDING and abs(a) > 0:
        a, b = float(f"{a:.7g}"), float(f"{b:.7g}") if abs(b) > 1e-6 * np.ptp(y) else 0.0
        is_mask = set(np.unique(x)) <= {0.0, 1.0} and (a, b) == (-1.0, 1.0)
        phrase = "is the mask the other way round" if is_mask else f"is ours * {a:g} + {b:g}"
        yield Difference("scale", phrase, f"theirs = ours * {a:g} + {b:g}"), f"ours * {a!r} + {b!r}"


def _other_side(ours: Array, theirs: Array) -> Iterator[tuple[Difference, str]]:
    """Rows that are the same except for padding at the other end."""
    length = ours.shape[-1]
    for side, other, step in (("left", "right", -1), ("right", "left", 1)):
        rows = ours.reshape(-1, length)[:, ::step]  # theirs has the padding that ours has at the start
        counts = np.where((rows != rows[:, :1]).any(axis=1), (rows != rows[:, :1]).argmax(axis=1), 0)
        moves = (step * counts).reshape(*ours.shape[:-1], 1)
        code = f"np.take_along_axis(ours, (np.arange({length}) + np.array({moves.tolist()})) % {length}, -1)"
        if counts.any() and np.array_equal(run((f"theirs = {code}",), ours), theirs):
            text = f"theirs is padded on the {side}, ours on the {other}"
            yield Difference("padding", f"is padded on the {side}", text), code


def _unrelated(ours: Array, theirs: Array) -> Difference:
    special = [_specials(side) for side in (ours, theirs)]
    if special[0] != special[1]:
        text = f"ours holds {special[0]}, theirs {special[1]}"
        return Difference("values", "has other NaN or infinities", text)
    unequal = ours != theirs
    first = tuple(int(i) for i in np.argwhere(unequal)[0])
    where = f"the first at {list(first)}: theirs {theirs[first]}, ours {ours[first]}"
    text = f"{int(unequal.sum())} of {ours.size} values differ, {where}"
    return Difference("values", "has other values", text)


def _specials(array: Array) -> str:
    if array.dtype.kind != "f":
        return "0 NaN, 0 infinities"
    return f"{int(np.isnan(array).sum())} NaN, {int(np.isinf(array).sum())} infinities"
