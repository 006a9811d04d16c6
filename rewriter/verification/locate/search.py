"""The first tensor that goes wrong, found by cuts through the graph, a few marked tensors in a build.

A cut after tensor i is what the tensors after it still read of those up to it. If an error that a tensor
has reaches what is computed from it, some tensor up to i is wrong exactly if one of the cut is. So the
first wrong tensor is found by bisection over cuts, in O(log n) builds, with as many tensors marked as a
cut is wide: few in real networks, whose residual streams are one tensor. Several builds go on at a time,
each with the cuts of a part of what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rewriter.verification.locate.lineup import Lineup

MARKS = 8
"""Tensors that are marked in one build, unless told otherwise: few enough that most fusions stay."""

BYTES = 512 * 2**20
"""What marked tensors may take together, in FP32: they are held by the engine and on disk."""

MAX_BUILDS = 48
"""Builds after which the search ends with what it knows: twice what 10^4 tensors take, with retries."""


ABSENT = "it is not in the built network: folded, or fused by the parser"


@dataclass(frozen=True)
class Marked:
    """What one build with marked tensors showed.

    Attributes:
        errors: Of the marked tensors, by name; empty if the build says nothing.
        unchanged: Whether the model's own outputs are those of a build without marks.
        problem: Why it was not built or did not run; "" if it did.
    """

    errors: Mapping[str, float]
    unchanged: bool
    problem: str = ""


Measure = Callable[[Sequence[Sequence[str]]], Sequence[Marked]]
"""Makes a build for each of some sets of tensors, which it marks."""


@dataclass
class Search:
    """The state of a search over `lineup`, which is in topological order and leads to a wrong output.

    Attributes:
        measure: Builds with tensors marked.
        jobs: Builds at a time.
        tell: Gets a line after each round of builds.
        tolerance: Errors above it (or NaN) are wrong.
        known: Errors of the tensors that are known, by name; the search adds to it.
        low: Position of the last cut that is right; -1 for the inputs.
        high: Position of the first tensor that is known to be wrong.
        hiding: Tensors that change the model's outputs when they are marked alone, with the reason.
        builds: How many were made.
    """

    lineup: Lineup
    measure: Measure
    tolerance: float
    known: dict[str, float]
    marks: int = MARKS
    max_builds: int = MAX_BUILDS
    jobs: int = 1
    tell: Callable[[str], None] = lambda line: None
    low: int = -1
    high: int = 0
    hiding: dict[str, str] = field(default_factory=dict)
    builds: int = 0
    discarded: int = 0
    _room: int = 0

    def run(self) -> None:
        """Narrow `low` and `high` until they are neighbours, or no cut is left that can be marked."""
        self._room = self.marks
        self.high = len(self.lineup.tensors) - 1
        self._learn()
        while self.high - self.low > 1 and self.builds < self.max_builds:
            sets = self._next_sets()
            if not sets:
                break
            self.mark(sets)
            self._learn()
            left, count = self.high - self.low - 1, len(self.lineup.tensors)
            self.tell(f"{self.builds} builds; {left} of {count} tensors are left")

    @property
    def found(self) -> bool:
        """Whether the first wrong tensor is known: all that it is computed from is right."""
        return self.high - self.low == 1

    def wrong(self, name: str) -> bool:
        return not self.known[name] <= self.tolerance

    def mark(self, sets: Sequence[Sequence[str]]) -> None:
        """A build for each set, as many as are left."""
        sets = sets[: self.max_builds - self.builds]
        for names, shown in zip(sets, self.measure(sets), strict=True):
            self.builds += 1
            self._take(names, shown)

    def _take(self, names: Sequence[str], shown: Marked) -> None:
        """What a build showed; if it changed the outputs it is discarded, and fewer are marked next."""
        if shown.unchanged and not shown.problem:
            self.known.update(shown.errors)
            self.hiding.update({name: ABSENT for name in names if name not in shown.errors})
            return
        self.discarded += 1
        if len(names) > 1:
            self._room = max(1, len(names) // 2)
            return
        self.hiding[names[0]] = shown.problem or "the outputs change when it is marked"
        self._room = self.marks

    def fitting(self, names: Sequence[str]) -> list[str]:
        """As many of the first names as one build may mark."""
        sizes = {t.name: 4 * t.size for t in self.lineup.tensors}
        kept: list[str] = []
        total = 0
        for name in names[: self._room or self.marks]:
            total += sizes[name]
            if kept and total > BYTES:
                break
            kept.append(name)
        return kept

    def cut(self, position: int) -> list[str]:
        """The tensors up to `position` that are read after it, and that at `position`."""
        last, tensors = self.lineup.last_use, self.lineup.tensors
        return [tensors[i].name for i in self._live.get(position, ()) if i == position or last[i] > position]

    @cached_property
    def _live(self) -> Mapping[int, Sequence[int]]:
        return _live(self.lineup)

    def _learn(self) -> None:
        """Draw the conclusions of what is known."""
        tensors = self.lineup.tensors
        self.high = next(
            (i for i, t in enumerate(tensors[: self.high]) if t.name in self.known and self.wrong(t.name)),
            self.high,
        )
        self.low = min(self.low, self.high - 1)
        for position in range(self.high - 1, self.low, -1):
            if all(name in self.known and not self.wrong(name) for name in self.cut(position)):
                self.low = position
                return

    def sets(self, names: Sequence[str]) -> list[list[str]]:
        """The first names, as many as fit in the builds of one round."""
        found: list[list[str]] = []
        left = list(names)
        while left and len(found) < self.jobs:
            found.append(self.fitting(left))
            left = left[len(found[-1]) :]
        return found

    def _next_sets(self) -> list[list[str]]:
        """What the builds of a round mark: each has a part of the cuts that are left, and no tensor twice."""
        positions = [p for p in range(self.low + 1, self.high) if not self._hidden(p)]
        jobs = min(self.jobs, len(positions))
        sets: list[list[str]] = []
        seen: set[str] = set()
        for job in range(jobs):
            part = positions[job * len(positions) // jobs : (job + 1) * len(positions) // jobs]
            names = [name for name in self._next_marks(part) if name not in seen]
            seen.update(names)
            sets += [names] if names else []
        return sets

    def _next_marks(self, positions: Sequence[int]) -> list[str]:
        """Tensors of as many evenly spaced cuts as fit; of one cut, in parts, if none fits."""
        for count in range(min(self._room, len(positions)), 0, -1):
            chosen = [self._narrowest(positions, (j + 1) / (count + 1)) for j in range(count)]
            names = list(dict.fromkeys(name for p in chosen for name in self._unknown(p)))
            if len(names) <= self._room and self.fitting(names) == names:
                return names
        return self.fitting(self._unknown(self._narrowest(positions, 0.5)))

    def _hidden(self, position: int) -> bool:
        return any(name in self.hiding and name not in self.known for name in self.cut(position))

    def _unknown(self, position: int) -> list[str]:
        return [name for name in self.cut(position) if name not in self.known]

    def _narrowest(self, positions: Sequence[int], share: float) -> int:
        """The position near `share` of the way whose cut has fewest unknown tensors."""
        centre = min(len(positions) - 1, int(share * len(positions)))
        reach = max(1, len(positions) // 16)
        near = range(max(0, centre - reach), min(len(positions), centre + reach + 1))
        best = min(near, key=lambda i: (len(self._unknown(positions[i])), abs(i - centre)))
        return positions[best]


def _live(lineup: Lineup) -> dict[int, list[int]]:
    """The tensors of every cut, by position."""
    last = lineup.last_use
    found: dict[int, list[int]] = {}
    alive: list[int] = []
    for position in range(len(lineup.tensors)):
        alive = [*(i for i in alive if last[i] > position), position]
        found[position] = alive
    return found
