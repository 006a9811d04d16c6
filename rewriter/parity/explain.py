"""Explains two related arrays of images: the differences, the code, and what the code leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.code import border, lines, run
from rewriter.parity.comparison import ArrayComparison, Difference, dtype_difference
from rewriter.parity.relation import (
    NOISE,
    SAMPLE,
    WHOLE,
    Placement,
    Relation,
    Window,
    canonical,
    content,
    extent,
    whole,
)
from rewriter.parity.scales import Fit, Pair, Scaling, border_pixel, listed, plain_scaling, scalings
from rewriter.runtime.figures.pair import relative_l2

PIXEL_LEVELS = 256
"""Most distinct values of a channel that was uint8 once."""

ROUNDED_SHARE = 0.01
"""Share of whole pixel values that may differ by one where floats lie on the border of two."""

ALIASED = 0.56
"""Energy of the Laplacian with antialiasing over that without: 0.14 to 0.55 on photographs made 2 to 5 times
smaller. Two antialiasing kernels differ by 0.6 at least, but for Lanczos and bilinear (0.5)."""

FP16 = 2.0**-11
"""Relative rounding error of FP16."""

ASK = "`images` with the photographs that both read tells how each side resized them"

SHIFT_NOTE = "the code repeats the border: ours lacks the pixels there"


def explain(name: str, relation: Relation, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison of two arrays of images."""
    values = _values(relation, ours, theirs)
    differences = list(_differences(relation, ours, theirs, values))
    code = lines(relation, ours, theirs, values)
    notes = [f"in our pipeline: {line}" for line in _mending(relation, ours, theirs)]
    padding = _padding(relation, code, ours, theirs)
    if padding is not None:
        differences.append(padding[0])
        code += padding[1]
    made, other, window = _made(relation, code, ours, theirs)
    made, other = made[..., *window], other[..., *window]
    left = _remainder(made, other, (ours.dtype, theirs.dtype))
    if left is not None and relation.place.parts is None:  # the code of a crop resizes anew
        differences.append(left[0])
        notes += [f"in our pipeline: {left[1]}"] if left[1] else []
    notes += [ASK] if {d.kind for d in differences} & {"size", "interpolation", "antialias"} else []
    notes += [SHIFT_NOTE] if any(d.kind == "shift" for d in differences) else []
    before = relative_l2(theirs, ours) if ours.shape == theirs.shape else float("inf")
    if not differences:
        return ArrayComparison(name, (), (), before, before)
    return ArrayComparison(
        name, tuple(differences), tuple(code), before, relative_l2(other, made), tuple(notes)
    )


def _values(relation: Relation, ours: Array, theirs: Array) -> Pair | Fit | None:
    """The scalings that explain the fit, else the fit; None if the values are equal within its accuracy."""
    fit, images = relation.fit, relation.sides(ours, theirs)[0][:SAMPLE].swapaxes(0, 1)
    if not relation.place.resizes:
        images = images[..., *content(images.swapaxes(0, 1))]
    inside = images.reshape(images.shape[0], -1).astype(np.float64)
    spans = np.asarray(np.percentile(inside, [0.5, 99.5], axis=1).T[list(fit.order)])
    width = float(np.ptp(spans)) or 1.0
    moved = float(np.max(np.abs(spans * (fit.factor[:, None] - 1.0) + fit.offset[:, None]))) / width
    # pixels minus a mean have few fractions: FP16 rounds most of them the same way, which moves the line
    rounding = 0.5 * _epsilon(ours.dtype, theirs.dtype) * float(np.max(np.abs(spans))) / width
    plain = plain_scaling(spans)  # truncated pixels are half a step darker
    truncated = plain is not None and fit.unexplained > 10 * NOISE and moved * width <= 0.6 / plain.divisor
    if truncated or moved <= max(1e-5, 0.5 * fit.unexplained**0.5, rounding):
        return None
    return scalings(fit, spans) or fit


def _epsilon(*dtypes: np.dtype[Any]) -> float:
    """Spacing of the coarsest float type at 1; 0 if none is one."""
    return max((float(np.finfo(d).eps) for d in dtypes if d.kind == "f"), default=0.0)


# -- in words -----------------------------------------------------------------------------------


