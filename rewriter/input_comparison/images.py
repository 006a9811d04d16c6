"""Relates two arrays of images of one size: layout, order of channels and scale, found together.

A line is fitted to each channel where both have content. Of explanations that fit equally well, the simplest
wins. Scalings bring pixels of 0..255 into a network's range; two of them may explain a fit.
"""

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


Pair = tuple[Scaling, Scaling]  # scalings of ours and of theirs


def between(pair: Pair, order: tuple[int, ...]) -> tuple[Array, Array]:
    """Factor and offset that turn our scaling into theirs, in the order of their channels."""
    mine, other = (scaling.affine(len(order)) for scaling in pair)
    factor = other[0] / mine[0][list(order)]
    return factor, other[1] - mine[1][list(order)] * factor


def scalings(fit: Fit, spans: Array) -> Pair | None:
    """The two usual scalings that explain a fit, or None; `spans` of ours [channels, 2] have no outliers."""
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


MOST_CHANNELS = 4  # channels of RGBA: an axis of at most this length counts as the axis of channels
LEAST_SIDE = 8  # shortest height or width: fewer pixels do not tell one relation from another

RELATED = 0.3
"""Largest unexplained share of the variance between two versions of one image. Unrelated photographs leave
more than 0.8; another interpolation leaves less than 0.1."""

SIMPLER = 1.2  # ratio of unexplained variances up to which the simpler of two explanations wins
SAMPLE = 4  # images of a batch that the search uses; its result is measured on all of them
NOISE = 1e-7  # unexplained share of the variance that float32 arithmetic explains

Window = tuple[slice, slice]  # rows and columns


@dataclass(frozen=True)
class Relation:
    """How theirs comes from ours; `axes` are the layouts of ours and theirs, as letters N, C, H, W."""

    axes: tuple[str, str]
    fit: Fit

    def sides(self, ours: Array, theirs: Array) -> tuple[Array, Array]:
        """Both as [N, C, H, W]."""
        return canonical(ours, self.axes[0]), canonical(theirs, self.axes[1])


def relation(ours: Array, theirs: Array) -> Relation | None:
    """The simplest good relation; None if they are no images, differ in size, or show different things."""
    relations = []
    for axes in axes_pairs(ours.shape, theirs.shape):
        pairs = zip((ours, theirs), axes, strict=True)
        sides = [canonical(array, order)[:SAMPLE].astype(np.float64) for array, order in pairs]
        if sides[0].shape == sides[1].shape and all(np.isfinite(side).all() for side in sides):
            window = common(*sides)
            relations.append(Relation(axes, fitted(*(side[..., *window] for side in sides))))
    least = min((r.fit.unexplained for r in relations), default=1.0)
    good = [r for r in relations if r.fit.unexplained <= min(SIMPLER * least + NOISE, RELATED)]
    simplest = sorted(good, key=lambda r: (r.axes[0] != r.axes[1], not r.fit.in_order, r.fit.unexplained))
    return next(iter(simplest), None)


def axes_pairs(ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[str, str]]:
    """Layouts of both shapes in which batch and channels agree, equal layouts first."""

    def sizes(shape: tuple[int, ...], axes: str) -> list[int]:
        return [shape[axes.index(letter)] if letter in axes else 1 for letter in "NC"]

    pairs = itertools.product(layouts(ours), layouts(theirs))
    alike = (pair for pair in pairs if sizes(ours, pair[0]) == sizes(theirs, pair[1]))
    return sorted(alike, key=lambda pair: pair[0] != pair[1])


def layouts(shape: tuple[int, ...]) -> list[str]:
    """Possible layouts of images of this shape, the usual one first."""
    usual = {4: ["NCHW", "NHWC"], 3: ["CHW", "HWC"], 2: ["HW"]}.get(len(shape), [])
    images = [axes for axes in usual if "C" not in axes or shape[axes.index("C")] <= MOST_CHANNELS]
    images = images or usual[:1] * (len(shape) == 4)
    return [axes for axes in images if min(shape[axes.index("H")], shape[axes.index("W")]) >= LEAST_SIDE]


def canonical(array: Array, axes: str) -> Array:
    """The array as [N, C, H, W], a view; missing axes have size 1."""
    moved = array.transpose([axes.index(letter) for letter in "NCHW" if letter in axes])
    return moved[tuple(slice(None) if letter in axes else None for letter in "NCHW")]


def content(images: Array) -> Window:
    """The window of images [N, C, H, W] without borders that have one value per channel in all of them."""
    after = (images != images[..., :1, :1]).any(axis=(0, 1))
    before = (images != images[..., -1:, -1:]).any(axis=(0, 1))
    if not (after.any() and before.any()):
        return whole(images)
    (top, left), (bottom, right) = np.argwhere(after).min(axis=0), np.argwhere(before).max(axis=0) + 1
    return slice(int(top), int(bottom)), slice(int(left), int(right))


def whole(images: Array) -> Window:
    return slice(0, images.shape[-2]), slice(0, images.shape[-1])


def common(ours: Array, theirs: Array) -> Window:
    """The window in which both have content; all of both if there is none."""
    (high, wide), (other_high, other_wide) = content(ours), content(theirs)
    rows = slice(max(high.start, other_high.start), min(high.stop, other_high.stop))
    columns = slice(max(wide.start, other_wide.start), min(wide.stop, other_wide.stop))
    both = rows.start < rows.stop and columns.start < columns.stop
    return (rows, columns) if both else whole(ours)


def standard(rows: Array) -> Array:
    """The rows at mean 0 and deviation 1; rows of one value at 0."""
    deviation = rows.std(axis=1, keepdims=True)
    return np.asarray((rows - rows.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0))


def fitted(ours: Array, theirs: Array) -> Fit:
    """The channel order and, by least squares, the affine relation of two [N, C, H, W] of one size."""
    mine, other = (side.swapaxes(0, 1).reshape(side.shape[1], -1) for side in (ours, theirs))
    order = _order(mine, other)
    means = mine[list(order)].mean(axis=1), other.mean(axis=1)
    x, y = mine[list(order)] - means[0][:, None], other - means[1][:, None]
    squares = np.sum(x * x, axis=1)
    factor = np.where(squares > 0, np.sum(x * y, axis=1), 1.0) / np.where(squares > 0, squares, 1.0)
    left, spread = np.mean((y - factor[:, None] * x) ** 2, axis=1), np.mean(y * y, axis=1)
    unexplained = float(np.mean(left / np.where(spread > 0, spread, 1.0)))
    return Fit(order, factor, means[1] - factor * means[0], unexplained)


def _order(mine: Array, other: Array) -> tuple[int, ...]:
    """Our channel for each of theirs; unchanged if no other order explains more."""
    count = len(mine)
    same = tuple(range(count))
    if not 1 < count <= MOST_CHANNELS:
        return same
    left = np.maximum(1.0 - (standard(other) @ standard(mine).T / mine.shape[1]) ** 2, 0.0)
    costs = {o: sum(left[c, source] for c, source in enumerate(o)) for o in itertools.permutations(same)}
    allowed = 1.1 * min(costs.values()) + NOISE * count
    usual = (same, (2, 1, 0, *same[3:])) if count >= 3 else (same,)
    return next((o for o in usual if costs[o] <= allowed), min(costs, key=lambda o: costs[o]))
