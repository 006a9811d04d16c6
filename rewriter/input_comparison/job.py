"""`compare-inputs`: finds what differs between two preprocessing pipelines, and the distance that is left."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rewriter.base.errors import InputsError, UsageError
from rewriter.base.stopwatch import Progress, silent
from rewriter.base.text import Row, Summary, count, rows_of
from rewriter.input_comparison import images
from rewriter.input_comparison.images import SAMPLE, Fit, Pair, Relation, Scaling, listed
from rewriter.ir.model import Array
from rewriter.runtime.inputs import read_raw_samples
from rewriter.runtime.inputs.samples import Sample
from rewriter.runtime.metrics.pairwise_error import Pair as Figures
from rewriter.runtime.metrics.pairwise_error import relative_l2

SAMPLES = 8  # default number of samples: a pipeline treats all of them alike
FIRST = "array 0"  # name of the first array of a tuple


@dataclass(frozen=True)
class Difference:
    """One difference of the other pipeline.

    Attributes:
        kind: dtype, layout, channel-order, scale, normalization, size, padding, interpolation, rounding,
            values or name.
        phrase: Follows "theirs ": `is BGR`.
        text: A full sentence with figures.
    """

    kind: str
    phrase: str
    text: str


@dataclass(frozen=True)
class ArrayComparison:
    """One array of one sample.

    `before` is the relative L2 distance of ours from theirs (infinite if the shapes differ), `after` what is
    left of it where the differences explain it.
    """

    name: str  # in ours
    differences: tuple[Difference, ...] = ()
    before: float = 0.0
    after: float = 0.0
    notes: tuple[str, ...] = ()  # what the data does not show

    @property
    def sentence(self) -> str:
        """`theirs is BGR and is not divided by 255`."""
        *others, last = [d.phrase for d in self.differences] or [""]
        return f"theirs {' and '.join(filter(None, (', '.join(others), last)))}" if last else "no difference"


@dataclass(frozen=True)
class SampleComparison:
    """All arrays of one sample, with the files that `ours` and `theirs` come from."""

    ours: str
    theirs: str
    arrays: tuple[ArrayComparison, ...]


@dataclass(frozen=True, repr=False)
class InputComparison(Summary):
    """All samples of both pipelines, in order; `counts` are the numbers of our and their samples."""

    samples: tuple[SampleComparison, ...]
    counts: tuple[int, int]

    @property
    def differ(self) -> bool:
        """True if any array, or the number of samples, differs."""
        return self.counts[0] != self.counts[1] or any(a.differences for s in self.samples for a in s.arrays)

    def summary(self) -> Iterator[Row]:
        yield "verdict", "they differ" if self.differ else "no difference"
        compared = f"{count(len(self.samples), 'sample')} compared"
        yield "samples", f"{compared}, of {self.counts[0]} and {self.counts[1]}"
        arrays = [array for sample in self.samples for array in sample.arrays if array.differences]
        sentences = dict.fromkeys(f"{array.name}: {array.sentence}" for array in arrays)
        yield from rows_of("differences", sentences, 3)


def compare_inputs(
    ours: Any, theirs: Any, *, samples: int = SAMPLES, progress: Progress | None = None
) -> InputComparison:
    """Compares the results of two pipelines, sample by sample, in the order of the data.

    Args:
        ours, theirs: What `inputs=` of `rewriter.fix` takes: a path, an array, a dict or a tuple of arrays,
            a list of samples, a data loader, or a function that returns one of these.
        samples: Number of samples to compare, at most.

    Raises:
        InputsError: a file cannot be read, or holds no numbers.
        UsageError: an argument has the wrong type.
    """
    if samples < 1:
        raise UsageError(f"it cannot be {samples}", option="samples", hint="compare at least one")
    sides = _read(ours, "ours"), _read(theirs, "theirs")
    pairs = list(zip(*sides, strict=False))[:samples]
    compared = []
    for index, (mine, other) in enumerate(pairs):
        (progress or silent)("comparing", index, len(pairs))
        both = _arrays(mine), _arrays(other)
        arrays = _without_labels(*both), _without_labels(*reversed(both))
        compared.append(SampleComparison(mine.where, other.where, tuple(compare_samples(*arrays))))
    return InputComparison(tuple(compared), (len(sides[0]), len(sides[1])))


def compare_samples(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> Iterator[ArrayComparison]:
    """Compares arrays of the same name; of the others, the first with the first, and so on."""
    spare = [name for name in theirs if name not in ours]
    for name, array in ours.items():
        other = name if name in theirs else spare.pop(0) if spare else None
        if other is None:
            missing = Difference("name", f"has no array {name!r}", f"theirs holds {', '.join(theirs)}")
            yield ArrayComparison(name, (missing,), np.inf, np.inf)
            continue
        compared = compare_arrays(array, theirs[other], name)
        notes = (f"it is called {other!r} in theirs",) if other != name else ()
        yield replace(compared, notes=(*compared.notes, *notes))
    for name in spare:
        extra = Difference("name", f"has an array {name!r} that ours lacks", f"ours holds {', '.join(ours)}")
        yield ArrayComparison(name, (extra,), np.inf, np.inf)


def compare_arrays(ours: Array, theirs: Array, name: str = "array") -> ArrayComparison:
    """Compares one array of both pipelines: images in any layout, or any other numbers."""
    differ = distance(ours, theirs) > ROUNDING and min(ours.size, theirs.size)
    related = images.relation(ours, theirs) if differ else None
    if related is None:
        return compare_others(name, ours, theirs)
    return compare_images(name, related, ours, theirs)


def _read(data: Any, keyword: str) -> Sequence[Sample]:
    try:
        return read_raw_samples(data)
    except UsageError as error:
        error.options = (keyword,)
        raise


def _arrays(sample: Sample) -> dict[str, Array]:
    arrays = {}
    for name, value in sample.read().items():
        try:
            arrays[name] = array = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            what = f"{name!r} is a list whose parts differ in shape"
            raise InputsError(what, where=sample.where, hint="pad the parts to one length") from error
        if array.dtype.kind not in "fiubV" or (array.dtype.kind == "V" and array.dtype.isbuiltin != 2):
            what = f"array {name!r} holds {array.dtype}, not numbers"
            raise InputsError(what, where=sample.where, hint="save the tensors that the model gets")
    if not arrays:
        raise InputsError("it holds no array", where=sample.where, hint="write it with np.savez")
    return arrays


def _without_labels(own: dict[str, Array], other: dict[str, Array]) -> dict[str, Array]:
    """The arrays of one side, without labels: of a tuple only the first, if the other side has one array."""
    return {FIRST: own[FIRST]} if len(other) == 1 and FIRST in own else own


def dtype_difference(ours: np.dtype[Any], theirs: np.dtype[Any]) -> tuple[Difference, ...]:
    text = f"theirs has element type {theirs}, ours {ours}"
    return (Difference("dtype", f"is {theirs}, not {ours}", text),) if ours != theirs else ()


ROUNDING = 1e-6  # relative L2 distance that float32 arithmetic explains: a few times 2^-24

PIXEL = 1 / 200
"""The step between two pixel values, over the span of a photograph's values: most have 200 of 255."""

