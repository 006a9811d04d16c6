"""Outputs as masks and as waveforms, where their shape and values say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.metrics.pictures import LARGEST_SIDE, SMALLEST_SIDE

MOST_CLASSES = 256
"""Channels up to which an output [1, C, H, W] may be scores of classes; features often have more."""

SMALLEST_SHARE = 8
"""Sides of a picture in units of its mask's: networks for segmentation give 1/4 or all of it."""

SHORTEST_WAVE = 1024
"""Samples of the shortest waveform: 64 ms at 16 kHz."""

SMOOTH = 0.3
"""Least correlation of neighbours in a waveform; features have none."""

COLUMNS, HEIGHT = 480, 120.0
"""Columns and pixels of a drawn waveform."""

PALETTE = np.random.default_rng(8).integers(40, 236, (MOST_CLASSES, 3)).astype(np.uint8)
"""A colour for each class."""


class Wave(NamedTuple):
    """The envelopes of a waveform: a CSS class and an SVG path, each."""

    width: int
    height: float
    lines: Sequence[tuple[str, str]]
    alt: str


def classes_of_pixels(array: Array, pictures: Sequence[tuple[int, int]]) -> Array | None:
    """The class of each pixel of the first image, [H, W]; None if the output is no map of classes.

    Args:
        pictures: Heights and widths of the inputs that are images: scores have the aspect of one.
    """
    if array.ndim < 2 or min(array.shape[-2:]) < SMALLEST_SIDE:
        return None
    height, width = array.shape[-2:]
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() < MOST_CLASSES:
        return np.asarray(array.reshape(-1, height, width)[0])
    if array.ndim != 4 or array.dtype.kind != "f" or array.shape[1] not in range(4, MOST_CLASSES + 1):
        return None
    alike = any(h * width == w * height and h <= SMALLEST_SHARE * height for h, w in pictures)
    return np.asarray(np.nan_to_num(array[0]).argmax(axis=0)) if alike else None


def mask_pixels(classes: Array) -> Array:
    """A map of classes as colours, [H, W, 3]."""
    return PALETTE[shrunk(classes).astype(np.int64) % MOST_CLASSES]


def shrunk(pixels: Array) -> Array:
    """Every k-th pixel of [H, W], so that the longer side fits."""
    step = -(-max(pixels.shape) // LARGEST_SIDE)
    return pixels[::step, ::step]


def wave_of(name: str, models: Mapping[str, Mapping[str, Array]]) -> Wave | None:
    """The waveform of an output in every model, by CSS class; None if the first of them is no waveform."""
    original = next(iter(models.values()))[name]
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
    lines = [(kind, _envelope(outputs[name], top)) for kind, outputs in models.items() if name in outputs]
    return Wave(COLUMNS, HEIGHT, lines, f"waveform {name}, {len(wave)} samples: original, plain and fixed")


def _envelope(array: Array, top: float) -> str:
    """One vertical line for each column, from the least to the largest value; NaN is left out."""
    wave = array.reshape(-1, array.shape[-1])[0].astype(np.float64)
    parts = np.array_split(np.nan_to_num(np.clip(wave, -top, top)), min(COLUMNS, len(wave)))
    y = [(HEIGHT / 2 * (1 - part.max() / top), HEIGHT / 2 * (1 - part.min() / top)) for part in parts]
    return "".join(f"M{x + 0.5} {high:.1f}V{max(low, high + 0.5):.1f}" for x, (high, low) in enumerate(y))
