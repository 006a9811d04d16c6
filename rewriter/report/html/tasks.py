"""Outputs in the form of their task, where it can be told: pictures, boxes on the input, classes, tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rewriter.ir.model import Array
from rewriter.jobs.fix.before import SideBySide
from rewriter.report.html.png import data_uri
from rewriter.report.html.view import Boxes, Image, Words
from rewriter.runtime.figures.pictures import Picture, best_boxes, best_classes, pixels_of


def images_of(picture: Picture, side: SideBySide | None) -> Iterator[Image]:
    """Yields the input, the outputs of original, plain and fixed model, and where the last one differs."""
    height, width = picture.size
    what = f"output {picture.name}, {width} x {height}"
    if side is not None:
        for name, array in side.inputs.items():
            seen = _seen(array, picture.size)
            if seen is not None:
                yield Image(data_uri(seen), f"Input {name}", f"input {name}, {width} x {height}")
    yield Image(data_uri(picture.expected), "Original in FP32", f"{what}, of the original")
    if side is not None and picture.name in side.plain.outputs:
        seen = pixels_of(side.plain.outputs[picture.name], picture.low, picture.high)
        if seen is not None:
            yield Image(data_uri(seen), side.plain.name, f"{what}, with nothing repaired")
    yield Image(data_uri(picture.actual), "Fixed", f"{what}, of the fixed model")
    largest = f"brightest: {picture.largest:.2g}" if picture.largest else "there is none"
    alt = f"Absolute difference of the fixed model, {what}: {largest}"
    yield Image(data_uri(picture.difference), f"Difference of the fixed one, {largest}", alt)


def _seen(array: Array, size: tuple[int, int] | None = None) -> Array | None:
    """An input as pixels; None if it is no image, or one of another shape than `size`."""
    if array.ndim < 3 or array.dtype.kind not in "fu" or not array.size:
        return None
    low, high = float(array.min()), float(array.max())
    pixels = pixels_of(array, low, high)
    if pixels is None or size is None:
        return pixels
    alike = pixels.shape[0] * size[1] - pixels.shape[1] * size[0]
    return pixels if abs(alike) <= max(size) else None


def boxes_of(name: str, side: SideBySide) -> Boxes | None:
    """The best boxes of an output [1, N, 4], or [1, N, 6] with score and class, over the input's picture."""
    inputs = [(array, seen) for array in side.inputs.values() if (seen := _seen(array)) is not None]
    if not inputs or name not in side.expected:
        return None
    array, seen = inputs[0]
    sides = array.shape[-2:] if array.shape[-3] in (1, 3) else array.shape[-3:-1]
    rows = []
    for kind, outputs in zip(
        ("was", "plain", "fixed"), (side.expected, side.plain.outputs, side.fixed.outputs), strict=True
    ):
        best = best_boxes(name, outputs)
        if best is not None:
            rows.append((kind, best))
    if not rows or rows[0][0] != "was":
        return None
    pixels = np.abs(rows[0][1]).max(initial=0.0) > 2.0  # else shares of the picture's sides
    spread = 1.0 / np.tile(sides[::-1], 2) if pixels else np.ones(4)
    corners = bool((rows[0][1][:, 2:4] > rows[0][1][:, :2]).all())  # else centre, width and height
    height, width = seen.shape[:2]
    drawn = [(kind, _rectangles(best * spread, corners, width, height)) for kind, best in rows]
    alt = f"The {len(rows[0][1])} best boxes of {name}: original, plain and fixed"
    return Boxes(data_uri(seen), width, height, drawn, alt)


def _rectangles(
    rows: Array, corners: bool, width: int, height: int
) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height in pixels of the picture."""
    found = []
    for a, b, c, d in (rows * [width, height, width, height]).tolist():
        x, y, w, h = (a, b, c - a, d - b) if corners else (a - c / 2, b - d / 2, c, d)
        found.append((round(x, 1), round(y, 1), round(max(w, 0.0), 1), round(max(h, 0.0), 1)))
    return found


def words_of(output: str, side: SideBySide) -> Words:
    """The best classes or tokens of each model, each with True where it is the original's."""
    models = (
        ("Original", side.expected),
        (side.plain.name, side.plain.outputs),
        ("Fixed", side.fixed.outputs),
    )
    chosen = [(name, best_classes(outputs[output])) for name, outputs in models if output in outputs]
    return [
        (name, [(word, word == was) for word, was in zip(words, chosen[0][1], strict=False)])
        for name, words in chosen
    ]
