"""`compare-inputs`: finds what differs between two preprocessing pipelines."""

from __future__ import annotations

import os
from pathlib import Path

from rewriter.data.inputs import read_raw_samples
from rewriter.data.parity import InputComparison, SampleComparison, arrays_of, compare_samples
from rewriter.data.parity.photographs import photographs
from rewriter.english import count
from rewriter.errors import InputsError
from rewriter.model.stopwatch import Progress

SAMPLES = 8
"""Default number of samples: a pipeline treats all of them alike."""


def compare_inputs(
    ours: str | os.PathLike[str],
    theirs: str | os.PathLike[str],
    *,
    samples: int = SAMPLES,
    images: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> InputComparison:
    """Compares what two pipelines wrote, sample by sample, in the order of their files.

    Args:
        ours, theirs: .npz or .npy files, folders of them, or Polygraphy's JSON.
        samples: Number of samples to compare, at most.
        images: The photographs that both pipelines read: a file, or a folder in the order of the samples.

    Raises:
        InputsError: a file cannot be read, or holds no numbers.
    """
    sides = read_raw_samples(Path(ours)), read_raw_samples(Path(theirs))
    pairs = list(zip(*sides, strict=False))[:samples]
    shown = [] if images is None else photographs(Path(images))
    if images is not None and len(shown) < len(pairs):
        what = f"it has {count(len(shown), 'photograph')} for {count(len(pairs), 'sample')}"
        raise InputsError(what, where=str(images), hint="one photograph for each sample, or fewer --samples")
    found = []
    for index, (mine, other) in enumerate(pairs):
        if progress is not None:
            progress("comparing", index, len(pairs))
        image = shown[index] if shown else None
        arrays = arrays_of(mine.read(), mine.where), arrays_of(other.read(), other.where)
        found.append(SampleComparison(mine.where, other.where, tuple(compare_samples(*arrays, image))))
    return InputComparison(tuple(found), (len(sides[0]), len(sides[1])))
