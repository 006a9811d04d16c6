"""Finds the differences between two preprocessing pipelines, from their results on the same data.

Layout, order of channels and scale of images are found together: a line is fitted to each channel, and the
usual scalings (0..1, ImageNet's, CLIP's ...) are compared with the fit. How an image was resized, cropped or
letterboxed is found with the photograph, by running OpenCV and Pillow on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from rewriter.ir.model import Array
from rewriter.parity.comparison import (
    ArrayComparison,
    Difference,
    InputComparison,
    SampleComparison,
)
from rewriter.parity.explain import ASK, explain
from rewriter.parity.photographs import with_origins
from rewriter.parity.plain import ROUNDING, compare_plain, distance
from rewriter.parity.relation import axes_pairs, relation

__all__ = [
    "ArrayComparison",
    "Difference",
    "InputComparison",
    "SampleComparison",
    "compare_arrays",
    "compare_samples",
]


def compare_arrays(
    ours: Array, theirs: Array, name: str = "array", image: Array | None = None
) -> ArrayComparison:
    """Compares one array of both pipelines: images in any layout, or any other numbers.

    Args:
        image: The photograph that both read, [H, W, 3] in uint8: tells how each side resized it.
    """
    related = None
    if distance(ours, theirs) > ROUNDING and min(ours.size, theirs.size):
        related = relation(ours, theirs)
    comparison = explain(name, related, ours, theirs) if related else compare_plain(name, ours, theirs)
    if related is None and not comparison.code and axes_pairs(ours.shape, theirs.shape):
        comparison = _unrelated(comparison, ours, theirs)
    if image is None or not comparison.differences:
        return comparison
    return with_origins(comparison, image, ours, theirs)


def _unrelated(comparison: ArrayComparison, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison of images that no relation was found for."""
    if not comparison.differences:
        return comparison
    text = "no layout, order of channels or scale turns ours into theirs: another resize, or another sample?"
    values = Difference("values", "shows something else", text)
    kept = tuple(d for d in comparison.differences if d.kind != "values")
    notes = [f"{who}: {_statistics(array)}" for who, array in (("ours", ours), ("theirs", theirs))]
    return replace(comparison, differences=(*kept, values), notes=(*notes, ASK))


def _statistics(array: Array) -> str:
    values = array[np.isfinite(array)].astype(np.float64)
    bad = f"{array.size - values.size} NaN or infinite"
    span = (
        f"values {values.min():.4g}..{values.max():.4g}, mean {values.mean():.4g}" if values.size else "none"
    )
    return f"{span}, {bad}" if values.size < array.size else span


def compare_samples(
    ours: Mapping[str, Array], theirs: Mapping[str, Array], image: Array | None = None
) -> Iterator[ArrayComparison]:
    """Compares arrays of the same name; of the others, the first with the first, and so on.

    Args:
        image: The photograph of the sample.
    """
    left = [name for name in theirs if name not in ours]
    for name, array in ours.items():
        other = name if name in theirs else left.pop(0) if left else None
        if other is None:
            text = f"theirs holds {', '.join(map(repr, theirs))}"
            gone = Difference("name", f"has no array {name!r}", text)
            yield ArrayComparison(name, (gone,), (), float("inf"), float("inf"))
            continue
        compared = compare_arrays(array, theirs[other], name, image)
        notes = (f"it is called {other!r} in theirs",) if other != name else ()
        yield replace(compared, notes=(*compared.notes, *notes))
    for name in left:
        new = Difference("name", f"has an array {name!r} that ours lacks", f"ours holds {', '.join(ours)}")
        yield ArrayComparison(name, (new,), (), float("inf"), float("inf"))
