"""Scalings that bring pixels of 0..255 into a network's range, and the two that explain a fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rewriter.ir.model import Array

Constants = tuple[float, ...]


@dataclass(frozen=True)
class Scaling:
    """value = (pixel / divisor - mean) / std, pixels 0..255; mean and std for R, G, B, or one for all.

    Attributes:
        name: The usual name of the constants; "" if they have none.
        reversed: True if the constants are applied to B, G, R.
    """

    divisor: float
    mean: Constants = (0.0,)
    std: Constants = (1.0,)
    name: str = ""
    reversed: bool = False

    @property
    def plain(self) -> bool:
        """True if the mean is 0 and the deviation 1."""
        return self.mean == (0.0,) and self.std == (1.0,)

    @property
    def by_channel(self) -> bool:
        return len(self.mean) > 1 or len(self.std) > 1

    def constants(self, channels: int) -> tuple[Array, Array]:
        """Mean and deviation of each channel, as applied."""
        step = -1 if self.reversed else 1
        mean, std = (np.resize(np.asarray(c, np.float64), channels)[::step] for c in (self.mean, self.std))
        return mean, std

    def affine(self, channels: int) -> tuple[Array, Array]:
        """Factor and offset of each channel: value = pixel * factor + offset."""
        mean, std = self.constants(channels)
        return 1.0 / (self.divisor * std), -mean / std

    @property
    def text(self) -> str:
        """The scaling in words."""
        span = {1.0: "0..255", 255.0: "0..1"}.get(self.divisor, f"divided by {self.divisor:g}")
        order = ", in reverse channel order" if self.reversed else ""
        return f"{self.name}{order}" if self.name else span


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""torchvision.transforms: mean and standard deviation of ImageNet's training set, pixels 0..1."""

CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""openai/CLIP, clip/clip.py."""

CAFFE_MEAN = (123.68, 116.779, 103.939)
"""VGG's means, pixels 0..255, of Caffe's model zoo; in Keras `imagenet_utils` mode "caffe"."""

PIXELS, UNIT = Scaling(1.0), Scaling(255.0)

SCALINGS: tuple[Scaling, ...] = (
    PIXELS,
    UNIT,
    Scaling(255.0, (0.5,), (0.5,), "-1..1 (Inception's mean 0.5 and standard deviation 0.5)"),
    Scaling(255.0, *IMAGENET, "ImageNet's mean and standard deviation"),
    Scaling(255.0, *CLIP, "CLIP's mean and standard deviation"),
    Scaling(1.0, CAFFE_MEAN, (1.0,), "Caffe's mean (123.68, 116.779, 103.939)"),
    Scaling(1.0, *IMAGENET, "ImageNet's mean and standard deviation, not divided by 255 before"),
    Scaling(255.0, IMAGENET[0], (1.0,), "ImageNet's mean without the standard deviation"),
    Scaling(255.0, (0.0,), IMAGENET[1], "ImageNet's standard deviation without the mean"),
    Scaling(1.0, (128.0,), (1.0,), "-128..127"),
    Scaling(65025.0, (0.0,), (1.0,), "divided by 255 twice"),
)
"""The usual ones first: of scalings that explain the data equally well, the first wins."""

PIXEL_SLACK = 6.0
"""Distance of a resampled pixel from 0..255 at most: bicubic and Lanczos kernels overshoot at edges."""

LEAST_CONTRAST = 6.0
"""Smallest span of pixels of 0..255; data in 0..1 read as 0..255 has a smaller one."""

LEAST_STD = 10.0
"""Smallest divisor that counts as a standard deviation of pixels 0..255: photographs have 30 to 80."""

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
        """True if both sides have the channels in the same order."""
        return self.order == tuple(range(len(self.order)))


Pair = tuple[Scaling, Scaling]
"""Scalings of ours and of theirs."""


def scalings(fit: Fit, spans: Array) -> Pair | None:
    """The scalings that explain a fit: two named ones, or one named and one with its own constants.

    Args:
        spans: [channels, 2]: smallest and largest value of ours without outliers, in the order of theirs.
    """
    tolerance = max(4e-3, 0.5 * fit.unexplained**0.5)
    low, high = spans.T
    fitted = np.stack([low * fit.factor + fit.offset, high * fit.factor + fit.offset])
    width = float(np.max(np.abs(fitted[1] - fitted[0]))) or 1.0
    scored: list[tuple[tuple[float, ...], Pair]] = []
    for rank, (mine, other) in enumerate(_pairs(fit)):
        mine_factor, mine_offset = (part[list(fit.order)] for part in mine.affine(len(fit.order)))
        pixels = np.stack([low - mine_offset, high - mine_offset]) / mine_factor
        factor, offset = other.affine(len(fit.order))
        error = float(np.max(np.abs(pixels * factor + offset - fitted))) / width / tolerance
        if _is_pixels(pixels) and error <= 1.0:
            # errors of the same order of magnitude are equal: the usual pair wins
            scored.append(
                ((_misplaced(mine, other, fit), round(np.log2(max(error, 0.25))), rank), (mine, other))
            )
    return min(scored, key=lambda s: s[0])[1] if scored else _own_constants(fit, spans)


def _pairs(fit: Fit) -> list[Pair]:
    """All pairs of scalings, with constants in both orders, the usual first; none that changes nothing."""
    sides = [(rank, s) for rank, one in enumerate(SCALINGS) for s in _both_orders(one, len(fit.order))]
    pairs = itertools.product(sides, sides)
    kept = [(a[0] + a[1].reversed + b[0] + b[1].reversed, a[1], b[1]) for a, b in pairs]
    return [(a, b) for _, a, b in sorted(kept, key=lambda p: p[0]) if a != b or not fit.in_order]


def _both_orders(scaling: Scaling, channels: int) -> Iterator[Scaling]:
    if channels == 3 or not scaling.by_channel:
        yield scaling
    if channels == 3 and scaling.by_channel:
        yield replace(scaling, reversed=True)


def _misplaced(mine: Scaling, other: Scaling, fit: Fit) -> bool:
    """True if the constants of the two sides do not follow the channels, which is less likely."""
    swapped = fit.order == (2, 1, 0)
    return mine.by_channel and other.by_channel and (mine.reversed != other.reversed) != swapped


def _is_pixels(pixels: Array) -> bool:
    inside = pixels.min() >= -PIXEL_SLACK and pixels.max() <= 255.0 + PIXEL_SLACK
    return bool(inside and pixels.max() - pixels.min() >= LEAST_CONTRAST)


def _own_constants(fit: Fit, spans: Array) -> Pair | None:
    """A pair of which one side is 0..255 or 0..1, and the other has a mean and deviation without a name."""
    if not np.all(fit.factor > 0):
        return None
    mine = plain_scaling(spans)
    if mine is not None:
        return mine, _custom(mine.divisor, -fit.offset / fit.factor, 1.0 / fit.factor)
    other = plain_scaling(spans * fit.factor[:, None] + fit.offset[:, None])
    if other is not None:  # ours = (theirs - offset) / factor, by our channels
        back = np.argsort(fit.order)
        return _custom(other.divisor, fit.offset[back], fit.factor[back]), other
    return None


def plain_scaling(ends: Array) -> Scaling | None:
    """The scaling 0..1 or 0..255, if the values lie in it."""
    low, high = float(ends.min()), float(ends.max())
    for scaling, most, slack in ((UNIT, 1.0, 0.03), (PIXELS, 255.0, PIXEL_SLACK)):
        if low >= -slack and high <= most + slack:
            return scaling
    return None


def _custom(divisor: float, mean: Array, std: Array) -> Scaling:
    """(pixel / divisor - mean) / std, for pixels 0..1 where that gives a usual deviation."""
    if divisor == 1.0 and float(std.min()) >= LEAST_STD:
        divisor, mean, std = 255.0, mean / 255.0, std / 255.0
    texts = [listed(np.round(part, 6)) for part in (mean, std)]
    after = "" if divisor == 255.0 else " (of pixels 0..255)"
    deviation = "" if texts[1] == "1" else f" and standard deviation {texts[1]}"
    parts = [tuple(float(f"{v:.7g}") for v in part.tolist()) for part in (mean, std)]
    return Scaling(divisor, parts[0], parts[1], f"mean {texts[0]}{deviation}{after}")


def border_pixel(values: Array) -> int | None:
    """The pixel of 0..255 that a usual scaling turns into a border's values; None if there is none."""
    for scaling in (s for one in SCALINGS for s in _both_orders(one, len(values))):
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
