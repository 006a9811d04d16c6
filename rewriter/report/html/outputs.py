"""Outputs in the form of their task: pictures, boxes, masks, waveforms, classes, text ids."""

import base64
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rewriter.ir.model import Array
from rewriter.jobs.fix.before import SideBySide
from rewriter.report.html.render import Section, part
from rewriter.runtime.metrics.pictures import (
    LARGEST_SIDE,
    SMALLEST_SIDE,
    Picture,
    best_boxes,
    best_classes,
    pixels_of,
)
from rewriter.verification.expected import Outputs
from rewriter.verification.verdict import Check

MOST_CLASSES = 256
"""Channels up to which an output [1, C, H, W] may be scores of classes; features often have more."""

SMALLEST_SHARE = 8
"""Sides of a picture in units of its mask's: networks for segmentation give 1/4 or all of it."""

SHORTEST_WAVE = 1024  # samples of the shortest waveform: 64 ms at 16 kHz
SMOOTH = 0.3  # least correlation of neighbours in a waveform; features have none
COLUMNS, HEIGHT = 480, 120.0  # columns and pixels of a drawn waveform

PALETTE = np.random.default_rng(8).integers(40, 236, (MOST_CLASSES, 3)).astype(np.uint8)
"""A colour for each class."""


class Image(NamedTuple):
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


class Wave(NamedTuple):
    """The envelopes of a waveform: a CSS class and an SVG path, each."""

    width: int
    height: float
    lines: Sequence[tuple[str, str]]
    alt: str


Words = Sequence[tuple[str, Sequence[tuple[str, bool]]]]
"""Best classes or tokens by model, each with True where it is the original's."""


MOST = 24  # outputs that are shown; all of them are in the table

PICTURE_BYTES = 1_400_000
"""Length of all data URIs together; one output of 256 x 256 pixels in colour needs up to 1.2 MB."""


def pictures_section(check: Check, side: SideBySide | None = None) -> Iterator[Section]:
    """Yields the section, if an output of a check can be shown; `side` is one sample before and after."""
    same = {entry.name for entry in check.statistics if side is not None and entry.sample == side.sample}
    left, cards = PICTURE_BYTES, list[dict[str, Any]]()
    seen = side is None or any(_seen(array) is not None for array in side.inputs.values())
    pictures = {picture.name: picture for picture in check.pictures}
    if side is not None and not seen:  # [1, tokens, features] of a model without an image look like one, too
        pictures = {name: one for name, one in pictures.items() if side.expected[name].ndim > 3}
    whole = [output for output in check.outputs if not output.of]
    for output in sorted(whole, key=lambda output: (output.passed, -output.excess))[:MOST]:
        picture = pictures.get(output.name)
        images = list(images_of(picture, side if output.name in same else None)) if picture else []
        left -= sum(len(image.uri) for image in images)
        scores = output.same_best is not None or output.probability is not None
        form = form_of(output.name, side, scores) if side is not None and not images else Form()
        left -= sum(len(image.uri) for image in form.images)
        if images or form.title:
            shown = [*images, *form.images] if left >= 0 else []
            cards.append({"name": output.name} | form._asdict() | {"images": shown})
    if cards:
        lead = "The worst sample: the original in FP32, plain FP16, and the fixed model."
        yield Section("pictures", "Outputs side by side", lead, [part("outputs.html", cards=cards)])


class Form(NamedTuple):
    """An output as its task reads it; `title` names the task, "" if none is recognised."""

    title: str = ""
    images: Sequence[Image] = ()
    boxes: Boxes | None = None
    wave: Wave | None = None
    words: Words = ()


