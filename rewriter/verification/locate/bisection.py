"""Finds the first wrong tensor by bisection over cuts through the graph, with a few marks in a build.

The cut after tensor i consists of the tensors up to i that later nodes still read. If a wrong tensor always
makes its descendants wrong, some tensor up to i is wrong exactly if one of the cut is. So bisection finds the
first wrong tensor in O(log n) builds, each with as many marks as a cut is wide. Cuts of real networks are
narrow, as their residual streams are one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rewriter.runtime.metrics.parts import Part
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.verification.locate.lineup import Lineup

TOLERANCE = TOLERANCES["fp16"].value
"""Relative L2 error above which a tensor is wrong: well-conditioned networks stay below it in FP16."""

MARKS = 128
"""Tensors that the first build marks: as a rule, all that a fusion may hide."""

FEWER = 4
"""Divisor of the number of marks after a build whose outputs they change."""

MAX_BUILDS = 24
"""Builds after which the search ends: twice the number for 10^4 tensors, retries included."""

ABSENT = "it is not in the built network: folded, or fused by the parser"


@dataclass(frozen=True)
class LocateOptions:
    """Limits of the search; a tensor with a relative L2 error above `tolerance` is wrong.

    `parts` are parts of outputs, by name, that are wrong where the outputs as a whole are not.
    """

    tolerance: float = TOLERANCE
    marks: int = MARKS
    max_builds: int = MAX_BUILDS
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass
class Bisection:
    """The state of a search over `lineup`, whose tensors lead to a wrong output.

    Attributes:
        measure: Makes a build with marked tensors; gives their errors, or why the build is discarded.
        known: Measured errors, by tensor; the search adds to it.
        low: Position of the last cut that is right; -1 for the inputs.
        high: Position of the first tensor that is known to be wrong.
        hiding: Tensors that cannot be measured, with the reason.
    """

    lineup: Lineup
    measure: Callable[[Sequence[str]], Mapping[str, float] | str]
    known: dict[str, float]
    options: LocateOptions = field(default_factory=LocateOptions)
    report: Callable[[str], None] = lambda line: None
    low: int = -1
    high: int = 0
    hiding: dict[str, str] = field(default_factory=dict)
    builds: int = 0
    discarded: int = 0
    _room: int = 0

    def run(self) -> None:
        """Narrows `low` and `high` until they are neighbours, or no cut is left that can be marked."""
        self._room = self.options.marks
        self.high = len(self.lineup.tensors) - 1
        self._learn()
        while self.mark(self._next_marks()):
            self._learn()
            left, count = self.high - self.low - 1, len(self.lineup.tensors)
            self.report(f"builds: {self.builds}; {left} of {count} tensors are left")

    def mark(self, wanted: Iterable[str]) -> bool:
        """Makes a build with the first unknown tensors; False if there are none, or no build is left."""
        names = [n for n in wanted if n not in self.known and n not in self.hiding][: self._room]
        if not names or self.builds >= self.options.max_builds:
            return False
        marked = self.measure(names)
        self.builds += 1
        if not isinstance(marked, str):
            self.known.update(marked)
            self.hiding.update({name: ABSENT for name in names if name not in marked})
            self._room = min(2 * self._room, self.options.marks)
            return True
        self.discarded += 1
        self._room = max(1, len(names) // FEWER)
        if len(names) == 1:
            self.hiding[names[0]] = marked
        return True

    def cut(self, position: int) -> list[str]:
        """Returns the tensor at `position`, and the earlier ones that are read after it."""
        return [self.lineup.tensors[i].name for i in self._live[position]]

    @cached_property
    def _live(self) -> list[list[int]]:
        """Positions of the tensors of every cut."""
        last = self.lineup.last_use
        cuts: list[list[int]] = []
        alive: list[int] = []
        for position in range(len(last)):
            alive = [*(i for i in alive if last[i] > position), position]
            cuts.append(alive)
        return cuts

    def _learn(self) -> None:
        """Updates `low` and `high` from the known errors."""
        right = {name for name, error in self.known.items() if error <= self.options.tolerance}
        wrong = self.known.keys() - right
        tensors = self.lineup.tensors[: self.high]
        self.high = next((i for i, tensor in enumerate(tensors) if tensor.name in wrong), self.high)
        cuts = range(self.high - 1, self.low, -1)
        self.low = next((p for p in cuts if right.issuperset(self.cut(p))), min(self.low, self.high - 1))

    def _next_marks(self) -> list[str]:
        """Returns the tensors of as many evenly spaced cuts as fit; if none fits, the tensors of one cut."""
        cuts = [p for p in range(self.low + 1, self.high) if self.hiding.keys().isdisjoint(self.cut(p))]
        count = len(cuts)
        while count:
            chosen = cuts
            if count < len(cuts):
                chosen = [self._narrowest(cuts, (j + 1) / (count + 1)) for j in range(count)]
            names = list(dict.fromkeys(name for p in chosen for name in self._unknown(p)))
            if len(names) <= self._room:
                return names
            count = min(count * 3 // 4, self._room)
        return self._unknown(self._narrowest(cuts, 0.5)) if cuts else []

    def _unknown(self, position: int) -> list[str]:
        return [name for name in self.cut(position) if name not in self.known]

    def _narrowest(self, positions: Sequence[int], share: float) -> int:
        """Returns the position near `share` of the way whose cut has fewest unknown tensors."""
        centre = min(len(positions) - 1, int(share * len(positions)))
        reach = max(1, len(positions) // 16)
        near = range(max(0, centre - reach), min(len(positions), centre + reach + 1))
        best = min(near, key=lambda i: (len(self._unknown(positions[i])), abs(i - centre)))
        return positions[best]
