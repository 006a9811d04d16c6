"""Recognises how an array was made from its photograph: stretched, cropped or letterboxed, and resized how.

Both pipelines read the same photograph. Candidates are computed from it by the definitions of `resampling`.
The one that explains most of an array, whatever its channels and scale, is how that array was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rewriter.data.parity.comparison import ArrayComparison, Difference
from rewriter.data.parity.explain import RESIZING_NOTE
from rewriter.data.parity.geometry import Box, content, layouts, standard
from rewriter.data.parity.remainder import PIXEL_LEVELS
from rewriter.data.parity.resampling import METHODS, Method, resize, shorter_side
from rewriter.model import Array

Geometry = Literal["stretched", "cropped", "letterboxed"]

RECOGNISED = 0.02
"""Largest share of the variance that the best candidate leaves: another interpolation leaves less than 0.1, a
line of code that is right less than 1e-3."""

EQUAL = 1.3
"""Ratio of unexplained shares up to which the usual method wins."""

EXACT = 2e-6
"""Unexplained share that is nothing, beside that of rounding to whole pixels (some 1e-5 of the variance)."""

UNSURE = (RESIZING_NOTE,)
"""Notes of a comparison without a photograph."""

SIDES = (1.0, 256 / 224, 1 / 0.9, 1 / 0.95, 1 / 0.96, 232 / 224, 236 / 224, 248 / 224, 272 / 224)
"""Shorter side before a centre crop, over the crop: 224 of 256 and other usual ratios, from timm."""


@dataclass(frozen=True)
class Origin:
    """How an array was made from a photograph.

    Attributes:
        size: Height and width after the resize, before a crop or a border.
        box: The photograph's place in the array; all of it unless `letterboxed`.
        rounds: True if pixels were rounded to whole numbers after the resize.
        unexplained: Share of the variance that this leaves.
    """

    geometry: Geometry
    size: tuple[int, int]
    box: Box
    method: Method
    rounds: bool
    unexplained: float

    @property
    def lines(self) -> tuple[str, ...]:
        """Code that does the same; other libraries that agree are in a comment."""
        call, *others = self.method.calls
        also = f"  # or {' or '.join(others)}" if others else ""
        found = [f"size = {self.size}", f"image = {call}{also}"]
        if self.geometry == "cropped":
            high, wide = self.box.bottom, self.box.right
            top, left = ((a - b) // 2 for a, b in zip(self.size, (high, wide), strict=True))
            found.append(
                f"image = image[{top}:{top + high}, {left}:{left + wide}]  # height, width, channels"
            )
        if self.rounds and "F.interpolate" in call:
            found.append("image = image.round().clamp(0, 255)")
        return tuple(found)


def recognise(image: Array, array: Array) -> Origin | None:
    """How the array was made; None if no candidate explains it.

    Args:
        image: [H, W, 3] in uint8.
        array: One image in any layout, scale and order of channels.
    """
    target = _canonical(array)
    if target is None or not np.isfinite(target).all():
        return None
    plain = METHODS[1]  # antialiasing is nearest to the mean of all methods
    rounds = _is_rounded(target)
    places = [_origin(image, target, one, plain, rounds=rounds) for one in _geometries(image, target)]
    place = min(places, key=lambda o: o.unexplained)
    if place.unexplained > 10 * RECOGNISED:
        return None
    where = place.geometry, place.size, place.box
    found = [_origin(image, target, where, method, rounds=rounds) for method in METHODS]
    least = min(o.unexplained for o in found)
    best = next(o for o in found if o.unexplained <= EQUAL * least + EXACT)
    return best if best.unexplained <= RECOGNISED else None


def _canonical(array: Array) -> Array | None:
    """The array as [1, 3, H, W]; None if it is no single image of three channels."""
    for layout in layouts(array.shape):
        found = layout.canonical(array)
        if found.shape[:2] == (1, 3):
            return found.astype(np.float64)
    return None


def _geometries(image: Array, target: Array) -> Iterator[tuple[Geometry, tuple[int, int], Box]]:
    (height, width), (high, wide) = target.shape[-2:], (image.shape[0], image.shape[1])
    whole = Box(0, height, 0, width)
    yield "stretched", (height, width), whole
    box = content(target)
    if box != whole:
        yield "letterboxed", (box.bottom - box.top, box.right - box.left), box
        return
    for ratio in SIDES:
        size = shorter_side(high, wide, round(min(height, width) * ratio))
        rounded = round(min(size) * high / min(high, wide)), round(min(size) * wide / min(high, wide))
        for one in dict.fromkeys([size, rounded]):
            if one[0] >= height and one[1] >= width and one != (height, width):
                yield "cropped", one, whole


def _origin(
    image: Array,
    target: Array,
    place: tuple[Geometry, tuple[int, int], Box],
    method: Method,
    *,
    rounds: bool,
) -> Origin:
    geometry, size, box = place
    made = resize(image, size, method)
    if geometry == "cropped":
        top, left = (size[0] - box.bottom) // 2, (size[1] - box.right) // 2
        made = made[top : top + box.bottom, left : left + box.right]
    planes = np.moveaxis(made, -1, 0)[None]
    seen = target[..., *box.slices]
    return Origin(geometry, size, box, method, rounds, _unexplained(planes, seen))


def _is_rounded(target: Array) -> bool:
    """True if no channel has more values than whole pixels have."""
    channels = target[0].reshape(3, -1)
    enough = channels.shape[1] >= 4 * PIXEL_LEVELS
    return enough and all(np.unique(np.float32(channel)).size <= PIXEL_LEVELS for channel in channels)


def _unexplained(made: Array, target: Array) -> float:
    """Share of the variance that a line through the best channel of `made` leaves, in the mean."""
    a, b = (standard(side[0].reshape(3, -1)) for side in (made, target))
    best = ((a @ b.T / a.shape[1]) ** 2).max(axis=0)
    return float(1.0 - best.mean())


def differences(ours: Origin, theirs: Origin) -> Iterator[Difference]:
    """What differs between two ways to make an array from one photograph."""
    a, b = ours.method, theirs.method
    if (ours.geometry, ours.size) != (theirs.geometry, theirs.size):
        text = f"theirs is {_placed(theirs)}, ours {_placed(ours)}"
        yield Difference("size", f"is {_placed(theirs)}, not {ours.geometry}", text)
    if a.kernel != b.kernel:
        yield Difference("interpolation", f"is resized {b.kernel}, not {a.kernel}", _called(ours, theirs))
    elif a.coordinates != b.coordinates:
        text = _called(ours, theirs)
        yield Difference("interpolation", f"has {b.coordinates} coordinates, not {a.coordinates}", text)
    if a.antialias != b.antialias and "nearest" not in (a.kernel, b.kernel):
        phrase = "is resized with antialiasing" if b.antialias else "is resized without antialiasing"
        yield Difference("antialias", phrase, _called(ours, theirs))
    if ours.rounds != theirs.rounds and "nearest" not in (a.kernel, b.kernel):  # that picks whole pixels
        who, other = ("theirs", "ours") if theirs.rounds else ("ours", "theirs")
        text = f"{who} has whole pixels (uint8) after the resize, {other} has not"
        yield Difference(
            "rounding", f"{'rounds' if theirs.rounds else 'does not round'} to whole pixels", text
        )


def _placed(origin: Origin) -> str:
    size = f"{origin.size[0]}x{origin.size[1]}"
    if origin.geometry == "stretched":
        return f"stretched to {size}"
    if origin.geometry == "cropped":
        return f"resized to {size}, then cropped in the middle"
    return f"letterboxed: resized to {size}, then padded from row {origin.box.top}, column {origin.box.left}"


def _called(ours: Origin, theirs: Origin) -> str:
    return f"theirs is as by {theirs.method.calls[0]}, ours as by {ours.method.calls[0]}"


BLIND = frozenset({"interpolation", "antialias", "rounding", "size", "shift", "values", "padding"})
"""Kinds of difference that both origins state better than the arrays alone."""


def with_origins(found: ArrayComparison, image: Array, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison with what the photograph tells: how each side was made from it, and their code.

    Returns:
        `found` with a note if one side is not recognised.
    """
    origins = recognise(image, ours), recognise(image, theirs)
    mine, other = origins
    if mine is None or other is None:
        who = " and ".join(n for n, o in zip(("ours", "theirs"), origins, strict=True) if o is None)
        note = f"{who} is not recognised in the photograph: mirrored, cropped elsewhere, or of another"
        return replace(found, notes=(*found.notes, note))
    different = tuple(differences(mine, other))
    if not different and {d.kind for d in found.differences} & {"values", "size"}:
        return found
    kept = found.differences
    if different:
        same_place = mine.geometry == other.geometry
        gone = BLIND - ({"padding", "shift"} if same_place else set())
        kept = tuple(d for d in kept if d.kind not in gone)
    lines = tuple(f"theirs: {line}" for line in other.lines)
    notes = tuple(n for n in found.notes if n not in UNSURE)
    made = tuple(f"ours: {line}" for line in mine.lines)
    return replace(found, differences=(*kept, *different), notes=(*notes, *made, *lines))