def _differences(r: Relation, ours: Array, theirs: Array, values: Pair | Fit | None) -> Iterator[Difference]:
    yield from dtype_difference(ours.dtype, theirs.dtype)
    mine, other = r.axes
    if mine != other:
        text = f"theirs is {other} {list(theirs.shape)}, ours {mine} {list(ours.shape)}"
        yield Difference("layout", f"is {other}, not {mine}", text)
    yield from _size(r, ours, theirs)
    turns = ("has height and width swapped", "is upside down", "is mirrored left to right")
    phrase = " and ".join(text for text, on in zip(turns, r.place.turn, strict=True) if on)
    if phrase:
        yield Difference("orientation", phrase, f"theirs {phrase}")
    if r.fit.order == (2, 1, 0):
        text = "the channels are in reverse order: if ours is RGB, theirs is BGR"
        yield Difference("channel-order", "is BGR (if ours is RGB)", text)
    elif not r.fit.in_order:
        phrase = f"has the channels in the order {list(r.fit.order)}"
        yield Difference("channel-order", phrase, f"theirs {phrase} of ours")
    if isinstance(values, Fit):
        phrase = f"is ours * {listed(values.factor)} + {listed(values.offset)}"
        yield Difference("scale", phrase, f"theirs {phrase}")
    elif values is not None:
        yield from _scalings(*values, swapped=r.fit.order == (2, 1, 0))


def _size(r: Relation, ours: Array, theirs: Array) -> Iterator[Difference]:
    sides, place = r.sides(ours, theirs), r.place
    sizes = [f"{side.shape[-2]}x{side.shape[-1]}" for side in sides]
    if place.parts is not None:
        covered = " x ".join(f"{part:.0%}" for part in place.parts)
        shown = "x".join(map(str, extent(content(sides[1][:SAMPLE]))))
        mine, other = _geometry(sides, place, theirs=False), _geometry(sides, place, theirs=True)
        phrase = f"is {other}, not {mine}" if mine != other else "shows another part of the photograph"
        text = f"theirs shows {covered} (height x width) of ours about the centre, as {shown} pixels"
        yield Difference("size", phrase, text)
    elif sizes[0] != sizes[1]:
        dy, dx = place.offset
        larger = all(a >= b for a, b in zip(sides[0].shape, sides[1].shape, strict=True))
        how = "resized from" if place.resizes else "cropped from" if larger else "padded from"
        where = "" if place.resizes else f", its first pixel is at row {dy:g}, column {dx:g} of ours"
        text = f"theirs is {sizes[1]}, {how} ours' {sizes[0]}{where}"
        yield Difference("size", f"is {sizes[1]}, not {sizes[0]}", text)
    elif any(place.offset):
        ways = zip(place.offset, (("down", "up"), ("right", "left")), strict=True)
        moves = " and ".join(f"{abs(s)} pixel{'s' * (abs(s) != 1)} {way[s > 0]}" for s, way in ways if s)
        text = f"theirs is shifted {moves}: another crop or padding"
        yield Difference("shift", f"is shifted {moves}", text)


def _geometry(sides: tuple[Array, Array], place: Placement, *, theirs: bool) -> str:
    """How one side was brought to its size, as far as the other one shows it."""
    if content(sides[theirs][:SAMPLE]) != whole(sides[theirs]):
        return "letterboxed"
    parts = [part if theirs else 1 / part for part in place.parts or (1.0, 1.0)]
    return "resized and then cropped" if min(parts) < 1 and max(parts) <= 1 + WHOLE else "stretched"


def _mending(r: Relation, ours: Array, theirs: Array) -> tuple[str, ...]:
    """Lines of OpenCV for our pipeline, on the photograph [H, W, 3], that crop or pad as theirs does."""
    sides = r.sides(ours, theirs)
    if r.place.parts is None:
        return ()
    (height, width), box = sides[1].shape[-2:], content(sides[1][:SAMPLE])
    kinds = [_geometry(sides, r.place, theirs=theirs) for theirs in (False, True)]
    if kinds[1] == "stretched":
        return (f"image = cv2.resize(image, ({width}, {height}))",)
    if kinds[1] == "letterboxed":
        corner = 0 if box[0].start or box[1].start else -1
        pixel = border_pixel(sides[1][0, :, corner, corner].astype(np.float64))
        edges = f"{box[0].start}, {height - box[0].stop}, {box[1].start}, {width - box[1].stop}"
        value = "VALUE" if pixel is None else f"({pixel}, {pixel}, {pixel})"
        return (
            f"image = cv2.resize(image, {extent(box)[::-1]})",
            f"image = cv2.copyMakeBorder(image, {edges}, cv2.BORDER_CONSTANT, value={value})",
        )
    return (
        f"scale = {round(min(height, width) / max(r.place.parts))} / min(image.shape[:2])",
        "image = cv2.resize(image, None, fx=scale, fy=scale)",
        f"top, left = (image.shape[0] - {height}) // 2, (image.shape[1] - {width}) // 2",
        f"image = image[top : top + {height}, left : left + {width}]",
    ) * (kinds[0] != kinds[1])


