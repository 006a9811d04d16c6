"""`compare-inputs`: finds what differs between two preprocessing pipelines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rewriter.ir.english import count
from rewriter.ir.errors import InputsError, UsageError, shortened
from rewriter.ir.model import Array
from rewriter.ir.model.stopwatch import Progress
from rewriter.parity import InputComparison, SampleComparison, compare_samples
from rewriter.parity.photographs import are_photographs, photographs
from rewriter.runtime.inputs import may_hold_samples, read_raw_samples
from rewriter.runtime.inputs.samples import Sample

SAMPLES = 8
"""Default number of samples: a pipeline treats all of them alike."""

FIRST = "array 0"
"""Name of the first array of a tuple."""

_SIDES = "it takes what inputs= of rewriter.fix takes: a path, arrays, dicts of arrays, or a data loader"
_PHOTOGRAPHS = "it takes a path, a uint8 array [H, W, 3], or a list of either, one for each sample"


def compare_inputs(
    ours: Any,
    theirs: Any,
    *,
    samples: int = SAMPLES,
    images: Any = None,
    progress: Progress | None = None,
) -> InputComparison:
    """Compares the results of two pipelines, sample by sample, in the order of the data.

    Args:
        ours, theirs: What `inputs=` of `rewriter.fix` takes: a path, an array, a dict or a tuple of arrays,
            a list of samples, a data loader, or a function that returns one of these.
        samples: Number of samples to compare, at most.
        images: The photographs that both pipelines read, in the order of the samples: a file, a folder,
            a uint8 array [H, W, 3], or a list of these.

    Raises:
        InputsError: a file cannot be read, or holds no numbers.
        UsageError: an argument has the wrong type.
    """
    for where, data in (("ours=", ours), ("theirs=", theirs)):
        _require(callable(data) or may_hold_samples(data), data, where, _SIDES)
    _require(images is None or are_photographs(images), images, "images=", _PHOTOGRAPHS)
    if samples < 1:
        raise UsageError(f"it cannot be {samples}", where="`samples`", hint="compare at least one")
    sides = _read(ours, "ours="), _read(theirs, "theirs=")
    pairs = list(zip(*sides, strict=False))[:samples]
    shown = [] if images is None else _shown(images, len(pairs))
    found = []
    for index, (mine, other) in enumerate(pairs):
        if progress is not None:
            progress("comparing", index, len(pairs))
        image = shown[index] if shown else None
        both = _arrays(mine), _arrays(other)
        arrays = _without_labels(*both), _without_labels(*reversed(both))
        found.append(SampleComparison(mine.where, other.where, tuple(compare_samples(*arrays, image))))
    return InputComparison(tuple(found), (len(sides[0]), len(sides[1])))


def _require(fits: bool, value: Any, where: str, hint: str) -> None:
    if not fits:
        raise UsageError(f"it cannot be {shortened(value)}", where=where, hint=hint)


def _read(data: Any, keyword: str) -> Sequence[Sample]:
    try:
        return read_raw_samples(data)
    except UsageError as error:
        error.where = " ".join(filter(None, (keyword, error.where)))
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
    """The arrays of one side; of a tuple the first alone if the other side has one: labels follow it."""
    return {FIRST: own[FIRST]} if len(other) == 1 and FIRST in own else own


def _shown(images: Any, needed: int) -> list[Array]:
    """The photographs, one for each sample."""
    shown = photographs(images)
    if len(shown) < needed:
        what = f"it has {count(len(shown), 'photograph')} for {count(needed, 'sample')}"
        where = str(images) if isinstance(images, (str, os.PathLike)) else "`images`"
        raise InputsError(what, where=where, hint="one photograph for each sample, or fewer `samples`")
    return shown
