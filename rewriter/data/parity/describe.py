"""Differences between two related arrays of images, in words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rewriter.data.parity.code import Relation
from rewriter.data.parity.comparison import Difference, dtype_difference
from rewriter.data.parity.geometry import Box
from rewriter.data.parity.matching import Match
from rewriter.data.parity.scales import Scaling, border_pixel
from rewriter.data.parity.zooming import WHOLE, Zoom
from rewriter.model import Array


def differences(found: Match, relation: Relation, ours: Array, theirs: Array) -> Iterator[Difference]:
    """All differences that the relation's code removes."""
    yield from dtype_difference(ours.dtype, theirs.dtype)
    yield from _layout(found, ours.shape, theirs.shape)
    yield from _size(found, relation)
    yield from _orientation(found)
    yield from _channels(found)
    if not relation.same_values:
        yield from _values(relation)


def _layout(found: Match, ours: tuple[int, ...], theirs: tuple[int, ...]) -> Iterator[Difference]:
    mine, other = (layout.axes for layout in found.layouts)
    if mine != other:
        text = f"theirs is {other} {list(theirs)}, ours {mine} {list(ours)}"
        yield Difference("layout", f"is {other}, not {mine}", text)


def _size(found: Match, relation: Relation) -> Iterator[Difference]:
    if found.zoom is not None and found.zoom.boxes is not None:
        yield _middle(found.zoom, found.zoom.boxes, relation)
        return
    (h, w), (height, width) = relation.shapes
    dy, dx = found.placement.dy, found.placement.dx
    if (h, w) != (height, width):
        how = (
            "resized from" if found.zoom else "cropped from" if h >= height and w >= width else "padded from"
        )
        where = "" if found.zoom else f", its first pixel is at row {dy}, column {dx} of ours"
        text = f"theirs is {height}x{width}, {how} ours' {h}x{w}{where}"
        yield Difference("size", f"is {height}x{width}, not {h}x{w}", text)
    elif dy or dx:
        moves = [
            f"{abs(s)} pixel{'s' * (abs(s) != 1)} {way[s > 0]}"
            for s, way in ((dy, ("down", "up")), (dx, ("right", "left")))
            if s
        ]
        text = f"theirs is shifted {' and '.join(moves)}: another crop or padding{_borders(found)}"
        yield Difference("shift", f"is shifted {' and '.join(moves)}", text)


def _middle(zoom: Zoom, boxes: tuple[Box, Box], relation: Relation) -> Difference:
    """The difference of two images of one photograph that have other borders or crops."""
    mine, other = (_geometry(zoom, boxes, relation.shapes, theirs=side) for side in (False, True))
    covered = " x ".join(f"{part:.0%}" for part in zoom.parts)
    content = f"{boxes[1].bottom - boxes[1].top}x{boxes[1].right - boxes[1].left}"
    text = f"theirs shows {covered} (height x width) of ours about the centre, as {content} pixels"
    if mine == other:
        return Difference(
            "size", "shows another part of the photograph", f"{text}: another size before the crop"
        )
    return Difference("size", f"is {other}, not {mine}", text)


def _geometry(
    zoom: Zoom, boxes: tuple[Box, Box], shapes: tuple[tuple[int, int], tuple[int, int]], *, theirs: bool
) -> str:
    """How one side was brought to its size, as far as the other one shows it."""
    if boxes[theirs] != Box(0, shapes[theirs][0], 0, shapes[theirs][1]):
        return "letterboxed"
    parts = zoom.parts if theirs else tuple(1 / part for part in zoom.parts)
    return "resized and then cropped" if min(parts) < 1 and max(parts) <= 1 + WHOLE else "stretched"


def mending(zoom: Zoom, relation: Relation, border: tuple[float, ...]) -> tuple[str, ...]:
    """Lines for our pipeline, of OpenCV on the photograph [H, W, 3], that do as theirs does.

    Args:
        border: The values of theirs outside its content.
    """
    if zoom.boxes is None:
        return ()
    height, width = relation.shapes[1]
    kind = _geometry(zoom, zoom.boxes, relation.shapes, theirs=True)
    if kind == "stretched":
        return (f"image = cv2.resize(image, ({width}, {height}))",)
    box = zoom.boxes[1]
    if kind == "letterboxed":
        content = f"({box.right - box.left}, {box.bottom - box.top})"
        sides = f"{box.top}, {height - box.bottom}, {box.left}, {width - box.right}"
        pixel = border_pixel(border)
        value = "VALUE" if pixel is None else f"({pixel}, {pixel}, {pixel})"
        return (
            f"image = cv2.resize(image, {content})",
            f"image = cv2.copyMakeBorder(image, {sides}, cv2.BORDER_CONSTANT, value={value})",
        )
    if _geometry(zoom, zoom.boxes, relation.shapes, theirs=False) == kind:
        return ()
    side = round(min(height, width) / max(zoom.parts))
    return (
        f"scale = {side} / min(image.shape[:2])",
        "image = cv2.resize(image, None, fx=scale, fy=scale)",
        f"top, left = (image.shape[0] - {height}) // 2, (image.shape[1] - {width}) // 2",
        f"image = image[top : top + {height}, left : left + {width}]",
    )


