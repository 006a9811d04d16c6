"""Explains two related arrays of images: the differences, the code, and the remainder after the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rewriter.data.parity import describe
from rewriter.data.parity.code import Relation, lines, run
from rewriter.data.parity.comparison import ArrayComparison, Difference
from rewriter.data.parity.geometry import Box, content
from rewriter.data.parity.matching import NOISE, SAMPLE, Match, scalings, spans
from rewriter.data.parity.plain import ROUNDING
from rewriter.data.parity.scales import plain_scaling
from rewriter.figures.pair import relative_l2
from rewriter.model import Array

RESIZING_NOTE = "the code resizes bilinearly; theirs may have been resized in another way"
SHIFT_NOTE = "the code wraps pixels around: ours lacks the pixels at that border"

PIXEL_LEVELS = 256
"""Most distinct values of a channel that was uint8 once."""

STEP_SLACK = 1.02
"""Largest change, in steps of 1/255 of the pixel range, of a value that is truncated to a whole one."""

LEAST_PART = 0.05
"""Smallest shift, in pixels, that is reported as a convention of pixel centres."""

ROUNDED_SHARE = 0.01
"""Share of whole pixel values that may differ by one where floats lie on the border of two."""


def explain(name: str, found: Match, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison of two arrays whose relation is `found`."""
    relation = _relation(found, ours, theirs)
    differences = list(describe.differences(found, relation, ours, theirs))
    rest = _rest(relation, ours, theirs)
    padded = _padding(rest, relation)
    if padded is not None:
        difference, relation = padded
        differences.append(difference)
        rest = _rest(relation, ours, theirs)
    differences += _remaining(rest, relation, ours)
    notes = [RESIZING_NOTE] if relation.zoom else []
    same_size = relation.shapes[0] == relation.shapes[1]
    notes += [SHIFT_NOTE] if same_size and (found.placement.dy or found.placement.dx) else []
    before = relative_l2(theirs, ours) if ours.shape == theirs.shape else float("inf")
    if not differences:
        return ArrayComparison(name, (), (), before, before, ())
    return ArrayComparison(name, tuple(differences), lines(relation), before, rest.relative, tuple(notes))


def _relation(found: Match, ours: Array, theirs: Array) -> Relation:
    turned = found.placement.turned(found.layouts[0].canonical(ours))
    sizes = tuple((int(a.shape[-2]), int(a.shape[-1])) for a in (turned, found.layouts[1].canonical(theirs)))
    same = _is_identity(found, ours, theirs.dtype)
    return Relation(
        found.layouts,
        found.placement,
        (sizes[0], sizes[1]),
        found.zoom,
        found.fit,
        None if same else scalings(ours, found),
        same,
        theirs.dtype,
    )


def _is_identity(found: Match, ours: Array, theirs: np.dtype[Any]) -> bool:
    """True if the values are the same, within the accuracy of the fit."""
    fit, ends = found.fit, spans(ours, found)
    width = float(np.ptp(ends)) or 1.0
    moved = float(np.max(np.abs(ends * (fit.factor[:, None] - 1.0) + fit.offset[:, None]))) / width
    # pixels minus a mean have few fractions: FP16 rounds most of them the same way, which moves the line
    rounding = 0.5 * _epsilon(ours.dtype, theirs) * float(np.max(np.abs(ends))) / width
    if moved <= max(1e-5, 0.5 * fit.unexplained**0.5, rounding):
        return True
    plain = plain_scaling(ends)  # truncated pixels are half a step darker
    return plain is not None and fit.unexplained > 10 * NOISE and moved * width <= 0.6 / plain.divisor


@dataclass(frozen=True)
class Rest:
    """Both sides after the code, where both have pixels: [N, C, h, w] each; `inside` excludes borders."""

    predicted: Array
    theirs: Array
    box: Box
    inside: tuple[slice, slice]
    corner: tuple[int, int]

    @property
    def difference(self) -> Array:
        return np.asarray(self.theirs - self.predicted)

    @property
    def relative(self) -> float:
        return relative_l2(self.theirs, self.predicted)

    @property
    def content(self) -> tuple[Array, Array]:
        """Both sides without borders."""
        cut = (..., *self.inside)
        return self.predicted[cut], self.theirs[cut]


def _rest(relation: Relation, ours: Array, theirs: Array) -> Rest:
    made = run(lines(relation), ours)
    layout = relation.layouts[1]
    sides = [layout.canonical(a).astype(np.float64) for a in (made, theirs)]
    rows, columns = slice(0, relation.shapes[1][0]), slice(0, relation.shapes[1][1])
    if not relation.zoom:
        turned = (1, 1, *relation.shapes[0])
        rows, columns = relation.placement.overlap(turned, sides[1].shape)[1][1:]
    box = content(sides[1][:SAMPLE])
    mine, other = (side[..., rows, columns] for side in sides)
    boxes = content(mine[:SAMPLE]), content(other[:SAMPLE])
    inside = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(boxes[0].slices, boxes[1].slices, strict=True)
    )
    return Rest(mine, other, box, (inside[0], inside[1]), (rows.start, columns.start))