ROUNDED_SHARE = 0.01
"""Share of whole pixel values that may differ by one where floats lie on the border of two."""

ASK = "compare how each side resizes, crops and pads: libraries differ in antialiasing and coordinates"


def compare_images(name: str, relation: Relation, ours: Array, theirs: Array) -> ArrayComparison:
    values = scaled(relation, ours, theirs)
    mine, other = (side.astype(np.float64) for side in relation.sides(ours, theirs))
    factor, offset = _affine(values, relation.fit)
    image = mine[:, list(relation.fit.order)] * factor[:, None, None] + offset[:, None, None]
    if theirs.dtype.kind in "iu":
        image = np.rint(image).clip(np.iinfo(theirs.dtype).min, np.iinfo(theirs.dtype).max)
    differences = list(in_words(relation, ours, theirs, values))
    window = images.common(mine[:SAMPLE], other[:SAMPLE])
    parts = image[..., *window], other[..., *window]
    differences += _padding(image, other, float(np.std(parts[1] - parts[0])))
    differences += _remainder(*parts, (ours.dtype, theirs.dtype))
    notes = (ASK,) if any(d.kind == "interpolation" for d in differences) else ()
    before, after = distance(ours, theirs), relative_l2(parts[1], parts[0])
    return ArrayComparison(name, tuple(differences), before, after, notes)


