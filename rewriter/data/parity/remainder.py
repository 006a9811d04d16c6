"""Names what is left between two aligned images: rounding, antialiasing, coordinates, another kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.data.parity.comparison import Difference, Kind
from rewriter.data.parity.plain import ROUNDING
from rewriter.data.parity.resampling import METHODS
from rewriter.figures.pair import relative_l2
from rewriter.model import Array

PIXEL_LEVELS = 256
"""Most distinct values of a channel that was uint8 once."""

STEP_SLACK = 1.02
"""Largest change, in steps of 1/255 of the pixel range, of a value that is truncated to a whole one."""

ROUNDED_SHARE = 0.01
"""Share of whole pixel values that may differ by one where floats lie on the border of two."""

LEAST_PART = 0.08
"""Smallest shift, in pixels, that is reported as a convention of pixel centres."""

LEAST_EXPLAINED = 0.2
"""Smallest share of what is left that a shift, a zoom or a blur has to explain to be named."""

ALIASED = 0.56
"""Energy of the Laplacian with antialiasing over that without: 0.14 to 0.55 on photographs made 2 to 5 times
smaller. Two antialiasing kernels differ by 0.6 at least, but for Lanczos and bilinear (0.5)."""

SHARPER = 1.1
"""From this ratio on theirs is sharper: bicubic over bilinear has 1.17 to 1.6, nearest pixels 1.16 to 1.7."""

SOFTENINGS = 4
"""Times that a kernel of 1 2 1 removes details before a shift is fitted: a Gaussian of 1.4 pixels."""


@dataclass(frozen=True)
class Remainder:
    """One difference that is left, lines of NumPy that remove it, and lines for our pipeline that do."""

    difference: Difference
    code: tuple[str, ...] = ()
    mend: tuple[str, ...] = ()


def remainder(
    predicted: Array, theirs: Array, axes: str, dtypes: tuple[np.dtype[Any], ...]
) -> Remainder | None:
    """What is left between theirs and the prediction of it, both [N, C, H, W]; None if nothing is.

    Args:
        axes: The layout of theirs, for the code.
        dtypes: Of ours and of theirs.
    """
    relative = relative_l2(theirs, predicted)
    if relative <= 2 * max(ROUNDING, epsilon(*dtypes)):  # of rounding to the element types
        return None
    half = _halved(predicted, theirs)
    if half is not None:
        return half
    steps, largest = (_step(predicted), _step(theirs)), float(np.max(np.abs(theirs - predicted)))
    if largest <= STEP_SLACK * max(steps):
        if dtypes[1].kind in "iu" and float(np.mean(theirs != predicted)) <= ROUNDED_SHARE:
            return None
        return _rounded(theirs, steps, largest, axes)
    return _resampled(predicted, theirs, relative)


def epsilon(*dtypes: np.dtype[Any]) -> float:
    """Spacing of the coarsest float type at 1; 0 if none is one."""
    return max((float(np.finfo(d).eps) for d in dtypes if d.kind == "f"), default=0.0)


def _halved(predicted: Array, theirs: Array) -> Remainder | None:
    """Rounding of one side to FP16."""
    text = "what is left is the rounding to FP16 numbers: "
    if _is_half(predicted, theirs):
        code = "theirs = theirs.astype(np.float16).astype(np.float32)"
        return Remainder(
            Difference("rounding", "is rounded to FP16", f"{text}theirs holds no others"), (code,)
        )
    if _is_half(theirs, predicted):
        phrase = "is not rounded to FP16, ours is"
        mend = "image = image.float()  # in place of .half(), or astype(np.float16)"
        return Remainder(Difference("rounding", phrase, f"{text}ours holds no others"), (), (mend,))
    return None


def _is_half(fine: Array, coarse: Array) -> bool:
    """True if `coarse` is `fine` rounded to FP16, and `fine` is not."""
    with np.errstate(over="ignore"):
        rounded, own = fine.astype(np.float16), coarse.astype(np.float16)
    near = np.abs(fine - coarse) <= 2.0**-11 * np.abs(fine) * 1.02 + 2.0**-25
    return bool(
        np.array_equal(own.astype(np.float32), coarse.astype(np.float32))
        and np.any(rounded.astype(np.float32) != fine.astype(np.float32))
        and near.all()
    )


def _rounded(theirs: Array, steps: tuple[float, float], largest: float, axes: str) -> Remainder:
    """Rounding to whole pixels, on one side or in two places."""
    text = f"what is left is {largest:.2g} at most, no more than one of 255 steps: rounding"
    mine, other = steps
    if other and not mine:
        found = Difference("rounding", "rounds to whole pixels", f"{text} (uint8), in theirs alone")
        return Remainder(found, _rounding_code(theirs, axes))
    if mine and not other:
        found = Difference("rounding", "does not round to whole pixels", f"{text} (uint8), in ours alone")
        return Remainder(
            found, (), ("image = image.astype(np.float32)  # before the resize, and no uint8 after it",)
        )
    return Remainder(Difference("rounding", "rounds pixels to whole numbers in another place", text))


def _rounding_code(theirs: Array, axes: str) -> tuple[str, ...]:
    """One line that moves every value of theirs to the nearest whole pixel in its scale."""
    lows, widths = [], []
    for channel in theirs.swapaxes(0, 1):
        levels = np.unique(channel.astype(np.float32)).astype(np.float64)
        if levels.size < 2:
            return ()
        count = round((levels[-1] - levels[0]) / float(np.min(np.diff(levels))))
        lows.append(float(levels[0]))
        widths.append((float(levels[-1]) - float(levels[0])) / count)
    after = len(axes) - 1 - axes.index("C") if "C" in axes else 0
    low, width = (f"np.array({[float(f'{v:.9g}') for v in part]})" for part in (lows, widths))
    if after:
        low, width = (f"{part}[:{', None' * after}]" for part in (low, width))
    return (f"theirs = (np.rint((theirs - {low}) / {width}) * {width} + {low}).astype(theirs.dtype)",)


def _step(images: Array) -> float:
    """The distance of two neighbouring pixel values, if the images were whole pixel values once; else 0."""
    step = 0.0
    for channel in images.swapaxes(0, 1):
        levels = np.unique(channel.astype(np.float32))
        if 1 < levels.size <= PIXEL_LEVELS:
            step = max(step, float(np.min(np.diff(levels))))
    return step


@dataclass(frozen=True)
class Resampling:
    """How theirs was resampled from ours, as far as a small change tells.

    Attributes:
        dy, dx: Pixels by which theirs is moved.
        zoom: Pixels by which the borders move away from the centre, in height and width.
        explained: Share of what is left, without fine details, that these explain.
        kernel: Share that a symmetric kernel of 3 x 3 pixels explains.
        energy: That of theirs' details over that of ours, by the Laplacian.
    """

    dy: float
    dx: float
    zoom: tuple[float, float]
    explained: float
    kernel: float
    energy: float

    def causes(self) -> Iterator[tuple[Kind, str, str, str]]:
        """Kind, phrase, evidence and the line for our pipeline of each likely cause."""
        moved = self.explained >= LEAST_EXPLAINED
        outwards, shift = min(self.zoom, key=abs), min(self.dy, self.dx, key=abs)
        zoomed = moved and abs(outwards) >= LEAST_PART and self.zoom[0] * self.zoom[1] > 0
        shifted = moved and max(abs(self.dy), abs(self.dx)) >= LEAST_PART and not zoomed
        details = f"it has {self.energy:.2g} times the energy of details"
        if zoomed:
            there, here = ("align-corners", "half-pixel") if outwards > 0 else ("half-pixel", "align-corners")
            evidence = f"its borders lie {abs(outwards):.2f} pixels further {'out' if outwards > 0 else 'in'}"
            line = _call("bilinear", there)
            yield "interpolation", f"has {there} coordinates, not {here}", evidence, line
        elif shifted:
            evidence = f"a shift by {self.dy:+.2f} rows and {self.dx:+.2f} columns"
            if self.energy >= SHARPER and abs(shift) >= LEAST_PART:
                line = _call("nearest", "floor")
                yield "interpolation", "is resized to the nearest pixels", f"{evidence}; {details}", line
                return
            yield "interpolation", "has its pixel centres elsewhere", evidence, ""
        if self.energy <= ALIASED:
            yield "antialias", "is resized with antialiasing", details, _antialiased()
        elif self.energy >= 1 / ALIASED:
            line = _call("bilinear", "half-pixel")
            yield "antialias", "is resized without antialiasing", details, line
        elif self.energy >= SHARPER and self.kernel < LEAST_EXPLAINED and not zoomed:
            line = _call("nearest", "centre")
            yield "interpolation", "is resized to the nearest pixels", f"{details}, by no kernel", line
        elif self.energy >= SHARPER and self.kernel >= LEAST_EXPLAINED:
            line = _call("bicubic", "half-pixel")
            yield "interpolation", "is resized with a sharper kernel", details, line
        elif self.energy <= 1 / SHARPER and self.kernel >= LEAST_EXPLAINED:
            line = _call("bilinear", "half-pixel")
            yield "interpolation", "is resized with a softer kernel", details, line


def _call(kernel: str, coordinates: str) -> str:
    wanted = (kernel, coordinates, False)
    method = next(m for m in METHODS if (m.kernel, m.coordinates, m.antialias) == wanted)
    return f"image = {method.calls[0]}"


def _antialiased() -> str:
    pillow, torch = next(m for m in METHODS if m.kernel == "bilinear" and m.antialias).calls
    return f"image = {pillow}  # or {torch}, or cv2.INTER_AREA"


def _resampled(predicted: Array, theirs: Array, relative: float) -> Remainder:
    found = resampling(predicted, theirs)
    left = f"what is left is {relative:.2%} (relative L2)"
    causes = list(found.causes())
    if not causes:
        text = f"{left}: no shift and no blur explains it: noise, compression or another augmentation"
        return Remainder(Difference("interpolation", "is resampled in another way", text))
    kind = causes[-1][0]
    text = f"{left}: {' and '.join(evidence for _, _, evidence, _ in causes)}"
    return Remainder(
        Difference(kind, " and ".join(phrase for _, phrase, _, _ in causes), text),
        mend=tuple(line for *_, line in causes if line),
    )


def resampling(predicted: Array, theirs: Array) -> Resampling:
    """Fits shift, zoom and kernel to theirs - predicted, both [..., H, W], by least squares.

    To first order, p(y + dy, x + dx) = p + dy p_y + dx p_x, also where dy and dx grow from the centre to the
    borders; a narrow symmetric kernel adds a multiple of the Laplacian: the terms of the Taylor series. Shift
    and zoom are fitted without fine details, which aliasing changes at random.
    """
    p, q = predicted.astype(np.float64), theirs.astype(np.float64)
    soft, rest = _softened(p), _softened(q - p)
    by_row = (soft[..., 2:, 1:-1] - soft[..., :-2, 1:-1]) / 2
    by_column = (soft[..., 1:-1, 2:] - soft[..., 1:-1, :-2]) / 2
    down, right = (np.linspace(-1.0, 1.0, size) for size in by_row.shape[-2:])
    moves = (by_row, by_column, by_row * down[:, None], by_column * right, _laplacian(soft))
    (dy, dx, down_by, right_by, _), explained = _fitted(moves, rest[..., 1:-1, 1:-1])
    _, kernel = _fitted((_laplacian(p),), (q - p)[..., 1:-1, 1:-1])
    theirs_energy, energy = (float(np.mean(_laplacian(side) ** 2)) for side in (q, p))
    ratio = theirs_energy / energy if energy else 1.0
    return Resampling(dy, dx, (down_by, right_by), explained, kernel, ratio)


def _fitted(terms: tuple[Array, ...], rest: Array) -> tuple[list[float], float]:
    """Least squares for the terms, and the share of the square of `rest` that they explain."""
    stacked, values = np.stack([term.reshape(-1) for term in terms]), rest.reshape(-1)
    found = np.linalg.lstsq(stacked @ stacked.T, stacked @ values, rcond=None)[0]
    left, total = values - found @ stacked, float(values @ values)
    return found.tolist(), 1.0 - float(left @ left) / total if total else 0.0


def _softened(p: Array) -> Array:
    """The image without fine details, at the same size."""
    for _ in range(SOFTENINGS):
        for axis in (-2, -1):
            p = np.moveaxis(p, axis, -1)
            padded = np.concatenate([p[..., :1], p, p[..., -1:]], axis=-1)
            p = np.moveaxis((padded[..., :-2] + 2 * p + padded[..., 2:]) / 4, -1, axis)
    return p


def _laplacian(p: Array) -> Array:
    around = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
    return np.asarray(around - 4 * p[..., 1:-1, 1:-1])
