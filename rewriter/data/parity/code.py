"""Lines of NumPy that compute theirs from ours, written from a relation, and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.data.parity.geometry import Box, Layout, Placement
from rewriter.data.parity.scales import Fit, Scaling
from rewriter.model import Array

DIGITS = 9
"""Significant digits of constants: as many as float32 needs."""


@dataclass(frozen=True)
class Relation:
    """How theirs comes from ours.

    Attributes:
        layouts: Of ours and of theirs.
        shapes: Height and width of ours (turned) and of theirs.
        zoom: True if ours is resized to the size of theirs.
        pair: Scalings that explain `fit`; None if none are known, so that the fit's numbers are used.
        same_values: True if the fit is the identity.
        padding: Their box and the value of each channel outside it, if ours is padded differently.
    """

    layouts: tuple[Layout, Layout]
    placement: Placement
    shapes: tuple[tuple[int, int], tuple[int, int]]
    zoom: bool
    fit: Fit
    pair: tuple[Scaling, Scaling] | None
    same_values: bool
    dtype: np.dtype[Any]
    padding: tuple[Box, tuple[float, ...]] | None = None


def lines(relation: Relation) -> tuple[str, ...]:
    """Code that reads `ours` and sets `theirs`."""
    r = relation
    layout = r.layouts[1]
    height, width = layout.axes.index("H"), layout.axes.index("W")
    text = _moved("ours", *r.layouts)
    if r.placement.swap:
        text += f".swapaxes({height}, {width})"
    flips = [a for a, on in ((height, r.placement.flip_v), (width, r.placement.flip_h)) if on]
    if flips:
        text = f"np.flip({text}, {tuple(flips) if len(flips) > 1 else flips[0]})"
    text = _resized(text, layout) if r.zoom else _placed(text, r, layout)
    text = _reordered(text, r.fit, layout.axis("C"))
    if not r.same_values:
        text = _rescaled(text, r, layout)
    text = _typed(text, r)
    head = _bilinear(r) if r.zoom else []
    return (*head, f"theirs = {text}", *_padding_lines(r, layout))


def run(code: Sequence[str], ours: Array) -> Array:
    """Runs `code` on `ours` and returns theirs."""
    names: dict[str, Any] = {"np": np, "ours": ours}
    exec("\n".join(code), names)  # written by `lines`: numbers and operators, no text of the user
    return np.asarray(names["theirs"])


def _moved(text: str, mine: Layout, other: Layout) -> str:
    """Changes the layout: drops axes of size 1, moves axes, adds axes."""
    dropped = [a for a in mine.axes if a not in other.axes]
    kept = [a for a in mine.axes if a in other.axes]
    if dropped:
        axes = [mine.axes.index(a) for a in dropped]
        text += f".squeeze({tuple(axes) if len(axes) > 1 else axes[0]})"
    wanted = [a for a in other.axes if a in kept]
    if wanted != kept:
        text += f".transpose({', '.join(str(kept.index(a)) for a in wanted)})"
    if len(wanted) < len(other.axes):
        text += "[" + ", ".join(":" if a in kept else "None" for a in other.axes) + "]"
    return text


def _bilinear(r: Relation) -> list[str]:
    """Weights [pixels of theirs, pixels of ours] of each axis; pixel centres at halves, borders repeated."""
    return [
        line
        for name, ours, theirs in zip(("rows", "columns"), *r.shapes, strict=True)
        for line in (
            f"places = ((np.arange({theirs}) + 0.5) * ({ours} / {theirs}) - 0.5).clip(0, {ours - 1})",
            f"{name} = np.maximum(0, 1 - np.abs(places[:, None] - np.arange({ours})))",
        )
    ]


def _resized(text: str, layout: Layout) -> str:
    given = layout.axes.lower()
    result = given.replace("h", "i").replace("w", "j")
    return f'np.einsum("{given},ih,jw->{result}", {text}, rows, columns, optimize=True)'


def _placed(text: str, r: Relation, layout: Layout) -> str:
    shifts = (r.placement.dy, r.placement.dx)
    if r.shapes[0] == r.shapes[1]:
        if not any(shifts):
            return text
        axes = (layout.axes.index("H"), layout.axes.index("W"))
        return f"np.roll({text}, ({-shifts[0]}, {-shifts[1]}), {axes})"
    before = [max(0, -s) for s in shifts]
    after = [max(0, t - (o - s)) for s, o, t in zip(shifts, *r.shapes, strict=True)]
    if any(before) or any(after):
        pads = dict(zip("HW", zip(before, after, strict=True), strict=True))
        text = f"np.pad({text}, ({', '.join(str(pads.get(a, (0, 0))) for a in layout.axes)}))"
    starts = [max(0, s) for s in shifts]
    spans = {a: f"{s}:{s + t}" for a, s, t in zip("HW", starts, r.shapes[1], strict=True)}
    return f"{text}[{', '.join(spans.get(a, ':') for a in layout.axes)}]"


def _reordered(text: str, fit: Fit, axis: int | None) -> str:
    if axis is None or fit.in_order:
        return text
    if fit.order == tuple(range(len(fit.order)))[::-1]:
        return f"np.flip({text}, {axis})"
    return f"np.take({text}, {list(fit.order)}, {axis})"


def _rescaled(text: str, r: Relation, layout: Layout) -> str:
    channels = len(r.fit.order)
    if r.pair is None:
        return f"{text} * {_constant(r.fit.factor, layout)} + {_constant(r.fit.offset, layout)}"
    mine, other = r.pair
    mean, std = (part[list(r.fit.order)] for part in mine.constants(channels))
    if mine.std != (1.0,):
        text += f" * {_constant(std, layout)}"
    if mine.mean != (0.0,):
        text += f" + {_constant(mean, layout)}"
    if mine.divisor != other.divisor:
        ratio = mine.divisor / other.divisor
        change = f"* {_number(ratio)}" if ratio > 1 else f"/ {_number(1 / ratio)}"
        text = f"{text if mine.plain else f'({text})'} {change}"
    mean, std = other.constants(channels)
    if other.mean != (0.0,):
        text = f"{text} - {_constant(mean, layout)}"
    if other.std != (1.0,):
        text = f"({text}) / {_constant(std, layout)}"
    return text


def _typed(text: str, r: Relation) -> str:
    if r.dtype.kind in "iu" and not r.same_values:
        bounds = np.iinfo(r.dtype)
        return f"np.rint({text}).clip({bounds.min}, {bounds.max}).astype(np.{r.dtype})"
    return f"({text}).astype(np.{r.dtype})"


def _padding_lines(r: Relation, layout: Layout) -> list[str]:
    if r.padding is None:
        return []
    box, values = r.padding
    height, width = r.shapes[1]
    value = _constant(np.asarray(values), layout)
    spans = (("H", 0, box.top), ("H", box.bottom, height), ("W", 0, box.left), ("W", box.right, width))
    return [
        f"theirs[{', '.join(f'{a}:{b}' if letter == axis else ':' for letter in layout.axes)}] = {value}"
        for axis, a, b in spans
        if b > a
    ]


def _constant(values: Array, layout: Layout) -> str:
    """One number if all channels have the same value, else an array that broadcasts along the channels."""
    if np.ptp(values) <= 1e-7 * np.max(np.abs(values), initial=0.0):
        return _number(float(values[0]))
    text = f"np.array([{', '.join(map(_number, values.tolist()))}], np.float32)"
    axis = layout.axis("C")
    after = 0 if axis is None else len(layout.axes) - 1 - axis
    return f"{text}[:{', None' * after}]" if after else text


def _number(value: float) -> str:
    return f"{value:.{DIGITS}g}"
