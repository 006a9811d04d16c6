"""The result of a comparison of two preprocessing pipelines, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.base.summary import Row, Summary, listed
from rewriter.base.text import count


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

    Attributes:
        name: The array's name in ours.
        before, after: Relative L2 distance of ours from theirs (infinite if the shapes differ), and what is
            left of it where the differences explain it.
        notes: What the data does not show.
    """

    name: str
    differences: tuple[Difference, ...] = ()
    before: float = 0.0
    after: float = 0.0
    notes: tuple[str, ...] = ()

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
        yield from listed("differences", sentences, 3)


def dtype_difference(ours: np.dtype[Any], theirs: np.dtype[Any]) -> tuple[Difference, ...]:
    text = f"theirs has element type {theirs}, ours {ours}"
    return (Difference("dtype", f"is {theirs}, not {ours}", text),) if ours != theirs else ()
