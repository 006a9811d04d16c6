"""From weights and samples to weights on the grid: what is read of which samples, and when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import median_high

import numpy as np

from rewriter.data.ranges.binades import leading_to
from rewriter.engines.onnxruntime_errors import NoKernelError
from rewriter.model import Array, Model
from rewriter.rewriting.rounding.blas import one_thread
from rewriter.rewriting.rounding.fit import Rounded, Weights, fitted
from rewriter.rewriting.rounding.grid import Grid
from rewriter.rewriting.rounding.layers import Layer, Left, Source, by_sources
from rewriter.rewriting.rounding.rows import OPSET, Chosen, Reader, Rows
from rewriter.rewriting.rounding.shapes import Shapes, inferred_shapes

HELD_BYTES = 2**26
"""Rows that are held at once: 64 MiB, or as much as half of the weights or the largest tensor if that is
more. Layers that have more together take several runs of each sample."""

LEAST_SAMPLES, SAMPLES = 3, 8
"""Samples that give rows: each costs a run, and more would give fewer rows each."""

ROW_BYTES = 2**23
"""Rows of one source, 8 MiB, but at least `LEAST_ROWS`."""

ROWS_PER_CHANNEL, LEAST_ROWS = 4, 256
"""Rows that K channels call for: the moments are known to about sqrt(K / rows). With 8 and 512, a NAFNet's
rounded weights erred by 1.4e-4 and not by 1.9e-4, the emulated network by 4.8e-4 and not by 4.9e-4."""


@dataclass(frozen=True)
class Data:
    """What layers are fitted to.

    Attributes:
        model: Computes in FP32; see `emulation.reference`.
        samples: Feeds, to be gone through as often as wanted.
        count: How many samples there are.
        limit: Rows of a layer in all.
        sources: What rows may be asked for.
        seed: Of the choice of rows.
    """

    model: Model
    samples: Iterable[Mapping[str, Array]]
    count: int
    limit: int
    sources: Sequence[Source]
    seed: int = 0

    @cached_property
    def chosen(self) -> frozenset[int]:
        """Which samples give rows: evenly many, and as few as half of the layers can do with."""
        wanted = [-(-self.called(s) // max(1, self.held(s))) for s in self.sources]
        most = min(SAMPLES, median_high(wanted)) if wanted else 0
        runs = min(self.count, max(LEAST_SAMPLES, most))
        return frozenset(np.linspace(0, self.count - 1, runs).round().astype(int).tolist())

    @property
    def runs(self) -> int:
        """How many samples give rows."""
        return len(self.chosen)

    def called(self, source: Source) -> int:
        """Rows in all that a source's channels call for."""
        groups = source.window.groups if source.window else 1
        most = max(LEAST_ROWS, ROW_BYTES // (4 * source.width))
        return min(self.limit, most, max(LEAST_ROWS, ROWS_PER_CHANNEL * source.width // groups))

    def held(self, source: Source) -> int:
        """Rows that a sample holds, as the first one's shapes tell."""
        shape = self.shapes.get(source.tensor)
        taps = prod(source.window.kernel) if source.window else 1
        return self.limit if shape is None else prod(shape) * taps // source.width

    def each(self, source: Source) -> int:
        """Rows that a sample gives at most."""
        return -(-self.called(source) // self.runs)

    @cached_property
    def shapes(self) -> Shapes:
        """Of the main graph's tensors for the first sample."""
        return inferred_shapes(self.model, next(iter(self.samples)))

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor that a run computes: ranges were measured with several such."""
        stored = {tensor.name for tensor in self.model.proto.graph.initializer}
        return max((4 * prod(shape) for name, shape in self.shapes.items() if name not in stored), default=0)

    def reader(self, room: int) -> Reader:
        """Of the samples that give rows; `room` in bytes, for what is held of them between parts."""
        return Reader(
            self.model, Chosen(self.samples, self.chosen), self.shapes, room // self.runs, self.seed
        )

    def rows(
        self, reader: Reader, sources: Sequence[Source], afterwards: Collection[str]
    ) -> dict[Source, Rows]:
        """The rows of those sources that can be computed.

        Args:
            afterwards: The tensors that will be asked for later.

        Raises:
            ArithmeticRunError: a sample does not run; the message names the node.
        """
        proto = self.model.proto.graph
        known = {v.name for v in proto.input} | {name for node in proto.node for name in node.output}
        wanted = [source for source in sources if source.tensor in known]
        while wanted:
            try:
                return reader.read({s: self.each(s) for s in wanted}, [t for t in afterwards if t in known])
            except NoKernelError as error:
                runs = [source for source in wanted if not self._depends(source, error)]
                if len(runs) == len(wanted):
                    raise
                wanted = runs
        return {}

    def _depends(self, source: Source, error: NoKernelError) -> bool:
        op = error.op.rpartition(".")[2]
        return any(node.op_type == op for node in leading_to(self.model.proto.graph, [source.tensor]))


def compensate(weights: Weights, found: Sequence[Layer], data: Data) -> Iterator[Rounded | Left]:
    """Every weight of `found` that is not on the grid of its type: put there, or left, with the reason.

    Args:
        weights: The values of the layers' weights and biases, float32.

    Raises:
        ArithmeticRunError: a sample does not run; the message names the node.
    """
    wanted: list[Layer] = []
    for layer in found:
        value, grid = weights[layer.weight], Grid(layer.dtype)
        refusal = grid.refusal(value)
        if refusal is not None:
            yield Left(layer.node, refusal)
        elif not grid.holds(value):
            lost = layer.bias and grid.refusal(weights[layer.bias]) is not None
            wanted.append(replace(layer, bias="") if lost else layer)
    if wanted and data.model.opset < OPSET:
        yield Left(wanted[0].node, f"rows are read from operator set {OPSET} on (the pass upgrade-opset)")
        return
    together = by_sources(wanted)
    held = sum(value.nbytes for value in weights.values()) // 2
    room = max(HELD_BYTES, held, data.largest)
    reader = data.reader(room)
    groups = list(_groups(list(together), data, room))
    for index, group in enumerate(groups):
        afterwards = dict.fromkeys(s.tensor for later in groups[index + 1 :] for key in later for s in key)
        rows = data.rows(reader, list(dict.fromkeys(s for sources in group for s in sources)), [*afterwards])
        last = {source: sources for sources in group for source in sources}
        for sources in group:
            with one_thread():
                done = list(_fitted([rows.get(s) for s in sources], together[sources], weights))
            yield from done
            for source in sources:
                if last[source] == sources:  # what is held shrinks while the new weights grow
                    rows.pop(source, None)


def _fitted(
    rows: Sequence[Rows | None], found: Sequence[Layer], weights: Weights
) -> Iterator[Rounded | Left]:
    """Those of one type at a time: they share a grid, and a bias that is rounded with them."""
    for dtype in sorted({layer.dtype for layer in found}):
        yield from fitted(rows, [layer for layer in found if layer.dtype == dtype], weights, Grid(dtype))


def _groups(keys: Sequence[tuple[Source, ...]], data: Data, room: int) -> Iterator[list[tuple[Source, ...]]]:
    """Keys one after the other, as many at a time as have room, in bytes."""
    group: list[tuple[Source, ...]] = []
    held = 0
    for key in keys:
        size = sum(min(data.each(source), data.held(source)) * source.width * 4 for source in key) * data.runs
        if group and held + size > room:
            yield group
            group, held = [], 0
        group.append(key)
        held += size
    if group:
        yield group