def _borders(found: Match) -> str:
    mine, other = found.boxes
    if mine == other:
        return ""
    rows, columns = f"{other.top}..{other.bottom - 1}", f"{other.left}..{other.right - 1}"
    return (
        f" (the content is in rows {rows} and columns {columns}, ours in {mine.top}..{mine.bottom - 1} and "
        f"{mine.left}..{mine.right - 1})"
    )


def _orientation(found: Match) -> Iterator[Difference]:
    place = found.placement
    parts = ["has height and width swapped"] * place.swap
    parts += ["is upside down"] * place.flip_v + ["is mirrored left to right"] * place.flip_h
    if parts:
        text = " and ".join(parts)
        yield Difference("orientation", text, f"theirs {text}")


def _channels(found: Match) -> Iterator[Difference]:
    order = found.fit.order
    if order == (2, 1, 0):
        text = "the channels are in reverse order: if ours is RGB, theirs is BGR"
        yield Difference("channel-order", "is BGR (if ours is RGB)", text)
    elif not found.fit.in_order:
        text = f"their channels are ours in the order {list(order)}"
        yield Difference("channel-order", f"has the channels in the order {list(order)}", text)


def _values(relation: Relation) -> Iterator[Difference]:
    if relation.pair is None:
        fit = relation.fit
        text = "theirs = ours * {} + {}".format(*(listed(v) for v in (fit.factor, fit.offset)))
        yield Difference("scale", f"is ours * {listed(fit.factor)} + {listed(fit.offset)}", text)
        return
    mine, other = relation.pair
    if mine.divisor != other.divisor:
        yield Difference("scale", _divided(mine, other), f"theirs: {other.text}; ours: {mine.text}")
    if (mine.mean, mine.std) != (other.mean, other.std):
        yield _normalized(mine, other)
    elif mine.reversed == other.reversed and not mine.plain:
        text = f"both have {mine.text}, but only one side has its constants in the order of its channels"
        yield Difference("normalization", "has mean and deviation in another order of channels", text)
    elif mine.reversed != other.reversed and relation.fit.order != (2, 1, 0):
        text = f"theirs: {other.text}; ours: {mine.text}"
        yield Difference("normalization", "has mean and deviation in another order of channels", text)


def _divided(mine: Scaling, other: Scaling) -> str:
    phrases = {1.0: "is not divided by 255", 255.0: "is divided by 255, ours is not"}
    if other.divisor == 255.0 and mine.divisor > 255.0:
        return "is divided by 255 once, ours twice"
    return phrases.get(other.divisor, f"is {other.text}")


def _normalized(mine: Scaling, other: Scaling) -> Difference:
    if other.plain:
        phrase = f"has no mean and deviation (ours: {mine.text})"
    elif mine.plain:
        phrase = f"has {other.text}"
    else:
        phrase = f"has {other.text}, not {mine.text}"
    return Difference("normalization", phrase, f"theirs: {other.text}; ours: {mine.text}")


def padding(box: Box, value: tuple[float, ...], ours: str, relation: Relation) -> Difference:
    """The difference of a padded border; `ours` describes ours at that border."""
    height, width = relation.shapes[1]
    sides = {"top": box.top, "bottom": height - box.bottom, "left": box.left, "right": width - box.right}
    where = ", ".join(f"{count} at the {side}" for side, count in sides.items() if count)
    shown = listed(np.asarray(value))
    pixel = border_pixel(value)
    pixels = "" if pixel is None or shown == str(pixel) else f", pixel value {pixel}"
    text = f"theirs is padded with {shown}{pixels} ({where}), {ours}"
    return Difference("padding", f"is padded with {shown}{pixels}", text)


def listed(values: Array) -> str:
    """One number if all channels have the same value, else all of them."""
    numbers = [f"{v:.4g}" for v in values.tolist()]
    return numbers[0] if len(set(numbers)) == 1 else f"({', '.join(numbers)})"
