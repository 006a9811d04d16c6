"""Parts of an output: slices of another scale than the rest, each judged against its own.

One relative error over boxes in pixels and scores up to 1 is the error of the boxes. The parts are found only
in the original's outputs, over all samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.metrics.pairwise_error import Pair, is_float

APART = 16.0
"""Factor between two scales from which slices are different parts. A tolerance of 0.005 (`TOLERANCES`) over
both lets the smaller one have an error of 0.08: more, and it would be beyond `USABLE`."""

STEP = 4.0
"""Factor between neighbours in the order of scale that makes a part something of its own. Without one, scales
fall off to a tail, where rounding of an exponent counts more the smaller the values are: FP16 changes the
rims of Gaussian heat maps by 0.008 where it changes the maps as a whole by 0.0013."""

TAIL = 2
"""Times as many slices within a `STEP` above as below, where scales fall off gradually, that make these the
tail of one distribution. A network's scores for images that it hardly tells apart are such: of 1,000 means
around 0 some are as small as any, and three times as many are within a `STEP` above them."""

SEVERAL = 4
"""Values of a slice that show where scales fall off gradually: in one vector of a Relu's means or of
probabilities some are as small as any."""

BY_CHANCE = 0.02
"""Share of outputs of one scale in which a slice of few values may look like a part by chance, over the
number of slices: if values are spread evenly from 0, n of them are all below a share r of the largest with a
probability of r^n. For a vector of 3 that is r = 0.0022: 640, 480, 0.9 has a part."""

FP16_GRAIN = 2.0**-25
"""Half of FP16's smallest step: what rounding to FP16 does to values near 0."""

FP32_GRAIN = 2.0**-24
"""Half a step of FP32, relative: after a sum of large values, a small slice has this error of the largest."""

FEW = 64
"""Slices of an axis up to which slices of whole numbers and Booleans are compared one by one; and values of a
slice up to which slices may be copies of each other."""

FEW_IN_TURN = 8
"""Fewest entries of a column that is interleaved with others in a vector."""

LONGEST_IN_TURN = 512
"""Longest vector in which columns may be interleaved: 478 landmarks of a face have an output of their own."""

BIN_BITS = 21
"""Low bits of a float32 that a histogram drops: four bins for each octave."""


Bands = list[tuple[Array, bool]]
"""Masks of slices, each with True if the scales fall off to them gradually."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some entries of an output, and their scale.

    Attributes:
        axis: Axis of the slices; None: all entries but masks.
        rank: Number of the output's axes.
        chosen: Numbers of the slices, in order.
        scale: Root mean square of the entries in the original, over all samples.
        noise: Rounding error of an entry that says nothing: `FP16_GRAIN`, and FP32's of the largest entry.
        mask: Magnitude from which an entry is a mask: masks belong to no part.
        in_unit: True if all entries are from 0 to 1.
        gradual: True if the scales fall off gradually to the part's, as over classes or to the edge of a map.
        inside: The part of another axis that it is a part of.
    """

    axis: int | None
    rank: int
    chosen: Array
    noise: float
    mask: float
    scale: float = 0.0
    in_unit: bool = False
    gradual: bool = False
    inside: Part | None = None

    @property
    def slices(self) -> frozenset[tuple[int | None, tuple[int, ...]]]:
        """Its axes, with the numbers of the slices."""
        own = frozenset({(self.axis, tuple(self.chosen.tolist()))})
        return own | self.inside.slices if self.inside else own

    @property
    def axes(self) -> frozenset[int | None]:
        return frozenset(axis for axis, _ in self.slices)

    def __str__(self) -> str:
        if self.axis is None:
            return f"without entries beyond {self.mask:.2g}"
        kind = "column" if self.axis == self.rank - 1 else "row" if self.axis else "item"
        plural = "s" if len(self.chosen) > 1 else ""
        runs = np.split(self.chosen, np.flatnonzero(np.diff(self.chosen) != 1) + 1)
        if len(runs) > 3:
            return f"{len(self.chosen)} {kind}s from {runs[0][0]} to {runs[-1][-1]} of axis {self.axis}"
        words = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        return f"{kind}{plural} {words} of axis {self.axis}" + (f", in {self.inside}" if self.inside else "")

    def of(self, array: Array) -> Array:
        """The part of an array of the output's shape."""
        if self.axis is None:
            return array
        array = self.inside.of(array) if self.inside else array
        chosen = self.chosen[self.chosen < array.shape[self.axis]]
        return np.asarray(np.take(array, chosen, axis=self.axis))

    def pair(self, whole: Pair) -> Pair:
        """The entries of the part in one sample that are finite and no masks, flat."""
        exact, other = self.of(whole.expected), self.of(whole.actual)
        kept = np.isfinite(exact) & np.isfinite(other) & (np.abs(exact) < self.mask)
        return Pair(exact[kept], other[kept])

    def error(self, pair: Pair) -> float:
        """The relative L2 error of the entries that `pair` gave, each beyond its rounding.

        Of thousands of scores a few are high: their errors would hide in the mean of all roundings. A sample
        in which the part is almost 0 is judged at a share of its scale elsewhere.
        """
        beyond = np.maximum(pair.differences - self.noise, 0.0)
        least = pair.expected.size * (self.scale / APART) ** 2
        return math.sqrt(float(beyond @ beyond) / (max(pair.squares[1], least) or 1.0))

    def unmasked(self, whole: Pair) -> float:
        """Share of the masks of the original that are none in the result."""
        exact, other = whole.wide
        masks = np.isfinite(exact) & (np.abs(exact) >= self.mask)
        missing = masks & (np.sign(exact) * other < self.mask / 2.0)
        return int(missing.sum()) / max(1, int(masks.sum()))


