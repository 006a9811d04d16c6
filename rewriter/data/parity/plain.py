"""Relates two arrays that are no images: token ids, masks, features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from rewriter.data.parity.code import run
from rewriter.data.parity.comparison import (
    ArrayComparison,
    Difference,
    dtype_difference,
    shape_difference,
)
from rewriter.figures.compare import relative_l2
from rewriter.model import Array

MOST_AXES = 5
"""Largest rank for which all transpositions (120) are tried."""

ROUNDING = 1e-6
"""Relative L2 distance that float32 arithmetic explains: a few times 2^-24."""


def compare_plain(name: str, ours: Array, theirs: Array) -> ArrayComparison:
    """Compares element types, shapes, axes, padding sides, and finds an affine relation of all values."""
    found = [*dtype_difference(ours.dtype, theirs.dtype)]
    code = "ours"
    before = distance(ours, theirs)
    aligned = ours
    if ours.shape != theirs.shape:
        axes = _axes(ours, theirs)
        if axes is None:
            found.append(shape_difference(ours.shape, theirs.shape))
            return ArrayComparison(name, tuple(found), (), np.inf, np.inf)
        aligned = ours.transpose(axes)
        code = f"ours.transpose({', '.join(map(str, axes))})"
        found.append(Difference("layout", f"has the axes {list(axes)} of ours", f"theirs is {code}"))
    left = distance(aligned, theirs)
    if left > ROUNDING:
        step = next(_relations(aligned, theirs), None)
        if step is None:
            return ArrayComparison(name, (*found, _unrelated(aligned, theirs)), (), before, left)
        difference, template = step
        found.append(difference)
        code = template.format(code)
    lines = (f"theirs = ({code}).astype(np.{theirs.dtype})",) if found else ()
    after = distance(run(lines, ours), theirs) if lines else before
    return ArrayComparison(name, tuple(found), lines, before, after)


def distance(ours: Array, theirs: Array) -> float:
    """Relative L2 distance; infinite if shapes, or the places of NaN and infinities, differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not all(a.dtype.kind in "fiub" or a.dtype.isbuiltin == 2 for a in (ours, theirs)):
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    mine, other = ours.astype(np.float64), theirs.astype(np.float64)
    usable = np.isfinite(mine)
    if (
        not np.array_equal(mine[~usable], other[~usable], equal_nan=True)
        or not np.isfinite(other[usable]).all()
    ):
        return float("inf")
    return relative_l2(other[usable], mine[usable])


def _axes(ours: Array, theirs: Array) -> tuple[int, ...] | None:
    """The transposition with the smallest distance, if any gives the shape of theirs."""
    if ours.ndim != theirs.ndim or ours.ndim > MOST_AXES:
        return None
    fitting = [
        axes
        for axes in itertools.permutations(range(ours.ndim))
        if tuple(ours.shape[a] for a in axes) == theirs.shape
    ]
    return min(fitting, key=lambda axes: distance(ours.transpose(axes), theirs), default=None)


def _relations(ours: Array, theirs: Array) -> Iterator[tuple[Difference, str]]:
    """Relations that hold for all elements, the likeliest first."""
    if ours.dtype.kind in "iub" and theirs.dtype.kind in "iub" and ours.ndim and ours.dtype.kind != "b":
        yield from _other_side(ours, theirs)
    if ours.size < 3 or not all(np.isfinite(a.astype(np.float64)).all() for a in (ours, theirs)):
        return
    x, y = ours.astype(np.float64).reshape(-1), theirs.astype(np.float64).reshape(-1)
    if np.ptp(x) == 0:
        return
    a, b = (float(v) for v in np.polyfit(x, y, 1))
    if relative_l2(y, a * x + b) <= 10 * ROUNDING and abs(a) > 0:
        a, b = float(f"{a:.7g}"), float(f"{b:.7g}") if abs(b) > 1e-6 * np.ptp(y) else 0.0
        is_mask = set(np.unique(x)) <= {0.0, 1.0}
        what = "is the mask the other way round" if is_mask and (a, b) == (-1.0, 1.0) else ""
        text = f"theirs = ours * {a:g} + {b:g}"
        yield Difference("scale", what or f"is ours * {a:g} + {b:g}", text), f"{{}} * {a!r} + {b!r}"


def _other_side(ours: Array, theirs: Array) -> Iterator[tuple[Difference, str]]:
    """Rows that are the same except for padding at the other end."""
    if ours.shape[-1] < 2:
        return
    mine, other = (a.reshape(-1, a.shape[-1]) for a in (ours, theirs))
    length = mine.shape[1]
    for to_left in (True, False):
        shifts = [_padding(row, at_end=to_left) for row in mine]
        moved = np.stack([np.roll(r, s if to_left else -s) for r, s in zip(mine, shifts, strict=True)])
        if any(0 < s < length for s in shifts) and np.array_equal(moved, other):
            side, from_side = ("left", "right") if to_left else ("right", "left")
            amounts = np.asarray(shifts).reshape(ours.shape[:-1]).tolist()
            index = (
                f"(np.arange({length}) {'-' if to_left else '+'} np.array({amounts})[..., None]) % {length}"
            )
            yield (
                Difference(
                    "padding",
                    f"is padded on the {side}",
                    f"theirs is padded on the {side}, ours on the {from_side}",
                ),
                f"np.take_along_axis({{}}, {index}, -1)",
            )


def _padding(row: Array, *, at_end: bool) -> int:
    """How many times the value at one end is repeated there."""
    line = row[::-1] if at_end else row
    different = np.flatnonzero(line != line[0])
    return int(different[0]) if different.size else 0


def _unrelated(ours: Array, theirs: Array) -> Difference:
    bad = [f"{who} holds {_specials(a)}" for who, a in (("ours", ours), ("theirs", theirs)) if _specials(a)]
    if bad and _specials(ours) != _specials(theirs):
        return Difference("values", "has other NaN or infinities", "; ".join(bad))
    unequal = ours != theirs
    where = [int(i) for i in np.argwhere(unequal)[0]]
    text = (
        f"{int(unequal.sum())} of {ours.size} values differ, the first at {where}: "
        f"theirs {theirs[tuple(where)]}, ours {ours[tuple(where)]}"
    )
    return Difference("values", "has other values", text)


def _specials(array: Array) -> str:
    if array.dtype.kind != "f":
        return ""
    counts = {"NaN": int(np.isnan(array).sum()), "infinities": int(np.isinf(array).sum())}
    return ", ".join(f"{n} {what}" for what, n in counts.items() if n)
