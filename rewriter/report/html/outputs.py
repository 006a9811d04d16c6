"""Outputs in the form of their task, if it is recognised: pictures, boxes on the input, classes, tokens."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rewriter.ir.model import Array
from rewriter.jobs.fix.before import SideBySide
from rewriter.report.html.render import Section, part
from rewriter.runtime.metrics.pictures import Picture, best_boxes, best_classes, pixels_of
from rewriter.verification.verdict import Check


class Image(NamedTuple):
    """A picture as a data URI."""

    uri: str
    caption: str
    alt: str


class Boxes(NamedTuple):
    """Boxes of detections over a picture: a CSS class, and left, top, width and height, each."""

    uri: str
    width: int
    height: int
    rows: Sequence[tuple[str, Sequence[tuple[float, float, float, float]]]]
    alt: str


Words = Sequence[tuple[str, Sequence[tuple[str, bool]]]]
"""Best classes or tokens by model, each with True where it is the original's."""


MOST = 24
"""Outputs that are shown; all of them are in the table."""

PICTURE_BYTES = 1_400_000
"""Length of all data URIs together; one output of 256 x 256 pixels in colour needs up to 1.2 MB."""


def pictures_section(check: Check, side: SideBySide | None = None) -> Iterator[Section]:
    """Yields the section, if an output of a check can be shown; `side` is one sample before and after."""
    same = {entry.name for entry in check.statistics if side is not None and entry.sample == side.sample}
    left, cards = PICTURE_BYTES, list[dict[str, object]]()
    pictures = {picture.name: picture for picture in check.pictures}
    whole = [output for output in check.outputs if not output.of]
    for output in sorted(whole, key=lambda output: (output.passed, -output.excess))[:MOST]:
        picture = pictures.get(output.name)
        images = list(images_of(picture, side if output.name in same else None)) if picture else []
        left -= sum(len(image.uri) for image in images)
        boxes = boxes_of(output.name, side) if side is not None else None
        words: Words = ()
        if side is not None and boxes is None and side.expected[output.name].ndim:
            scores = output.same_best is not None or output.probability is not None
            whole_numbers = side.expected[output.name].dtype.kind in "iu"
            words = words_of(output.name, side) if scores or whole_numbers else ()
        if images or boxes or words:
            shown = images if left >= 0 else []
            cards.append({"name": output.name, "images": shown, "boxes": boxes, "words": words})
    if cards:
        lead = "The worst sample: the original in FP32, plain FP16, and the fixed model."
        yield Section("pictures", "Outputs side by side", lead, [part("outputs.html", cards=cards)])


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
    models = {"was": side.expected, "plain": side.plain.outputs, "fixed": side.fixed.outputs}
    candidates = ((kind, best_boxes(name, outputs)) for kind, outputs in models.items())
    rows = [(kind, best) for kind, best in candidates if best is not None]
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
    boxes = []
    for a, b, c, d in (rows * [width, height, width, height]).tolist():
        x, y, w, h = (a, b, c - a, d - b) if corners else (a - c / 2, b - d / 2, c, d)
        boxes.append((round(x, 1), round(y, 1), round(max(w, 0.0), 1), round(max(h, 0.0), 1)))
    return boxes


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


def data_uri(pixels: Array) -> str:
    """Returns an image of [height, width] or [height, width, 3], uint8."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")


def png(pixels: Array) -> bytes:
    """Returns the bytes of a PNG file with 8 bits per channel (PNG specification, third edition)."""
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels, np.uint8).reshape(height, -1)
    filtered = np.pad(rows, ((0, 0), (1, 0)))  # filter 0 of every line
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)  # RGB or grey
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
