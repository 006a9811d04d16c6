"""What differs between two preprocessing pipelines, from what they made of the same data.

An affine relation of the pixels, an order of channels, an orientation and a shift are found together:
phase correlation does not see brightness, a line is fitted to each channel where the images overlap, and
the scalings that are in use (0..1, ImageNet's, CLIP's ...) are held against the fit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.data.inputs import read_raw_samples
from rewriter.data.parity.describe import dtype_difference
from rewriter.data.parity.explain import explain
from rewriter.data.parity.images import match
from rewriter.data.parity.layouts import layout_pairs
from rewriter.data.parity.plain import ROUNDING, compare_plain, distance
from rewriter.data.parity.result import ArrayComparison, Difference, InputComparison, SampleComparison
from rewriter.errors import InputsError
from rewriter.model import Array

__all__ = ["ArrayComparison", "Difference", "InputComparison", "compare_arrays", "compare_inputs"]

SAMPLES = 8
"""Samples that are compared unless told otherwise: a pipeline does the same to all of them."""

UNRELATED = "shows something else"


def compare_inputs(
    ours: Path,
    theirs: Path,
    *,
    samples: int = SAMPLES,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> InputComparison:
    """Compare what two pipelines wrote, sample by sample, in the order of their files.

    Args:
        ours, theirs: .npz or .npy files, folders of them, or Polygraphy's JSON.
        samples: How many samples to look at.

    Raises:
        InputsError: a file that cannot be read, or that holds no numbers.
    """
    sides = read_raw_samples(ours), read_raw_samples(theirs)
    pairs = list(zip(*sides, strict=False))[:samples]
    found = []
    for index, (mine, other) in enumerate(pairs):
        progress("comparing", index, len(pairs))
        arrays = _arrays(mine.read(), mine.where), _arrays(other.read(), other.where)
        found.append(SampleComparison(mine.where, other.where, tuple(_by_name(*arrays))))
    return InputComparison(tuple(found), (len(sides[0]), len(sides[1])))


def compare_arrays(ours: Array, theirs: Array, name: str = "array") -> ArrayComparison:
    """Compare one array of both pipelines: images [N, C, H, W] in any layout, or anything else."""
    if ours.shape == theirs.shape and distance(ours, theirs) <= ROUNDING:
        return ArrayComparison(name, tuple(dtype_difference(ours.dtype, theirs.dtype)), _cast(ours, theirs))
    found = match(ours, theirs) if min(ours.size, theirs.size) else None
    if found is not None and found.related:
        return explain(name, found, ours, theirs)
    told = compare_plain(name, ours, theirs)
    if found is None or told.code:
        return told
    return _unrelated(name, ours, theirs)


def _cast(ours: Array, theirs: Array) -> tuple[str, ...]:
    return () if ours.dtype == theirs.dtype else (f"theirs = ours.astype(np.{theirs.dtype})",)


def _unrelated(name: str, ours: Array, theirs: Array) -> ArrayComparison:
    """Images that have nothing in common: what their types, shapes and ranges say."""
    told = [*dtype_difference(ours.dtype, theirs.dtype)]
    mine, other = layout_pairs(ours.shape, theirs.shape)[0]
    if mine != other:
        told.append(Difference("layout", f"is {other.axes}, not {mine.axes}", f"theirs is {other.axes}"))
    elif ours.shape != theirs.shape:
        text = f"theirs has shape {list(theirs.shape)}, ours {list(ours.shape)}"
        told.append(Difference("size", f"has shape {list(theirs.shape)}, not {list(ours.shape)}", text))
    text = "no shift, order of channels or scale makes one of the other: is it the same sample?"
    told.append(Difference("values", UNRELATED, text))
    notes = tuple(f"{who}: {_statistics(a)}" for who, a in (("ours", ours), ("theirs", theirs)))
    before = distance(ours, theirs)
    return ArrayComparison(name, tuple(told), (), before, before, notes)


def _statistics(array: Array) -> str:
    values = array.astype(np.float64)
    bad = int((~np.isfinite(values)).sum())
    usable = values[np.isfinite(values)]
    if not usable.size:
        return f"{bad} NaN or infinite values and nothing else"
    text = (
        f"values {usable.min():.4g}..{usable.max():.4g}, mean {usable.mean():.4g}, "
        f"standard deviation {usable.std():.4g}"
    )
    return f"{text}, and {bad} NaN or infinite" if bad else text


def _arrays(feeds: Mapping[str, Any], where: str) -> dict[str, Array]:
    found = {}
    for name, value in feeds.items():
        found[name] = array = np.asarray(value)
        if array.dtype.kind not in "fiubV" or (array.dtype.kind == "V" and array.dtype.isbuiltin != 2):
            raise InputsError(
                f"array {name!r} holds {array.dtype}, not numbers",
                where=where,
                hint="save the tensors that the model gets",
            )
    if not found:
        raise InputsError("it holds no array", where=where, hint="write it with np.savez")
    return found


def _by_name(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> Iterator[ArrayComparison]:
    """Arrays of one name; one of a kind on both sides are the same, whatever their names."""
    left = [name for name in theirs if name not in ours]
    for name, array in ours.items():
        other = name if name in theirs else _partner(name, ours, theirs, left)
        if other is None:
            gone = Difference(
                "name", f"has no array {name!r}", f"theirs holds {', '.join(map(repr, theirs))}"
            )
            yield ArrayComparison(name, (gone,), (), float("inf"), float("inf"))
            continue
        found = compare_arrays(array, theirs[other], name)
        if other != name:
            left.remove(other)
            found = _noted(found, f"it is called {other!r} in theirs")
        yield found
    for name in left:
        new = Difference("name", f"has an array {name!r} that ours has not", f"ours holds {', '.join(ours)}")
        yield ArrayComparison(name, (new,), (), float("inf"), float("inf"))


def _partner(
    name: str, ours: Mapping[str, Array], theirs: Mapping[str, Array], left: list[str]
) -> str | None:
    if len(ours) == len(theirs) == 1:
        return next(iter(theirs))
    close = difflib.get_close_matches(name, left, 1, 0.6)
    return close[0] if close else None


def _noted(found: ArrayComparison, note: str) -> ArrayComparison:
    return ArrayComparison(
        found.name, found.differences, found.code, found.before, found.after, (*found.notes, note)
    )
