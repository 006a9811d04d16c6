"""Recognises how an array was made from its photograph, by doing the same with OpenCV and Pillow.

Every way to resize is a line of one of them, which is run on the photograph where that library is installed.
The line that explains most of an array, whatever its channels and scale, is how it was made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.base.errors import InputsError, UsageError, shortened
from rewriter.input_comparison.comparison import ArrayComparison, Difference
from rewriter.input_comparison.explain import ASK, in_words, scaled
from rewriter.input_comparison.relation import (
    Relation,
    canonical,
    content,
    extent,
    fitted,
    layouts,
    standard,
    whole,
)
from rewriter.input_comparison.scales import Fit, border_pixel
from rewriter.ir.model import Array
from rewriter.runtime.inputs.arranging import as_array, is_array
from rewriter.runtime.inputs.images import opened

RECOGNISED = 0.02
"""Largest share of the variance that the best candidate leaves: another interpolation leaves less than 0.1, a
line of code that is right less than 1e-3."""

EQUAL, EXACT = 1.3, 2e-6
"""Ratio of unexplained shares up to which the usual method wins; and a share that counts as zero: rounding to
whole pixels leaves some 1e-5 of the variance."""

RATIOS = (1.0, 256 / 224, 1 / 0.9, 1 / 0.95, 1 / 0.96, 232 / 224, 236 / 224, 248 / 224, 272 / 224)
"""Shorter side before a centre crop, over the crop: 224 of 256 and other usual ratios, from timm."""

LIBRARIES = {"cv2": "cv2", "Image": "PIL.Image"}
"""The module of each name in the lines below."""

METHODS = {
    "bilinear": "cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)",
    "bilinear with antialiasing": "image.resize(size[::-1], Image.BILINEAR)",
    "nearest": "cv2.resize(image, size[::-1], interpolation=cv2.INTER_NEAREST)",
    "nearest to the centre": "image.resize(size[::-1], Image.NEAREST)",
    "bicubic": "cv2.resize(image, size[::-1], interpolation=cv2.INTER_CUBIC)",
    "bicubic with antialiasing": "image.resize(size[::-1], Image.BICUBIC)",
    "area": "cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA)",
    "lanczos with antialiasing": "image.resize(size[::-1], Image.LANCZOS)",
}
"""Resizing methods of preprocessing code, the usual ones first, which win where several give the same."""


def photographs(source: Any) -> list[Array]:
    """The photographs as [H, W, 3] in uint8, RGB.

    Args:
        source: A file, a folder (in the order of names), an array, a picture of Pillow, or a list of these.

    Raises:
        InputsError: a file cannot be read, or is no photograph; Pillow is not installed.
        UsageError: it is none of these.
    """
    if isinstance(source, (list, tuple)):
        return [pixels for part in source for pixels in photographs(part)]
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.exists():
            what = "no such file or folder"
            raise InputsError(what, where=str(path), hint="name the photographs, in order")
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        return [np.asarray(opened(file)) for file in files]
    if not is_array(source) and not hasattr(source, "convert"):
        hint = "give a path, a uint8 array [H, W, 3], or a list of either, one for each sample"
        raise UsageError(f"it cannot be {shortened(source)}", option="images", hint=hint)
    pixels = np.asarray(as_array(source))
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        what = f"it holds {pixels.dtype} {list(pixels.shape)}, not uint8 [H, W, 3]"
        raise InputsError(what, option="images", hint="save it as RGB")
    return [pixels]


@dataclass(frozen=True)
class Origin:
    """How an array [H, W] was made: `size` before a crop or border, and the photograph's place in it.

    `fit`: the array's channels from R, G, B in 0..255. `border`: its pixel value, if there is one.
    """

    axes: str
    size: tuple[int, int]
    box: tuple[slice, slice]
    method: str
    fit: Fit
    border: int | None

    @property
    def text(self) -> str:
        size = f"{self.size[0]}x{self.size[1]}"
        if self.size != extent(self.box):
            return f"resized to {size}, then cropped in the middle"
        if self.border is None:
            return f"stretched to {size}"
        start = f"row {self.box[0].start}, column {self.box[1].start}"
        return f"letterboxed: resized to {size}, padded from {start} with pixel value {self.border}"


def with_origins(comparison: ArrayComparison, image: Array, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison with how each side was made from the photograph; a note if one is not recognised."""
    mine, other = recognise(image, ours), recognise(image, theirs)
    notes = tuple(note for note in comparison.notes if note != ASK)
    if mine is None or other is None:
        who = " and ".join(name for name, origin in (("ours", mine), ("theirs", other)) if origin is None)
        note = f"not recognised in the photograph: {who}, mirrored, cropped elsewhere, or of another one"
        return replace(comparison, notes=(*notes, note))
    rest = comparison.differences
    if mine.text != other.text:  # not the same pixels: each side is compared by the photograph
        order = [mine.fit.order.index(channel) for channel in other.fit.order]
        factor = other.fit.factor / mine.fit.factor[order]
        offset = other.fit.offset - mine.fit.offset[order] * factor
        left = max(mine.fit.unexplained, other.fit.unexplained)
        relation = Relation((mine.axes, other.axes), Fit(tuple(order), factor, offset, left))
        phrase = f"is {other.text}, not {mine.text}"
        size = Difference("size", phrase, f"theirs {phrase}")
        rest = (*in_words(relation, ours, theirs, scaled(relation, ours, theirs)), size)
    if mine.method != other.method:
        text = f"theirs is as by {METHODS[other.method]}, ours as by {METHODS[mine.method]}"
        rest = tuple(d for d in rest if d.kind not in ("interpolation", "rounding"))
        rest += (Difference("interpolation", f"is resized {other.method}, not {mine.method}", text),)
    lines = (f"{who}: image = {METHODS[o.method]}" for who, o in (("ours", mine), ("theirs", other)))
    return replace(comparison, differences=rest, notes=(*notes, *lines))


