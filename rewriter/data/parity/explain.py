"""Explains two related arrays of images: the differences, the code, and the remainder after the code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rewriter.data.parity import describe
from rewriter.data.parity.code import Relation, lines, run
from rewriter.data.parity.comparison import ArrayComparison, Difference
from rewriter.data.parity.geometry import Box, content
from rewriter.data.parity.matching import NOISE, SAMPLE, Match, scalings, spans
from rewriter.data.parity.remainder import Remainder, epsilon, remainder
from rewriter.data.parity.scales import plain_scaling
from rewriter.figures.pair import relative_l2
from rewriter.model import Array

RESIZING_NOTE = "the code resizes bilinearly; theirs may have been resized in another way"
SHIFT_NOTE = "the code wraps pixels around: ours lacks the pixels at that border"


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
    notes = [RESIZING_NOTE] if relation.zoom else []
    if relation.zoom is not None and relation.zoom.centred:
        # the code resizes anew, which leaves more than another interpolation does
        made = describe.mending(relation.zoom, relation, _border(relation, theirs))
    else:
        found_left = _remaining(rest, relation, ours)
        differences += [one.difference for one in found_left]
        made = tuple(line for one in found_left for line in one.mend)
        code = tuple(line for one in found_left for line in one.code)
        if code:
            relation = replace(relation, rounding=code)
            rest = _rest(relation, ours, theirs)
    notes += [f"in our pipeline: {line}" for line in made]
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
    rounding = 0.5 * epsilon(ours.dtype, theirs) * float(np.max(np.abs(ends))) / width
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
    if relation.zoom is not None:
        rows, columns = relation.zoom.seen(*relation.shapes, borders=True)
    else:
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


def _border(relation: Relation, theirs: Array) -> tuple[float, ...]:
    """The values of the corner of theirs that a border has, if there is one."""
    images = relation.layouts[1].canonical(theirs)
    box = content(images[:SAMPLE])
    corner = 0 if box.top or box.left else -1
    return tuple(float(v) for v in images[0, :, corner, corner])


def _remaining(rest: Rest, relation: Relation, ours: Array) -> list[Remainder]:
    predicted, theirs = rest.content
    if not theirs.size:
        return []
    left = remainder(predicted, theirs, relation.layouts[1].axes, (ours.dtype, relation.dtype))
    if left is not None:
        return [left]
    if rest.relative > max(1e-3, 4 * relative_l2(theirs, predicted)):
        text = "ours has a border of one value where theirs has an image"
        return [Remainder(Difference("padding", "is not padded where ours is", text))]
    return []
