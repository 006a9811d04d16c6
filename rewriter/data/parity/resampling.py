"""Resizes images as OpenCV, Pillow and PyTorch document it: separable, one matrix for each axis.

Coordinates and kernels are those of the ONNX operator Resize, of Pillow's `Resample.c` (kernels that grow
with the scale: antialiasing) and of `torch.nn.functional.interpolate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from rewriter.model import Array

Coordinates = Literal["half-pixel", "align-corners", "floor", "centre"]

SHARP, SOFT = -0.75, -0.5
"""The parameter of the cubic kernel: OpenCV's and PyTorch's, and Pillow's and antialiasing PyTorch's."""


@dataclass(frozen=True)
class Method:
    """One way to resize.

    Attributes:
        kernel: In words: `bilinear`, `nearest` ...
        antialias: True if the kernel grows with the scale, so that every pixel counts.
        coordinates: Where pixels of the result lie in the source; for `nearest`, how they are rounded.
        calls: The line of each library that does this, with `size` as (height, width).
    """

    kernel: str
    antialias: bool
    coordinates: Coordinates
    calls: tuple[str, ...]


def _cv2(flag: str) -> str:
    return f"cv2.resize(image, size[::-1], interpolation=cv2.{flag})"


def _pillow(flag: str) -> str:
    return f"image.resize(size[::-1], Image.{flag})"


def _torch(mode: str, **more: bool) -> str:
    words = "".join(f", {name}={value}" for name, value in more.items())
    return f'F.interpolate(image, size, mode="{mode}"{words})'


METHODS = (
    Method("bilinear", False, "half-pixel", (_cv2("INTER_LINEAR"), _torch("bilinear", align_corners=False))),
    Method("bilinear", True, "half-pixel", (_pillow("BILINEAR"), _torch("bilinear", antialias=True))),
    Method("bilinear", False, "align-corners", (_torch("bilinear", align_corners=True),)),
    Method("nearest", False, "floor", (_cv2("INTER_NEAREST"), _torch("nearest"))),
    Method("nearest", False, "centre", (_pillow("NEAREST"), _torch("nearest-exact"))),
    Method("bicubic", False, "half-pixel", (_cv2("INTER_CUBIC"), _torch("bicubic", align_corners=False))),
    Method("bicubic", True, "half-pixel", (_pillow("BICUBIC"), _torch("bicubic", antialias=True))),
    Method("bicubic", False, "align-corners", (_torch("bicubic", align_corners=True),)),
    Method("area", True, "half-pixel", (_cv2("INTER_AREA"),)),
    Method("area", True, "floor", (_torch("area"),)),
    Method("lanczos", True, "half-pixel", (_pillow("LANCZOS"),)),
)
"""What preprocessing uses; the usual ones first, which win where several give the same."""


def resize(image: Array, size: tuple[int, int], method: Method) -> Array:
    """The image [H, W, C] at another height and width, in float64 and not rounded."""
    rows = _along_first(image.astype(np.float64), size[0], method)
    return _along_first(rows.swapaxes(0, 1), size[1], method).swapaxes(0, 1)


def _along_first(image: Array, size: int, method: Method) -> Array:
    """The image with `size` rows; tap by tap, since a row reads few rows of a large source."""
    pixels, weights = _taps(len(image), size, method)
    result = np.zeros((size, *image.shape[1:]))
    for tap in range(pixels.shape[1]):
        result += weights[:, tap, None, None] * image[pixels[:, tap]]
    return result


@lru_cache(maxsize=256)
def _taps(source: int, size: int, method: Method) -> tuple[Array, Array]:
    """The pixels of the source that a pixel of the result reads, and their weights: both [size, taps]."""
    dense = _dense(source, size, method)
    used = dense != 0.0
    first = used.argmax(axis=1)
    span = int((source - used[:, ::-1].argmax(axis=1) - first).max())
    pixels = np.minimum(first, source - span)[:, None] + np.arange(span)
    return pixels, np.take_along_axis(dense, pixels, axis=1)


def _dense(source: int, size: int, method: Method) -> Array:
    if method.kernel == "nearest":
        shift = 0.5 if method.coordinates == "centre" else 0.0
        picked = np.floor((np.arange(size) + shift) * source / size).astype(int)
        return np.asarray(np.eye(source)[np.minimum(picked, source - 1)])
    if method.kernel == "area":
        return _areas(source, size, whole=method.coordinates == "floor")
    if method.antialias:
        return _grown(source, size, *_KERNELS[method.kernel])
    return _interpolated(source, size, method)


def _interpolated(source: int, size: int, method: Method) -> Array:
    """Two or four taps round each place; the border is repeated."""
    if method.coordinates == "align-corners":
        places = np.arange(size) * ((source - 1) / max(1, size - 1))
    else:
        places = (np.arange(size) + 0.5) * (source / size) - 0.5
    found = np.zeros((size, source))
    first = np.floor(places).astype(int)
    if method.kernel == "bilinear":
        taps: tuple[int, ...] = (0, 1)
        kernel: Callable[[Array], Array] = _triangle
        places = np.maximum(places, 0.0)
        first = np.floor(places).astype(int)
    else:
        taps, kernel = (-1, 0, 1, 2), _cubic(SHARP)
    for tap in taps:
        weight = kernel(places - (first + tap))
        np.add.at(found, (np.arange(size), np.clip(first + tap, 0, source - 1)), weight)
    return found


def _areas(source: int, size: int, *, whole: bool) -> Array:
    """Means over the pixels that a pixel of the result covers, in parts or wholly (adaptive pooling)."""
    edges = np.arange(size + 1) * (source / size)
    low, high = edges[:-1, None], edges[1:, None]
    if whole:
        low, high = np.floor(low + 1e-9), np.ceil(high - 1e-9)
    pixels = np.arange(source)[None]
    covered = np.clip(np.minimum(high, pixels + 1) - np.maximum(low, pixels), 0.0, None)
    return np.asarray(covered / covered.sum(axis=1, keepdims=True))


def _grown(source: int, size: int, kernel: Callable[[Array], Array], radius: float) -> Array:
    """Kernels as wide as the scale, cut off at the borders."""
    scale = max(1.0, source / size)
    centres = (np.arange(size) + 0.5) * (source / size)
    support = radius * scale
    first = np.floor(np.maximum(centres - support + 0.5, 0.0))[:, None]
    last = np.floor(np.minimum(centres + support + 0.5, source))[:, None]
    pixels = np.arange(source)[None]
    weights = kernel((pixels + 0.5 - centres[:, None]) / scale)
    weights = np.where((pixels >= first) & (pixels < last), weights, 0.0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _triangle(x: Array) -> Array:
    return np.asarray(np.maximum(0.0, 1.0 - np.abs(x)))


def _cubic(a: float) -> Callable[[Array], Array]:
    """Keys' cubic convolution kernel."""

    def kernel(x: Array) -> Array:
        x = np.abs(x)
        inner = ((a + 2) * x - (a + 3)) * x * x + 1
        outer = ((x - 5) * x + 8) * x * a - 4 * a
        return np.asarray(np.where(x < 1, inner, np.where(x < 2, outer, 0.0)))

    return kernel


def _lanczos(x: Array) -> Array:
    return np.asarray(np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0))


_KERNELS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic(SOFT), 2.0),
    "lanczos": (_lanczos, 3.0),
}
"""Kernels that grow with the scale, each with its radius."""


def shorter_side(height: int, width: int, side: int) -> tuple[int, int]:
    """The size at which the shorter side has `side` pixels, cut off as in torchvision."""
    if height <= width:
        return side, math.floor(side * width / height)
    return math.floor(side * height / width), side