Parts = Mapping[str, Sequence[Part]]
"""The parts of outputs, by name."""


def chance(entries: int) -> float:
    """Largest error of a part with few entries, in units of what is allowed for many.

    99 % of the root mean squares of so many normal errors are below: sqrt(chi2.ppf(0.99, n) / n) is 2.58 for
    1 entry, 1.82 for 4, 1.41 for 16.
    """
    return 1.0 + 1.6 / math.sqrt(max(entries, 1))


def parts_of(samples: Sequence[Mapping[str, Array]]) -> dict[str, tuple[Part, ...]]:
    """The parts of each output of the original."""
    return {name: parts([outputs[name] for outputs in samples]) for name in (samples[0] if samples else ())}


def parts(arrays: Sequence[Array]) -> tuple[Part, ...]:
    """Finds the parts of one output of floats, which has `arrays` in the samples.

    A part may have parts along another axis: the scores of a quiet clip are behind its boxes, and behind the
    scores of loud ones. Two levels suffice: whose values they are, and which quantity. Along other axes are
    places, over which scales fall off gradually.
    """
    if not arrays or not all(is_float(array) and array.ndim == arrays[0].ndim for array in arrays):
        return ()
    mask, negative = _mask_floor(arrays)
    if not negative and any(_whole_slices(axis, arrays, mask) for axis in range(arrays[0].ndim)):
        mask = math.inf  # such as boxes, beside which scores are a part
    largest = max(_largest(array, mask) for array in arrays)
    part = Part(None, arrays[0].ndim, np.arange(0), FP16_GRAIN + FP32_GRAIN * largest, mask)
    possible, outer = [part] if mask < math.inf else [], [*_slices(part, arrays)]
    inner = {inside.slices: inside for own in outer for inside in _slices(own, [own.of(a) for a in arrays])}
    measured = (_measured(part, arrays) for part in (*possible, *outer, *inner.values()))
    return tuple(part for part in measured if part is not None)


def _slices(outer: Part, arrays: Sequence[Array]) -> Iterator[Part]:
    """Slices along each axis, and for a part, whose `arrays` they are, along its other axes."""
    largest = max(_largest(array, outer.mask) for array in arrays)
    inside = outer if outer.axis is not None else None
    for axis, sums in enumerate(_sums(arrays, outer.mask, largest) if largest else ()):
        if axis == outer.axis:
            continue
        bands = _bands(sums, partial(_proportional, axis, arrays, outer.mask))
        if (length := sums.shape[1]) == arrays[0].size:
            bands = bands or _interleaved(sums)
        for chosen, fading in bands:
            slices = np.flatnonzero(chosen[np.arange(length) % len(chosen)])
            gradual = fading or outer.gradual
            yield replace(outer, axis=axis, chosen=slices, gradual=gradual, inside=inside)