def compare_others(name: str, ours: Array, theirs: Array) -> ArrayComparison:
    """Compares arrays that are not related images: shapes, one line for all values, or their difference."""
    differences = [*dtype_difference(ours.dtype, theirs.dtype)]
    before = after = distance(ours, theirs)
    notes: tuple[str, ...] = ()
    if ours.shape != theirs.shape:
        phrase = f"has shape {list(theirs.shape)}, not {list(ours.shape)}"
        differences.append(Difference("size", phrase, f"theirs {phrase}"))
    elif before > ROUNDING and (line := _line_of_all(ours, theirs)) is not None:
        phrase, after = f"is ours * {line[0]:g} + {line[1]:g}", distance(ours * line[0] + line[1], theirs)
        differences.append(Difference("scale", phrase, f"theirs {phrase}"))
    if after > 10 * ROUNDING and images.axes_pairs(ours.shape, theirs.shape):
        text = "no layout, order of channels or scale turns ours into theirs: another resize or sample?"
        differences.append(Difference("values", "shows something else", text))
        notes = (ASK,)
    elif after > 10 * ROUNDING and ours.shape == theirs.shape:
        unequal = np.argwhere(ours != theirs)
        at = tuple(unequal[0].tolist())
        first = f"the first at {list(at)}: theirs {theirs[at]}, ours {ours[at]}"
        text = f"{len(unequal)} of {ours.size} values differ, {first}"
        differences.append(Difference("values", "has other values", text))
    return ArrayComparison(name, tuple(differences), before, after, notes)


def distance(ours: Array, theirs: Array) -> float:
    """Relative L2 distance; infinite if shapes, or the positions of NaN and infinities, differ."""
    return Figures(theirs, ours).relative_l2


def _line_of_all(ours: Array, theirs: Array) -> tuple[float, float] | None:
    """Factor and offset that turn all values of ours into theirs; None if no line does."""
    x, y = (side.astype(np.float64).reshape(-1) for side in (ours, theirs))
    if x.size < 3 or not (np.isfinite(x).all() and np.isfinite(y).all()) or np.ptp(x) == 0:
        return None
    a, b = (float(v) for v in np.polyfit(x, y, 1))
    a, b = float(f"{a:.7g}"), float(f"{b:.7g}") if abs(b) > 1e-6 * np.ptp(y) else 0.0
    return (a, b) if a and relative_l2(y, a * x + b) <= 10 * ROUNDING else None


def scaled(relation: Relation, ours: Array, theirs: Array) -> Pair | Fit | None:
    """The scalings that explain the fit, else the fit; None if the values are equal within its accuracy."""
    fit, side = relation.fit, relation.sides(ours, theirs)[0][:SAMPLE]
    channels = side[..., *images.content(side)].swapaxes(0, 1)
    inside = channels.reshape(len(channels), -1).astype(np.float64)
    spans = np.asarray(np.percentile(inside, [0.5, 99.5], axis=1).T[list(fit.order)])
    width = float(np.ptp(spans)) or 1.0
    moved = float(np.max(np.abs(spans * (fit.factor[:, None] - 1.0) + fit.offset[:, None]))) / width
    # pixels minus a mean have few fractions: FP16 rounds most of them the same way, which moves the line
    rounding = 0.5 * _epsilon(ours.dtype, theirs.dtype) * float(np.max(np.abs(spans))) / width
    if moved <= max(1e-5, 0.5 * fit.unexplained**0.5, rounding):
        return None
    return images.scalings(fit, spans) or fit


