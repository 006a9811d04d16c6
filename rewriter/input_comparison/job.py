"""`compare-inputs`: finds what differs between two preprocessing pipelines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rewriter.base.errors import InputsError, UsageError
from rewriter.base.stopwatch import Progress
from rewriter.input_comparison.explain import (
    ROUNDING,
    ArrayComparison,
    Difference,
    InputComparison,
    SampleComparison,
    compare_images,
    compare_others,
    distance,
)
from rewriter.input_comparison.relation import relation
from rewriter.ir.model import Array
from rewriter.runtime.inputs import read_raw_samples
from rewriter.runtime.inputs.samples import Sample

SAMPLES = 8  # default number of samples: a pipeline treats all of them alike
FIRST = "array 0"  # name of the first array of a tuple


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
        if progress is not None:
            progress("comparing", index, len(pairs))
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
    related = relation(ours, theirs) if differ else None
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
