"""Relates two arrays that are no images: token ids, masks, features."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.comparison import ArrayComparison, Difference, dtype_difference
from rewriter.runtime.figures.pair import relative_l2

ROUNDING = 1e-6
"""Relative L2 distance that float32 arithmetic explains: a few times 2^-24."""


def compare_plain(name: str, ours: Array, theirs: Array) -> ArrayComparison:
    """Compares element types, shapes and padding sides, and finds an affine relation of all values."""
    differences = [*dtype_difference(ours.dtype, theirs.dtype)]
    if ours.shape != theirs.shape:
        text = f"theirs has shape {list(theirs.shape)}, ours {list(ours.shape)}"
        differences.append(Difference("size", text.removeprefix("theirs ").replace(", ours", ", not"), text))
        return ArrayComparison(name, tuple(differences), (), np.inf, np.inf)
    before, after, code = distance(ours, theirs), 0.0, "ours"
    if before > ROUNDING:
        found = next(_relations(ours, theirs), None)
        difference, code, made = found or (_unrelated(ours, theirs), "", ours)
        differences.append(difference)
        after = distance(made, theirs)
    lines = (f"theirs = ({code}).astype(np.{theirs.dtype})",) if code and differences else ()
    return ArrayComparison(name, tuple(differences), lines, before, after)


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


def _relations(ours: Array, theirs: Array) -> Iterator[tuple[Difference, str, Array]]:
    """Relations that hold for all elements, the likeliest first, each with its code and what it gives."""
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
        difference = Difference("scale", phrase, f"theirs = ours * {a:g} + {b:g}")
        yield difference, f"ours * {a!r} + {b!r}", ours * a + b


def _other_side(ours: Array, theirs: Array) -> Iterator[tuple[Difference, str, Array]]:
    """Rows that are the same except for padding at the other end."""
    length = ours.shape[-1]
    for side, other, step in (("left", "right", -1), ("right", "left", 1)):
        rows = ours.reshape(-1, length)[:, ::step]  # theirs has the padding that ours has at the start
        counts = np.where((rows != rows[:, :1]).any(axis=1), (rows != rows[:, :1]).argmax(axis=1), 0)
        moves = (step * counts).reshape(*ours.shape[:-1], 1)
        made = np.take_along_axis(ours, (np.arange(length) + moves) % length, -1)
        if counts.any() and np.array_equal(made, theirs):
            text = f"theirs is padded on the {side}, ours on the {other}"
            places = f"(np.arange({length}) + np.array({moves.tolist()})) % {length}"
            code = f"np.take_along_axis(ours, {places}, -1)"
            yield Difference("padding", f"is padded on the {side}", text), code, made


def _unrelated(ours: Array, theirs: Array) -> Difference:
    special = [
        f"{np.isnan(a).sum()} NaN, {np.isinf(a).sum()} infinities" for a in map(_floats, (ours, theirs))
    ]
    if special[0] != special[1]:
        text = f"ours holds {special[0]}, theirs {special[1]}"
        return Difference("values", "has other NaN or infinities", text)
    unequal = ours != theirs
    first = tuple(int(i) for i in np.argwhere(unequal)[0])
    where = f"the first at {list(first)}: theirs {theirs[first]}, ours {ours[first]}"
    text = f"{int(unequal.sum())} of {ours.size} values differ, {where}"
    return Difference("values", "has other values", text)


def _floats(array: Array) -> Array:
    return array if array.dtype.kind in "fc" else np.zeros(1)