def form_of(name: str, side: SideBySide, scores: bool) -> Form:
    """The form of an output in the sample; `scores`: True if it holds scores of classes."""
    array = side.expected[name]
    if boxes := boxes_of(name, side):
        return Form("Boxes with the highest scores", boxes=boxes)
    if masks := list(masks_of(name, side)):
        return Form("Class of each pixel", images=masks)
    boxed = {a.size // 4 for n, a in side.expected.items() if best_boxes(n, side.expected) is not None}
    if array.ndim and (scores or array.dtype.kind in "iu"):
        title = _title_of_words(array, boxed)
        return Form(title, words=words_of(name, side) if title else ())
    if wave := wave_of(name, side) if array.ndim else None:
        return Form("Waveform", wave=wave)
    return Form()


def _title_of_words(array: Array, boxed: Collection[int]) -> str:
    """The meaning of whole numbers or scores; "" for one score of each box. `boxed`: numbers of boxes."""
    numbers, rows = array.dtype.kind in "iu", array.size // array.shape[-1] if array.size else 0
    if array.size in boxed:
        return "Classes of the boxes" if numbers else ""
    if not numbers and rows in boxed:
        return "Best class of each box"
    if array.size == array.shape[0]:
        return "Number of detections" if boxed else "Classes"
    if numbers:
        return "Text ids"
    return "Best classes" if array.ndim < 3 else "Best text id of each position"


class _Model(NamedTuple):
    """The outputs of a model in the sample; `kind` is a CSS class."""

    kind: str
    name: str
    outputs: Outputs


def _models(side: SideBySide) -> tuple[_Model, ...]:
    plain, fixed = side.plain, side.fixed
    original = _Model("was", "Original in FP32", side.expected)
    return original, _Model("plain", plain.name, plain.outputs), _Model("fixed", fixed.name, fixed.outputs)


def masks_of(name: str, side: SideBySide) -> Iterator[Image]:
    """Yields the classes of the pixels as colours, by model, and where the result differs."""
    pictures = [a.shape[-2:] for a in side.inputs.values() if a.ndim > 3 and _seen(a) is not None]
    found = dict[str, Array]()
    for kind, caption, outputs in _models(side):
        classes = classes_of_pixels(outputs[name], pictures) if name in outputs else None
        if classes is None and kind == "was":
            return
        if classes is not None:
            found[kind] = classes
            height, width = classes.shape
            pixels = PALETTE[shrunk(classes).astype(np.int64) % MOST_CLASSES]
            yield Image(data_uri(pixels), caption, f"classes of {name}, {width} x {height}, {caption}")
    if "fixed" in found:
        differs = found["was"] != found["fixed"]
        caption = f"{100 * differs.mean():.2g} % of the pixels have another class in the fixed model"
        yield Image(data_uri(shrunk(differs) * np.uint8(255)), caption, caption)


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
    yield Image(data_uri(picture.difference), f"Difference of the fixed model, {largest}", alt)


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
    """The best boxes of an output over the input's picture, as `best_boxes` finds them."""
    inputs = [(array, seen) for array in side.inputs.values() if (seen := _seen(array)) is not None]
    if not inputs or name not in side.expected:
        return None
    array, seen = inputs[0]
    sides = array.shape[-2:] if array.shape[-3] in (1, 3) else array.shape[-3:-1]
    candidates = ((model.kind, best_boxes(name, model.outputs)) for model in _models(side))
    rows = [(kind, best) for kind, best in candidates if best is not None]
    if not rows or rows[0][0] != "was":
        return None
    pixels = np.abs(rows[0][1]).max(initial=0.0) > 2.0  # else shares of the picture's sides
    spread = 1.0 / np.tile(sides[::-1], 2) if pixels else np.ones(4)
    corners = bool((rows[0][1][:, 2:4] > rows[0][1][:, :2]).all())  # else centre, width and height
    height, width = seen.shape[:2]

    def rectangle(a: float, b: float, c: float, d: float) -> tuple[float, float, float, float]:
        x, y, w, h = (a, b, c - a, d - b) if corners else (a - c / 2, b - d / 2, c, d)
        return round(x, 1), round(y, 1), round(max(w, 0.0), 1), round(max(h, 0.0), 1)

    scale = spread * [width, height, width, height]
    drawn = [(kind, [rectangle(*box) for box in (best * scale).tolist()]) for kind, best in rows]
    alt = f"The {len(rows[0][1])} best boxes of {name}: original, plain and fixed"
    return Boxes(data_uri(seen), width, height, drawn, alt)


def words_of(output: str, side: SideBySide) -> Words:
    """The best classes or tokens of each model, each with True where it is the original's."""
    models = (("Original" if m.kind == "was" else m.name, m.outputs) for m in _models(side))
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


def classes_of_pixels(array: Array, pictures: Sequence[tuple[int, int]]) -> Array | None:
    """The class of each pixel of the first image, [H, W], or None; scores have the aspect of a picture."""
    if array.ndim < 2 or min(array.shape[-2:]) < SMALLEST_SIDE:
        return None
    height, width = array.shape[-2:]
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() < MOST_CLASSES:
        return np.asarray(array.reshape(-1, height, width)[0])
    if array.ndim != 4 or array.dtype.kind != "f" or array.shape[1] not in range(4, MOST_CLASSES + 1):
        return None
    alike = any(h * width == w * height and h <= SMALLEST_SHARE * height for h, w in pictures)
    return np.asarray(np.nan_to_num(array[0]).argmax(axis=0)) if alike else None


def shrunk(pixels: Array) -> Array:
    """Every k-th pixel of [H, W], so that the longer side fits."""
    step = -(-max(pixels.shape) // LARGEST_SIDE)
    return pixels[::step, ::step]


def wave_of(name: str, side: SideBySide) -> Wave | None:
    """The waveform of an output in every model; None if the original's is no waveform."""
    original = side.expected[name]
    if original.ndim == 0 or original.shape[-1] < SHORTEST_WAVE or original.dtype.kind != "f":
        return None
    wave = original.reshape(-1, original.shape[-1])[0].astype(np.float64)
    rows = original.size // original.shape[-1]
    spread = wave.std()
    if rows > 2 * max(1, original.shape[0]) or not np.isfinite(wave).all() or not spread:
        return None
    centred = wave - wave.mean()
    if (centred[1:] * centred[:-1]).mean() < SMOOTH * spread**2 or abs(wave.mean()) > spread:
        return None
    top = float(np.abs(wave).max())
    lines = [(m.kind, _envelope(m.outputs[name], top)) for m in _models(side) if name in m.outputs]
    return Wave(COLUMNS, HEIGHT, lines, f"waveform {name}, {len(wave)} samples: original, plain and fixed")


def _envelope(array: Array, top: float) -> str:
    """One vertical line for each column, from the least to the largest value; NaN is left out."""
    wave = array.reshape(-1, array.shape[-1])[0].astype(np.float64)
    parts = np.array_split(np.nan_to_num(np.clip(wave, -top, top)), min(COLUMNS, len(wave)))
    y = [(HEIGHT / 2 * (1 - part.max() / top), HEIGHT / 2 * (1 - part.min() / top)) for part in parts]
    return "".join(f"M{x + 0.5} {high:.1f}V{max(low, high + 0.5):.1f}" for x, (high, low) in enumerate(y))
