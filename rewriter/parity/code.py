"""Lines of NumPy that compute theirs from ours, written from a relation, and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.relation import Relation, Window
from rewriter.parity.scales import Fit, Pair

DIGITS = 9
"""Significant digits of constants: as many as float32 needs."""


def lines(relation: Relation, ours: Array, theirs: Array, values: Pair | Fit | None) -> list[str]:
    """Code that reads `ours` and sets `theirs`.

    Args:
        values: Scalings of both sides, or the numbers of the fit; None if the values are the same.
    """
    mine, other = relation.axes
    text = _moved("ours", mine, other)
    axes = other.index("H"), other.index("W")
    swap, *flips = relation.place.turn
    text += f".swapaxes{axes}" if swap else ""
    flipped = [axis for axis, flip in zip(axes, flips, strict=True) if flip]
    text = f"np.flip({text}, {flipped})" if flipped else text
    head, text = _placed(text, relation, relation.sides(ours, theirs))
    if not relation.fit.in_order:
        text = f"np.take({text}, {list(relation.fit.order)}, {other.index('C')})"
    text = text if values is None else _rescaled(text, relation.fit, values, other)
    if theirs.dtype.kind in "iu" and values is not None:
        bounds = np.iinfo(theirs.dtype)
        text = f"np.rint({text}).clip({bounds.min}, {bounds.max})"
    return [*head, f"theirs = ({text}).astype(np.{theirs.dtype})"]


def run(code: Sequence[str], ours: Array) -> Array:
    """Runs `code` on `ours` and returns theirs."""
    names: dict[str, Any] = {"np": np, "ours": ours}
    exec("\n".join(code), names)  # written by `lines`: numbers and operators, no text of the user
    return np.asarray(names["theirs"])


def border(value: Array, content: Window, size: tuple[int, int], axes: str) -> list[str]:
    """Lines that set all of theirs outside its content to the value of each channel."""
    sides = [("H", 0, content[0].start), ("H", content[0].stop, size[0])]
    sides += [("W", 0, content[1].start), ("W", content[1].stop, size[1])]
    spans = [{axis: f"{start}:{stop}"} for axis, start, stop in sides if stop > start]
    return [f"theirs[{', '.join(s.get(a, ':') for a in axes)}] = {_constant(value, axes)}" for s in spans]


def _moved(text: str, mine: str, other: str) -> str:
    """Changes the layout: drops axes of size 1, moves axes, adds axes."""
    dropped = tuple(mine.index(a) for a in mine if a not in other)
    kept, wanted = [a for a in mine if a in other], [a for a in other if a in mine]
    text += f".squeeze({dropped})" if dropped else ""
    text += f".transpose({', '.join(str(kept.index(a)) for a in wanted)})" if wanted != kept else ""
    added = len(wanted) < len(other)
    return text + f"[{', '.join(':' if a in kept else 'None' for a in other)}]" if added else text


def _placed(text: str, r: Relation, sides: tuple[Array, Array]) -> tuple[list[str], str]:
    """The image at the places of theirs: picked where they are whole, else bilinear; borders are repeated."""
    head, axes = [], r.axes[1]
    for axis, name in enumerate(("rows", "columns")):
        ours, theirs = (side.shape[axis - 2] for side in sides)
        offset = r.place.offset[axis]
        if not r.place.resizes:
            head.append(f"{name} = (np.arange({theirs}) + {offset:g}).clip(0, {ours - 1})")
            continue
        where = f"np.arange({theirs}) * {_number(r.place.scale[axis])} + {_number(offset)}"
        head.append(f"places = ({where}).clip(0, {ours - 1})")
        head.append(f"{name} = np.maximum(0, 1 - np.abs(places[:, None] - np.arange({ours})))")
    if r.place.resizes:
        source = axes.lower()
        result = source.replace("h", "i").replace("w", "j")
        return head, f'np.einsum("{source},ih,jw->{result}", {text}, rows, columns, optimize=True)'
    if not any(r.place.offset) and sides[0].shape == sides[1].shape:
        return [], text
    return head, f"{text}.take(rows, {axes.index('H')}).take(columns, {axes.index('W')})"


def _rescaled(text: str, fit: Fit, values: Pair | Fit, axes: str) -> str:
    if isinstance(values, Fit):
        return f"{text} * {_constant(fit.factor, axes)} + {_constant(fit.offset, axes)}"
    mine, other = values
    mean, std = (part[list(fit.order)] for part in mine.constants(len(fit.order)))
    text += f" * {_constant(std, axes)}" if mine.std != (1.0,) else ""
    text += f" + {_constant(mean, axes)}" if mine.mean != (0.0,) else ""
    ratio = mine.divisor / other.divisor
    if ratio != 1:
        change = f"* {_number(ratio)}" if ratio > 1 else f"/ {_number(1 / ratio)}"
        text = f"{text if mine.plain else f'({text})'} {change}"
    mean, std = other.constants(len(fit.order))
    text += f" - {_constant(mean, axes)}" if other.mean != (0.0,) else ""
    return f"({text}) / {_constant(std, axes)}" if other.std != (1.0,) else text


def _constant(values: Array, axes: str) -> str:
    """One number if all channels have the same value, else an array that broadcasts along the channels."""
    if np.ptp(values) <= 1e-7 * np.max(np.abs(values), initial=0.0):
        return _number(float(values[0]))
    after = axes[axes.index("C") + 1 :]
    shape = f"[:{', None' * len(after)}]" if after else ""
    return f"np.array([{', '.join(map(_number, values.tolist()))}], np.float32){shape}"


def _number(value: float) -> str:
    return f"{value:.{DIGITS}g}"