def _padding(rest: Rest, relation: Relation) -> tuple[Difference, Relation] | None:
    """The padding of theirs that ours lacks, and the relation with it."""
    height, width = relation.shapes[1]
    if rest.box == Box(0, height, 0, width):
        return None
    outside = np.ones((height, width), bool)
    outside[rest.box.slices] = False
    y, x = rest.corner
    outside = outside[y : y + rest.theirs.shape[-2], x : x + rest.theirs.shape[-1]]
    if not outside.any():
        return None
    predicted, theirs = rest.content
    noise = float(np.sqrt(np.mean((theirs - predicted) ** 2))) if theirs.size else 0.0
    span = float(np.ptp(theirs)) if theirs.size else 0.0
    gap = np.abs(rest.difference[..., outside])
    if float(gap.max()) <= max(2e-3 * span, 4 * noise):
        return None
    value = tuple(float(v) for v in rest.theirs[0][:, outside][:, 0])
    given = rest.predicted[0][:, outside]
    if float(np.max(np.ptp(given, axis=1))) <= 1e-6 * (span or 1.0):
        instead = f"ours with {describe.listed(given[:, 0])} in the same scale"
    else:
        instead = "ours is not padded there"
    return describe.padding(rest.box, value, instead, relation), replace(relation, padding=(rest.box, value))


def _remaining(rest: Rest, relation: Relation, ours: Array) -> Iterator[Difference]:
    predicted, theirs = rest.content
    if not theirs.size:
        return
    relative = relative_l2(theirs, predicted)
    largest = float(np.max(np.abs(theirs - predicted)))
    noise = 2 * max(ROUNDING, _epsilon(relation.dtype, ours.dtype))  # of rounding to the element types
    if relative > noise:
        step = max(_step(predicted), _step(theirs))
        whole = relation.dtype.kind in "iu"
        if largest <= STEP_SLACK * step:
            if not whole or float(np.mean(theirs != predicted)) > ROUNDED_SHARE:
                text = f"what is left is {largest:.2g} at most, no more than one of 255 steps: rounding"
                yield Difference("rounding", "rounds pixels to whole numbers in another place", text)
            return
        left = resampling(predicted, theirs)
        text = f"what is left is {relative:.2%} (relative L2): {left.text}"
        yield Difference("interpolation", "is resampled in another way", text)
        return
    if relative_l2(rest.theirs, rest.predicted) > max(1e-3, 4 * relative):
        text = "ours has a border of one value where theirs has an image"
        yield Difference("padding", "is not padded where ours is", text)


def _epsilon(*dtypes: np.dtype[Any]) -> float:
    """Spacing of the coarsest float type at 1; 0 if none is one."""
    return max((float(np.finfo(d).eps) for d in dtypes if d.kind == "f"), default=0.0)


def _step(images: Array) -> float:
    """The distance of two neighbouring pixel values, if the images were whole pixel values once; else 0."""
    step = 0.0
    for channel in images[:SAMPLE].swapaxes(0, 1):
        levels = np.unique(channel.astype(np.float32))
        if 1 < levels.size <= PIXEL_LEVELS:
            step = max(step, float(np.min(np.diff(levels))))
    return step


@dataclass(frozen=True)
class Resampling:
    """theirs ~ ours shifted by (dy, dx) pixels, plus `blur` times the Laplacian (below 0: sharper).

    `explained` is the share of the remaining variance that this explains.
    """

    dy: float
    dx: float
    blur: float
    explained: float

    @property
    def text(self) -> str:
        """The likely cause in words."""
        if self.explained < 0.2:
            return "what is left is no shift and no blur: noise, compression or another augmentation"
        parts = []
        if max(abs(self.dy), abs(self.dx)) >= LEAST_PART:
            parts.append(
                f"a shift by {self.dy:+.2f} rows and {self.dx:+.2f} columns (another convention of pixel "
                "centres, align_corners, or where the crop rounds)"
            )
        if abs(self.blur) >= 0.01:
            softer = "smoother" if self.blur > 0 else "sharper"
            parts.append(f"theirs is {softer} (another interpolation, antialiasing on one side)")
        return f"{'; '.join(parts) or 'small'}: {self.explained:.0%} of what is left"


def resampling(predicted: Array, theirs: Array) -> Resampling:
    """Fits shift and blur to theirs - predicted, both [..., H, W], by least squares.

    To first order, p(y + dy, x + dx) = p + dy p_y + dx p_x, and a narrow symmetric kernel adds a multiple
    of the Laplacian: the terms of the Taylor series.
    """
    p = predicted.astype(np.float64)
    inner = (..., slice(1, -1), slice(1, -1))
    by_row = (p[..., 2:, 1:-1] - p[..., :-2, 1:-1]) / 2
    by_column = (p[..., 1:-1, 2:] - p[..., 1:-1, :-2]) / 2
    around = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
    laplacian = around - 4 * p[inner]
    rest = (theirs[inner] - p[inner]).reshape(-1)
    terms = np.stack([t.reshape(-1) for t in (by_row, by_column, laplacian)])
    found = np.linalg.lstsq(terms @ terms.T, terms @ rest, rcond=None)[0]
    total = float(rest @ rest)
    left = rest - found @ terms
    explained = 1.0 - float(left @ left) / total if total else 0.0
    return Resampling(float(found[0]), float(found[1]), float(found[2]), explained)