def _scalings(mine: Scaling, other: Scaling, *, swapped: bool) -> Iterator[Difference]:
    both = f"theirs: {other.text}; ours: {mine.text}"
    if mine.divisor != other.divisor:
        phrases = {1.0: "is not divided by 255", 255.0: "is divided by 255, ours is not"}
        phrase = phrases.get(other.divisor, f"is {other.text}")
        twice = other.divisor == 255.0 and mine.divisor > 255.0
        yield Difference("scale", "is divided by 255 once, ours twice" if twice else phrase, both)
    if (mine.mean, mine.std) != (other.mean, other.std):
        phrase = f"has {other.text}, not {mine.text}"
        phrase = f"has {other.text}" if mine.plain else phrase
        phrase = f"has no mean and deviation (ours: {mine.text})" if other.plain else phrase
        yield Difference("normalization", phrase, both)
    elif not mine.plain and mine.by_channel and (mine.reversed != other.reversed) != swapped:
        text = f"{both}: only one side has its constants in the order of its channels"
        yield Difference("normalization", "has mean and deviation in another order of channels", text)


# -- what is left -------------------------------------------------------------------------------


def _made(r: Relation, code: list[str], ours: Array, theirs: Array) -> tuple[Array, Array, Window]:
    """What the code makes and theirs, [N, C, H, W] each, and the window in which both have content."""
    made, other = (canonical(a, r.axes[1]).astype(np.float64) for a in (run(code, ours), theirs))
    window = r.place.window(content(r.sides(ours, theirs)[0][:SAMPLE]), content(other[:SAMPLE]))
    return made, other, window or whole(other)


def _padding(r: Relation, code: list[str], ours: Array, theirs: Array) -> tuple[Difference, list[str]] | None:
    """The border of theirs that the code does not give, and the lines that do."""
    made, other, window = _made(r, code, ours, theirs)
    rows, columns = box = content(other[:SAMPLE])
    height, width = other.shape[-2:]
    outside = np.ones((height, width), bool)
    outside[box] = False
    noise = 4 * float(np.std((other - made)[..., *window]))
    gap = float(np.max(np.abs(other - made)[..., outside], initial=0.0))
    if gap <= max(2e-3 * float(np.ptp(other[..., *box])), noise):
        return None
    counts = (
        (rows.start, "top"),
        (height - rows.stop, "bottom"),
        (columns.start, "left"),
        (width - columns.stop, "right"),
    )
    where = ", ".join(f"{pixels} at the {side}" for pixels, side in counts if pixels)
    value = other[0][:, outside][:, 0]
    pixel = border_pixel(value)
    shown = "" if pixel is None or listed(value) == str(pixel) else f", pixel value {pixel}"
    phrase = f"is padded with {listed(value)}{shown}"
    lines = border(value, box, (height, width), r.axes[1])
    return Difference("padding", phrase, f"theirs {phrase} ({where})"), lines


def _remainder(
    made: Array, theirs: Array, dtypes: tuple[np.dtype[Any], np.dtype[Any]]
) -> tuple[Difference, str] | None:
    """What is left, with a line for our pipeline: rounding, antialiasing, or another resampling."""
    relative, largest = relative_l2(theirs, made), float(np.max(np.abs(theirs - made), initial=0.0))
    mine, other = _step(made), _step(theirs)
    left = f"what is left is {relative:.2g} (relative L2)"
    exact = dtypes[1].kind in "iu" and float(np.mean(theirs != made)) <= ROUNDED_SHARE
    if relative <= 2 * max(1e-6, _epsilon(*dtypes)) or (largest <= 1.02 * max(mine, other) and exact):
        return None
    if largest <= 1.02 * max(mine, other) or relative <= FP16:
        if other and not mine:
            return Difference(
                "rounding", "rounds to whole pixels", left
            ), "image = np.rint(image)  # after the resize"
        if mine and not other:
            line = "image = image.astype(np.float32)  # before the resize, and no uint8 after it"
            return Difference("rounding", "does not round to whole pixels", left), line
        return Difference("rounding", "is rounded in another place", left), ""
    energy = _details(theirs) / (_details(made) or 1.0)
    left += f", with {energy:.2g} times the energy of details"
    if energy <= ALIASED:
        line = "image = image.resize(size[::-1], Image.BILINEAR)  # or cv2.INTER_AREA"
        return Difference("antialias", "is resized with antialiasing", left), line
    if energy >= 1 / ALIASED:
        line = "image = cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)"
        return Difference("antialias", "is resized without antialiasing", left), line
    return Difference("interpolation", "is resampled in another way", left), ""


def _step(images: Array) -> float:
    """The distance of two neighbouring pixel values, if the images were whole pixel values once; else 0."""
    levels = [np.unique(channel.astype(np.float32)) for channel in images.swapaxes(0, 1)]
    return max((float(np.min(np.diff(one))) for one in levels if 1 < one.size <= PIXEL_LEVELS), default=0.0)


def _details(p: Array) -> float:
    """Energy of the Laplacian."""
    around = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
    return float(np.mean((around - 4 * p[..., 1:-1, 1:-1]) ** 2))