def recognise(image: Array, array: Array) -> Origin | None:
    """How the array, one image in any layout, scale and order of channels, was made of [H, W, 3] in uint8.

    Raises:
        InputsError: neither OpenCV nor Pillow is installed.
    """
    there = [name for name, module in LIBRARIES.items() if find_spec(module.partition(".")[0])]
    if not there:
        hint = "pip install pillow, or opencv-python-headless, as the pipeline has it"
        raise InputsError("comparing resizes needs OpenCV or Pillow", option="images", hint=hint)
    shapes = ((axes, canonical(array, axes).astype(np.float64)) for axes in layouts(array.shape))
    axes, target = next((pair for pair in shapes if pair[1].shape[:2] == (1, 3)), ("", np.zeros(0)))
    if not axes or not np.isfinite(target).all():
        return None
    candidates = []
    for method, line in METHODS.items():
        library = next((name for name in there if f"{name}." in line), "")
        for placement in _placements(image, target) if library else ():
            resized = _resized(image, placement, line, library)
            a, b = (standard(pixels.reshape(3, -1)) for pixels in (resized, target[0][:, *placement[1]]))
            share = float(1.0 - ((a @ b.T / a.shape[1]) ** 2).max(axis=0).mean())
            candidates.append((share, method, placement, resized))
    least = min(share for share, *_ in candidates)
    _, method, (size, box), resized = next(c for c in candidates if c[0] <= EQUAL * least + EXACT)
    corner = 0 if box[0].start or box[1].start else -1
    border = None if box == whole(target) else border_pixel(target[0][:, corner, corner])
    fit = fitted(resized[None], target[..., *box])
    return Origin(axes, size, box, method, fit, border) if least <= RECOGNISED else None


Placement = tuple[tuple[int, int], tuple[slice, slice]]
"""Size after the resize, and the place in the array; a larger size is cropped in the middle."""


def _placements(image: Array, target: Array) -> Iterator[Placement]:
    """All of the photograph inside the borders; without borders, also crops of usual ratios."""
    (height, width), (high, wide), box = target.shape[-2:], image.shape[:2], content(target)
    yield extent(box), box
    for ratio in RATIOS if box == whole(target) else ():
        side = round(min(height, width) * ratio)
        exact = side * high / min(high, wide), side * wide / min(high, wide)
        for rows, columns in {(int(exact[0]), int(exact[1])), (round(exact[0]), round(exact[1]))}:
            if rows >= height and columns >= width:
                yield (rows, columns), box


def _resized(image: Array, placement: Placement, line: str, library: str) -> Array:
    """The photograph [3, H, W] at its place, in float64."""
    module, (size, box) = import_module(LIBRARIES[library]), placement
    planes = np.moveaxis(image.astype(np.float32), -1, 0)
    sources = [module.fromarray(plane) if library == "Image" else plane for plane in planes]
    planes = np.stack([np.asarray(eval(line, {library: module, "size": size, "image": s})) for s in sources])
    high, wide = extent(box)
    top, left = (size[0] - high) // 2, (size[1] - wide) // 2
    return planes[:, top : top + high, left : left + wide].astype(np.float64)
