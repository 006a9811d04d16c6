"""Finds the differences between two preprocessing pipelines, from their results on the same data.

Affine relation, order of channels, orientation and shift of images are found together. Phase correlation,
which ignores brightness, gives shifts. A line is fitted to each channel where the images overlap, and the
usual scalings (0..1, ImageNet's, CLIP's ...) are compared with the fit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rewriter.ir.errors import InputsError
from rewriter.ir.model import Array
from rewriter.parity.comparison import (
    ArrayComparison,
    Difference,
    InputComparison,
    SampleComparison,
    dtype_difference,
    shape_difference,
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
    "arrays_of",
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
    comparison = _compared(ours, theirs, name)
    if image is None or not comparison.differences:
        return comparison
    return with_origins(comparison, image, ours, theirs)


def _compared(ours: Array, theirs: Array, name: str) -> ArrayComparison:
    if ours.shape == theirs.shape and distance(ours, theirs) <= ROUNDING:
        differences = dtype_difference(ours.dtype, theirs.dtype)
        code = (f"theirs = ours.astype(np.{theirs.dtype})",) if differences else ()
        return ArrayComparison(name, differences, code)
    related = relation(ours, theirs) if min(ours.size, theirs.size) else None
    if related is not None:
        return explain(name, related, ours, theirs)
    plain = compare_plain(name, ours, theirs)
    if plain.code or not axes_pairs(ours.shape, theirs.shape):
        return plain
    return _unrelated(name, ours, theirs)


def _unrelated(name: str, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison of unrelated images: differences of types, layouts, shapes and values."""
    differences = [*dtype_difference(ours.dtype, theirs.dtype)]
    mine, other = axes_pairs(ours.shape, theirs.shape)[0]
    if mine != other:
        differences.append(Difference("layout", f"is {other}, not {mine}", f"theirs is {other}"))
    elif ours.shape != theirs.shape:
        differences.append(shape_difference(ours.shape, theirs.shape))
    text = "no shift, order of channels or scale turns ours into theirs: is it the same sample?"
    differences.append(Difference("values", "shows something else", text))
    notes = [f"{who}: {_statistics(array)}" for who, array in (("ours", ours), ("theirs", theirs))]
    before = distance(ours, theirs)
    return ArrayComparison(name, tuple(differences), (), before, before, (*notes, ASK))


def _statistics(array: Array) -> str:
    values = array.astype(np.float64)
    usable = values[np.isfinite(values)]
    bad = f"{values.size - usable.size} NaN or infinite"
    if not usable.size:
        return f"{bad} values and nothing else"
    span = f"values {usable.min():.4g}..{usable.max():.4g}"
    text = f"{span}, mean {usable.mean():.4g}, standard deviation {usable.std():.4g}"
    return f"{text}, and {bad}" if usable.size < values.size else text


def arrays_of(feeds: Mapping[str, Any], where: str) -> dict[str, Array]:
    found = {}
    for name, value in feeds.items():
        found[name] = array = _array(name, value, where)
        if array.dtype.kind not in "fiubV" or (array.dtype.kind == "V" and array.dtype.isbuiltin != 2):
            raise InputsError(
                f"array {name!r} holds {array.dtype}, not numbers",
                where=where,
                hint="save the tensors that the model gets",
            )
    if not found:
        raise InputsError("it holds no array", where=where, hint="write it with np.savez")
    return found


def _array(name: str, value: Any, where: str) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of different lengths
        what = f"{name!r} is a list whose parts differ in shape"
        raise InputsError(what, where=where, hint="pad the parts to one length") from error


def compare_samples(
    ours: Mapping[str, Array], theirs: Mapping[str, Array], image: Array | None = None
) -> Iterator[ArrayComparison]:
    """Compares arrays of the same name; single arrays, and close names, are compared as well.

    Args:
        image: The photograph of the sample.
    """
    left = [name for name in theirs if name not in ours]
    for name, array in ours.items():
        other = name if name in theirs else _partner(name, ours, theirs, left)
        if other is None:
            gone = Difference(
                "name", f"has no array {name!r}", f"theirs holds {', '.join(map(repr, theirs))}"
            )
            yield ArrayComparison(name, (gone,), (), float("inf"), float("inf"))
            continue
        found = compare_arrays(array, theirs[other], name, image)
        if other != name:
            left.remove(other)
            found = replace(found, notes=(*found.notes, f"it is called {other!r} in theirs"))
        yield found
    for name in left:
        new = Difference("name", f"has an array {name!r} that ours lacks", f"ours holds {', '.join(ours)}")
        yield ArrayComparison(name, (new,), (), float("inf"), float("inf"))


def _partner(
    name: str, ours: Mapping[str, Array], theirs: Mapping[str, Array], left: list[str]
) -> str | None:
    if len(ours) == len(theirs) == 1:
        return next(iter(theirs))
    close = difflib.get_close_matches(name, left, 1, 0.6)
    return close[0] if close else None
