"""Finds the first wrong tensor by bisection over cuts through the graph, with a few marks in a build.

The cut after tensor i consists of the tensors up to i that later nodes still read. If a wrong tensor always
makes its descendants wrong, some tensor up to i is wrong exactly if one of the cut is. So bisection finds the
first wrong tensor in O(log n) builds, each with as many marks as a cut is wide. Cuts of real networks are
narrow, as their residual streams are one tensor. Several builds run at a time, each with cuts from its part
of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rewriter.judge.locate.lineup import Lineup

MARKS = 8
"""Default number of tensors that one build marks: few enough that most fusions stay."""

BYTES = 512 * 2**20
"""Limit on the size of all marked tensors in FP32: they occupy the engine's memory and the disk."""

MAX_BUILDS = 48
"""Builds after which the search ends: twice the number for 10^4 tensors, retries included."""

ABSENT = "it is not in the built network: folded, or fused by the parser"


@dataclass(frozen=True)
class Marked:
    """The result of one build with marked tensors.

    Attributes:
        errors: Errors of the marked tensors, by name; empty if the build is discarded.
        unchanged: True if the model's own outputs are those of a build without marks.
        problem: The reason why it was not built or did not run; "" if it did.
    """

    errors: Mapping[str, float]
    unchanged: bool
    problem: str = ""


Measure = Callable[[Sequence[Sequence[str]]], Sequence[Marked]]
"""Makes one build for each set of tensors, which it marks."""


@dataclass
class Bisection:
    """The state of a search over `lineup`, whose tensors lead to a wrong output.

    Attributes:
        measure: Makes builds with marked tensors.
        jobs: Builds at a time.
        report: Called with a line of text after each round of builds.
        tolerance: A tensor with an error above it (or NaN) is wrong.
        known: Measured errors, by tensor; the search adds to it.
        low: Position of the last cut that is right; -1 for the inputs.
        high: Position of the first tensor that is known to be wrong.
        hiding: Tensors that cannot be measured, with the reason: marked alone, they change the outputs.
        builds, discarded: Number of builds, and of those whose outputs changed.
    """

    lineup: Lineup
    measure: Measure
    tolerance: float
    known: dict[str, float]
    marks: int = MARKS
    max_builds: int = MAX_BUILDS
    jobs: int = 1
    report: Callable[[str], None] = lambda line: None
    low: int = -1
    high: int = 0
    hiding: dict[str, str] = field(default_factory=dict)
    builds: int = 0
    discarded: int = 0
    _room: int = field(init=False)

    def __post_init__(self) -> None:
        self._room = self.marks

    def run(self) -> None:
        """Narrows `low` and `high` until they are neighbours, or no cut is left that can be marked."""
        self.high = len(self.lineup.tensors) - 1
        self._learn()
        while self.builds < self.max_builds and (sets := self._next_sets()):
            self.mark(sets)
            self._learn()
            left, count = self.high - self.low - 1, len(self.lineup.tensors)
            self.report(f"builds: {self.builds}; {left} of {count} tensors are left")

    @property
    def found(self) -> bool:
        """True if the first wrong tensor is known: all tensors that it is computed from are right."""
        return self.high - self.low == 1

    def wrong(self, name: str) -> bool:
        return not self.known[name] <= self.tolerance

    def mark(self, sets: Sequence[Sequence[str]]) -> None:
        """Makes a build for each set, up to `max_builds`."""
        sets = sets[: self.max_builds - self.builds]
        for names, shown in zip(sets, self.measure(sets), strict=True):
            self.builds += 1
            self._take(names, shown)

    def _take(self, names: Sequence[str], shown: Marked) -> None:
        """Records the result of a build. If its outputs changed, the next build marks fewer tensors."""
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
        """Returns the first names, as many as one build may mark."""
        sizes = {t.name: 4 * t.size for t in self.lineup.tensors}
        kept: list[str] = []
        total = 0
        for name in names[: self._room]:
            total += sizes[name]
            if kept and total > BYTES:
                break
            kept.append(name)
        return kept

    def cut(self, position: int) -> list[str]:
        """Returns the tensor at `position`, and the earlier ones that are read after it."""
        return [self.lineup.tensors[i].name for i in self._live[position]]

    @cached_property
    def _live(self) -> list[list[int]]:
        """Positions of the tensors of every cut."""
        last = self.lineup.last_use
        found: list[list[int]] = []
        alive: list[int] = []
        for position in range(len(last)):
            alive = [*(i for i in alive if last[i] > position), position]
            found.append(alive)
        return found

    def _learn(self) -> None:
        """Updates `low` and `high` from the known errors."""
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
        """Splits the first names into sets for the builds of one round."""
        found: list[list[str]] = []
        left = list(names)
        while left and len(found) < self.jobs:
            found.append(self.fitting(left))
            left = left[len(found[-1]) :]
        return found

    def _next_sets(self) -> list[list[str]]:
        """Returns tensors for each build: each gets a part of the remaining cuts, and no tensor twice."""
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
        """Returns tensors of evenly spaced cuts, as many as fit; if none fits, the first of one cut."""
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
        """Returns the position near `share` of the way whose cut has fewest unknown tensors."""
        centre = min(len(positions) - 1, int(share * len(positions)))
        reach = max(1, len(positions) // 16)
        near = range(max(0, centre - reach), min(len(positions), centre + reach + 1))
        best = min(near, key=lambda i: (len(self._unknown(positions[i])), abs(i - centre)))
        return positions[best]