def _mask_floor(arrays: Iterable[Array]) -> tuple[float, bool]:
    """Magnitude from which entries are masks, infinity if there are none; and True if masks are negative.

    Masks are finfo.min, -1e9, or a score with -1e4 added: values beyond 1 of one sign that are further from
    the rest, by a factor, than from each other. They may be several such clusters, each beyond the next.
    """
    counts = np.zeros(1 << (32 - BIN_BITS), np.int64)
    for array in arrays:
        bits = array.astype(np.float32)[np.isfinite(array)].view(np.uint32)
        counts += np.bincount(bits >> BIN_BITS, minlength=len(counts))
    positive, negative = counts.reshape(2, -1)
    positive[0] = negative[0] = 0  # zeros
    edges = (np.arange(len(positive), dtype=np.uint32) << BIN_BITS).view(np.float32)
    both, floor, sign = positive + negative, math.inf, False
    while (used := np.flatnonzero(both)).size > 1:
        widest = int(np.argmax(np.diff(used)))
        least, gap = used[widest + 1], used[widest + 1] - used[widest] - 1
        one_sign = not (positive[least:].any() and negative[least:].any())
        far = _evident(np.array(2.0 ** (-gap / 4.0)), 1, both[:least].sum())
        if not (one_sign and far and used[-1] - least < gap and edges[least] > 1.0):
            break
        floor, sign = float(edges[least]), bool(negative[least:].any())
        positive[least:] = negative[least:] = both[least:] = 0
    return floor, sign


def _evident(ratio: Array, slices: int, values: Array) -> Array:
    """True for slices whose scale, relative to the largest, is lower than chance would make it.

    Args:
        values: Numbers of values that make the scales.
    """
    by_chance = (BY_CHANCE / slices**2) ** (1.0 / np.maximum(values, 1))
    return np.asarray(ratio <= np.minimum(1.0 / APART, by_chance))


def _whole_slices(axis: int, arrays: Iterable[Array], mask: float) -> bool:
    """True if entries from `mask` on are whole slices of an axis."""
    for array in arrays:
        masks, others = np.abs(array) >= mask, _others(axis, array)
        if np.any(masks.any(axis=others) & ~masks.all(axis=others)):
            return False
    return True


def _others(axis: int, array: Array) -> tuple[int, ...]:
    return tuple(other for other in range(array.ndim) if other != axis)


def _largest(array: Array, mask: float) -> float:
    """Largest magnitude of an entry that is no mask."""
    sizes = np.abs(array)
    return float(np.max(sizes, where=np.isfinite(sizes) & (sizes < mask), initial=0.0))


def _sums(arrays: Iterable[Array], mask: float, unit: float) -> list[Array]:
    """Sums of squares and of fourth powers, and numbers, of entries that are neither 0 nor masks.

    The entries are in units of `unit`, the largest, so that no power overflows.

    Returns:
        For each axis [3, slices].
    """
    sums = list[Array]()
    for array in arrays:
        wide = array.astype(np.float32)
        wide[~(np.abs(wide) < mask)] = 0.0
        squares = np.square(wide / np.float32(unit))
        powers = squares, squares * squares, wide != 0.0
        for axis, length in enumerate(array.shape):
            new = np.stack([power.sum(axis=_others(axis, array), dtype=np.float64) for power in powers])
            if axis == len(sums):
                sums.append(new)
                continue
            longer = max(length, sums[axis].shape[1])
            pair = (np.pad(sum_, ((0, 0), (0, longer - sum_.shape[1]))) for sum_ in (sums[axis], new))
            sums[axis] = np.add(*pair)
    return sums


def _proportional(axis: int, arrays: Sequence[Array], mask: float, at: int) -> Array:
    """Squared cosines between the slices of an axis and slice `at`."""
    products = np.zeros((2, max(array.shape[axis] for array in arrays)))
    for array in (array for array in arrays if at < array.shape[axis]):
        wide = np.where(np.abs(array) < mask, array, 0.0).astype(np.float64)
        rows = np.moveaxis(wide, axis, 0).reshape(array.shape[axis], -1)
        products[:, : len(rows)] += rows @ rows[at], np.einsum("ij,ij->i", rows, rows)
    return np.asarray(products[0] ** 2 / np.maximum(products[1] * products[1, at], np.finfo(np.float64).tiny))


