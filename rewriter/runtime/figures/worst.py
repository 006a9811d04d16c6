"""The worst sample and build of each output: its figures, and its picture where it is an image."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewriter.runtime.figures.outputs import OutputStatistics, statistics, worst_statistics
from rewriter.runtime.figures.pair import Pair
from rewriter.runtime.figures.pictures import Picture, picture_of


@dataclass
class WorstOutputs:
    """Collects outputs one by one, and keeps the worst of each name. No array of an output is kept."""

    _figures: dict[str, OutputStatistics] = field(default_factory=dict)
    _pictures: dict[str, Picture] = field(default_factory=dict)

    def add(self, name: str, pair: Pair, *, sample: int = 0, build: int = 0) -> None:
        """Adds one output of one sample and build; a pair of two shapes is left out."""
        if not pair.same_shape:
            return
        known, new = self._figures.get(name), statistics(name, pair, sample=sample, build=build)
        if known is not None and worst_statistics((known, new)) is known:
            return
        self._figures[name] = new
        picture = picture_of(name, pair)
        if picture is not None:
            self._pictures[name] = picture

    @property
    def statistics(self) -> tuple[OutputStatistics, ...]:
        """In the order in which the outputs came."""
        return tuple(self._figures.values())

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Of the outputs that look like images."""
        return tuple(self._pictures.values())