def _affine(values: Pair | Fit | None, fit: Fit) -> tuple[Array, Array]:
    """Factor and offset of each of their channels: exact ones of named scalings, else the fitted ones."""
    if values is None:
        return np.ones(len(fit.order)), np.zeros(len(fit.order))
    return (values.factor, values.offset) if isinstance(values, Fit) else images.between(values, fit.order)


def _epsilon(*dtypes: np.dtype[Any]) -> float:
    """Spacing of the coarsest float type at 1; 0 if none is one."""
    return max((float(np.finfo(d).eps) for d in dtypes if d.kind == "f"), default=0.0)


def in_words(r: Relation, ours: Array, theirs: Array, values: Pair | Fit | None) -> Iterator[Difference]:
    """The differences that the relation states."""
    yield from dtype_difference(ours.dtype, theirs.dtype)
    mine, other = r.axes
    if mine != other:
        text = f"theirs is {other} {list(theirs.shape)}, ours {mine} {list(ours.shape)}"
        yield Difference("layout", f"is {other}, not {mine}", text)
    if not r.fit.in_order:
        order = f"has the channels in the order {list(r.fit.order)} of ours"
        phrase = "is BGR (if ours is RGB)" if r.fit.order == (2, 1, 0) else order
        yield Difference("channel-order", phrase, f"theirs {order}")
    if isinstance(values, Fit):
        phrase = f"is ours * {listed(values.factor)} + {listed(values.offset)}"
        yield Difference("scale", phrase, f"theirs {phrase}")
    elif values is not None:
        yield from _scalings(*values)


def _scalings(mine: Scaling, other: Scaling) -> Iterator[Difference]:
    both = f"theirs: {other}; ours: {mine}"
    if mine.divisor != other.divisor:
        once = f"is divided by 255, ours {'twice' if mine.divisor > 255.0 else 'is not'}"
        phrases = {1.0: "is not divided by 255", 255.0: once}
        yield Difference("scale", phrases.get(other.divisor, f"is {other}"), both)
    if mine == other:
        text = f"{both}: only one side has its constants in the order of its channels"
        yield Difference("normalization", "has mean and deviation in another order of channels", text)
    elif (mine.mean, mine.std) != (other.mean, other.std):
        phrase = f"has {other}" if mine.plain else f"has {other}, not {mine}"
        phrase = f"has no mean and deviation (ours: {mine})" if other.plain else phrase
        yield Difference("normalization", phrase, both)


def _padding(ours: Array, theirs: Array, noise: float) -> Iterator[Difference]:
    """The border of theirs, if ours has another value there."""
    box = images.content(theirs[:SAMPLE])
    outside = np.ones(theirs.shape[-2:], bool)
    outside[box] = False
    gap = float(np.max(np.abs(theirs - ours)[..., outside], initial=0.0))
    if box != images.whole(theirs) and gap > max(2e-3 * float(np.ptp(theirs[..., *box])), 4 * noise):
        value = theirs[0][:, outside][:, 0]
        pixel = images.border_pixel(value)
        shown = "" if pixel is None or listed(value) == str(pixel) else f", pixel value {pixel}"
        phrase = f"is padded with {listed(value)}{shown}"
        yield Difference("padding", phrase, f"theirs {phrase}")


def _remainder(
    ours: Array, theirs: Array, dtypes: tuple[np.dtype[Any], np.dtype[Any]]
) -> Iterator[Difference]:
    """The remaining difference: rounded values, off by at most one pixel value, or another resampling."""
    relative, largest = relative_l2(theirs, ours), float(np.max(np.abs(theirs - ours), initial=0.0))
    exact = dtypes[1].kind in "iu" and float(np.mean(theirs != ours)) <= ROUNDED_SHARE
    if relative > 2 * max(1e-6, _epsilon(*dtypes)) and not (exact and largest <= 1.0):
        left = f"the remaining difference is {relative:.2g} (relative L2), at most {largest:.2g}"
        if largest <= 1.02 * PIXEL * float(np.ptp(theirs)):
            yield Difference("rounding", "is rounded in another place", left)
        else:
            yield Difference("interpolation", "is resampled in another way", left)