def _interleaved(sums: Array) -> Bands:
    """The bands of a vector whose entries are columns in turn, such as x, y and visibility of landmarks."""
    length = sums.shape[1]
    for period in range(2, length // FEW_IN_TURN + 1 if length <= LONGEST_IN_TURN else 0):
        if length % period == 0:
            columns = sums.reshape(3, -1, period).sum(1)
            if np.all(_makers(columns) >= SEVERAL) and (bands := _bands(columns)):
                return bands
    return []


def _makers(sums: Array) -> Array:
    """Numbers of values that make the scales of slices: sum(x^2)^2 / sum(x^4), 1 if one stands out."""
    return np.asarray(sums[0] ** 2 / np.maximum(sums[1], np.finfo(np.float64).tiny))


def _bands(sums: Array, proportional: Callable[[int], Array] | None = None) -> Bands:
    """Returns the slices of an axis that are of a smaller scale than the largest, then those far below these.

    With them comes True if there is no `STEP` between their scales and the larger ones. A slice that is 0
    throughout has no scale, and is with the first ones.

    A column that a token with outliers crosses has that token's scale: one value makes it. So does one value
    where a slice is proportional to the largest one, as in a batch of copies: all others follow from it.

    Args:
        proportional: Squared cosines between the slices and one of them, 1 where they are proportional.
    """
    scales, makers = np.sqrt(sums[0] / np.maximum(sums[2], 1.0)), _makers(sums)
    left, zeros = np.flatnonzero(scales > 0.0), np.flatnonzero(scales == 0.0)
    own, bands = makers, Bands()
    if proportional and 1 < sums[2].max() <= FEW and APART * scales[left].min() <= scales.max():
        own = 1.0 + (makers - 1.0) * (1.0 - proportional(int(np.argmax(scales))))
    while left.size:
        largest = left[np.argmax(scales[left])]
        by = np.minimum(own[left], makers[largest])
        evident = _evident(scales[left] / scales[largest], len(scales), by)
        apart = scales[left] <= np.max(scales[left], where=evident, initial=0.0)  # smaller ones are, too
        above, left = left[~apart], left[apart]
        if left.size:
            near = int(np.count_nonzero(scales[above] < STEP * scales[left].max()))
            gradual = near > 0
            if not gradual or (by.max() >= SEVERAL and near < TAIL * len(left)):
                chosen = np.zeros(len(scales), bool)
                chosen[left] = chosen[zeros] = True
                bands.append((chosen, gradual))
        zeros = zeros[:0]
    return bands


def _measured(part: Part, arrays: Sequence[Array]) -> Part | None:
    """The part with its scale; None if it is rounding noise.

    Rows that are 0 in all slices, such as padding, make no scale.
    """
    square, entries, in_unit = 0.0, 0, True
    for array in arrays:
        values = part.of(array)
        in_unit = in_unit and bool(np.all((values >= 0.0) & (values <= 1.0)))
        kept = np.isfinite(values) & (np.abs(values) < part.mask)
        if part.axis is not None:
            whole = part.inside.of(array) if part.inside else array
            kept &= np.any(whole != 0, axis=part.axis, keepdims=True)
        held = values[kept].astype(np.float64)
        square, entries = square + float(held @ held), entries + held.size
    scale = math.sqrt(square / max(1, entries))
    return replace(part, scale=scale, in_unit=in_unit) if scale > part.noise else None


def flipped(axis: int, expected: Array, actual: Array, rounded: bool = False) -> tuple[int, float]:
    """The worst slice of a short axis of Booleans or whole numbers, and the share that differs there.

    The share is of the entries that are not 0 in the original, so that a rare class counts as any other. Of
    `rounded` floats, it is the relative L2 error where that is smaller.
    """
    if not 1 < expected.shape[axis] <= FEW:
        return 0, 0.0
    differ = np.sum(expected != actual, axis=_others(axis, expected))
    used = np.maximum(np.sum(expected != 0, axis=_others(axis, expected)), 1)
    shares = np.maximum(differ - 1, 0) / used  # one entry may be a tie
    if rounded:
        wide = expected.astype(np.float64)
        distance, size = (np.sum(a**2, axis=_others(axis, a)) ** 0.5 for a in (actual - wide, wide))
        shares = np.minimum(shares, distance / np.maximum(size, 1.0))
    return int(np.argmax(shares)), float(np.max(shares))
