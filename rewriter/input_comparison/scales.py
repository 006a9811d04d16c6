"""Scalings that bring pixels of 0..255 into a network's range, and the two that explain a fit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from rewriter.ir.model import Array

Constants = tuple[float, ...]


@dataclass(frozen=True)
class Scaling:
    """value = (pixel / divisor - mean) / std, pixels 0..255; mean and std by channel, or one for all.

    `name`: the usual name of the constants; "" if they have none.
    """

    divisor: float
    mean: Constants = (0.0,)
    std: Constants = (1.0,)
    name: str = ""

    @property
    def plain(self) -> bool:
        return self.mean == (0.0,) and self.std == (1.0,)

    @property
    def channels(self) -> int:
        return max(len(self.mean), len(self.std))

    def affine(self, channels: int) -> tuple[Array, Array]:
        """Factor and offset of each channel: value = pixel * factor + offset."""
        mean, std = (np.resize(np.asarray(c, np.float64), channels) for c in (self.mean, self.std))
        return 1.0 / (self.divisor * std), -mean / std

    def __str__(self) -> str:
        return self.name or {1.0: "0..255", 255.0: "0..1"}.get(self.divisor, f"divided by {self.divisor:g}")


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""torchvision.transforms: mean and standard deviation of ImageNet's training set, pixels 0..1."""

CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""openai/CLIP, clip/clip.py."""

CAFFE_MEAN = (123.68, 116.779, 103.939)
"""VGG's means, pixels 0..255, of Caffe's model zoo; in Keras `imagenet_utils` mode "caffe"."""

BY_CHANNEL = (
    Scaling(255.0, *IMAGENET, "ImageNet's mean and standard deviation"),
    Scaling(255.0, *CLIP, "CLIP's mean and standard deviation"),
    Scaling(1.0, CAFFE_MEAN, (1.0,), "Caffe's mean (123.68, 116.779, 103.939)"),
    Scaling(1.0, *IMAGENET, "ImageNet's mean and standard deviation, not divided by 255 before"),
)
SCALINGS = (
    Scaling(1.0),
    Scaling(255.0),
    Scaling(255.0, (0.5,), (0.5,), "-1..1 (Inception's mean 0.5 and standard deviation 0.5)"),
    *BY_CHANNEL,
    Scaling(1.0, (128.0,), (1.0,), "-128..127"),
    Scaling(65025.0, (0.0,), (1.0,), "divided by 255 twice"),
    *(
        Scaling(s.divisor, s.mean[::-1], s.std[::-1], f"{s.name}, in reverse channel order")
        for s in BY_CHANNEL
    ),
)
"""The usual ones first: of scalings that explain the data equally well, the first wins."""

PIXEL_SLACK = 6.0
"""Distance of a resampled pixel from 0..255 at most: bicubic and Lanczos kernels overshoot at edges."""

LEAST_CONTRAST = 6.0
"""Smallest span of pixels of 0..255; data in 0..1 read as 0..255 has a smaller one."""

WHOLE_PIXEL = 0.06
"""Deviation of a border's value from a whole pixel: FP16 rounds 2.6, white in ImageNet's scale, by 0.06."""


@dataclass(frozen=True)
class Fit:
    """theirs = ours[order] * factor + offset for each of their channels.

    `order[c]` is our channel of their channel `c`; `unexplained` is the share of their variance that is left.
    """

    order: tuple[int, ...]
    factor: Array
    offset: Array
    unexplained: float

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))


Pair = tuple[Scaling, Scaling]
"""Scalings of ours and of theirs."""


def between(pair: Pair, order: tuple[int, ...]) -> tuple[Array, Array]:
    """Factor and offset that turn our scaling into theirs, in the order of their channels."""
    mine, other = (scaling.affine(len(order)) for scaling in pair)
    factor = other[0] / mine[0][list(order)]
    return factor, other[1] - mine[1][list(order)] * factor


def scalings(fit: Fit, spans: Array) -> Pair | None:
    """The two usual scalings that explain a fit; None if there are none.

    Args:
        spans: [channels, 2]: smallest and largest value of ours without outliers, in the order of theirs.
    """
    tolerance = max(4e-3, 0.5 * fit.unexplained**0.5)
    fitted = spans.T * fit.factor + fit.offset
    width = float(np.max(np.abs(fitted[1] - fitted[0]))) or 1.0
    usual = [(rank, s) for rank, s in enumerate(SCALINGS) if s.channels in (1, len(fit.order))]
    scored: list[tuple[tuple[float, int], Pair]] = []
    for (i, mine), (j, other) in itertools.product(usual, usual):
        if mine == other and fit.in_order:
            continue
        mine_factor, mine_offset = (part[list(fit.order)] for part in mine.affine(len(fit.order)))
        pixels = (spans.T - mine_offset) / mine_factor
        factor, offset = between((mine, other), fit.order)
        error = float(np.max(np.abs(spans.T * factor + offset - fitted))) / width / tolerance
        inside = pixels.min() >= -PIXEL_SLACK and pixels.max() <= 255.0 + PIXEL_SLACK
        if inside and np.ptp(pixels) >= LEAST_CONTRAST and error <= 1.0:
            # errors of the same order of magnitude are equal: the usual pair wins
            scored.append(((round(np.log2(max(error, 0.25))), i + j), (mine, other)))
    return min(scored, key=lambda s: s[0])[1] if scored else None


def border_pixel(values: Array) -> int | None:
    """The pixel of 0..255 that a usual scaling turns into a border's values; None if there is none."""
    for scaling in (s for s in SCALINGS if s.channels in (1, len(values))):
        factor, offset = scaling.affine(len(values))
        pixels = (values - offset) / factor
        pixel = round(float(pixels[0]))
        if 0 <= pixel <= 255 and float(np.max(np.abs(pixels - pixel))) <= WHOLE_PIXEL:
            return pixel
    return None


def listed(values: Array) -> str:
    """One number if all channels have the same value, else all of them."""
    numbers = [f"{v:.4g}" for v in values.tolist()]
    return numbers[0] if len(set(numbers)) == 1 else f"({', '.join(numbers)})"
