"""What a comparison of two preprocessing pipelines found, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "dtype",
    "layout",
    "channel-order",
    "scale",
    "normalization",
    "orientation",
    "shift",
    "size",
    "padding",
    "interpolation",
    "rounding",
    "order",
    "values",
    "name",
]


@dataclass(frozen=True)
class Difference:
    """One thing that the other pipeline does differently.

    Attributes:
        kind: What it is about.
        phrase: To go on after "theirs ": `is BGR`.
        text: The same in full, with figures.
    """

    kind: Kind
    phrase: str
    text: str


@dataclass(frozen=True)
class ArrayComparison:
    """One array of one sample.

    Attributes:
        name: The array's, in ours.
        differences: All that were found, together.
        code: Lines of NumPy that make `theirs` of `ours`; empty where nothing relates the two.
        before, after: Relative L2 distance to theirs of ours (infinite if the shapes differ), and of what
            `code` makes of it.
        notes: What the data cannot tell.
    """

    name: str
    differences: tuple[Difference, ...] = ()
    code: tuple[str, ...] = ()
    before: float = 0.0
    after: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """`theirs is BGR and is not divided by 255`."""
        phrases = [d.phrase for d in self.differences]
        if not phrases:
            return "no difference"
        return "theirs " + " and ".join([", ".join(phrases[:-1]), phrases[-1]] if phrases[1:] else phrases)


@dataclass(frozen=True)
class SampleComparison:
    """All arrays of one sample: where ours and theirs come from, and what differs."""

    ours: str
    theirs: str
    arrays: tuple[ArrayComparison, ...]


@dataclass(frozen=True)
class InputComparison:
    """All samples of both pipelines, in order.

    Attributes:
        counts: Samples in ours and in theirs; those that one side lacks were not compared.
    """

    samples: tuple[SampleComparison, ...]
    counts: tuple[int, int]

    @property
    def differ(self) -> bool:
        """Whether anything differs, the number of samples included."""
        return self.counts[0] != self.counts[1] or any(a.differences for s in self.samples for a in s.arrays)
