"""Rounds all weights of a model, with bounds on the memory for rows and on the runs of the model."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import median_high
from typing import Any

import numpy as np

from rewriter.data.ranges.binades import leading_to
from rewriter.engines.onnxruntime_errors import NoKernelError
from rewriter.model import Array, Model
from rewriter.rewriting.rounding.blas import one_thread
from rewriter.rewriting.rounding.fit import Rounded, Weights, fitted
from rewriter.rewriting.rounding.grid import Grid
from rewriter.rewriting.rounding.layers import Layer, RowSource, Skipped, by_sources
from rewriter.rewriting.rounding.rows import OPSET, Chosen, Reader, Rows
from rewriter.rewriting.rounding.segments import Shapes, inferred_shapes

HELD_BYTES = 2**26
"""Rows held at once: 64 MiB, half of the weights, or the largest tensor, whichever is most. If the layers
have more, each sample runs several times."""

CUT_BYTES = 3 * 2**25
"""Tensors kept between reads, of all samples: 96 MiB, or as much as rows. What is not kept is computed again,
and a detector of 640 x 640 pixels needs 24 MB per sample where three resolutions are in use."""

FEEDS_BYTES = 2**24
"""Chosen samples that are read once and kept: 16 MiB. More are read again for each part of the graph."""

KEPT_BYTES = 2**28
"""Largest FP32 weights, 256 MiB, whose rounded values are kept for other plans of a model. They need half as
much memory, or as much if they are rounded to TF32, and more where a plan splits layers with common rows. A
repair of RT-DETRv2 rounds five times, and most of its layers have the same type each time."""

LEAST_SAMPLES, SAMPLES = 3, 8
"""Least and most samples that provide rows: each costs a run, and more samples give fewer rows each."""

ROW_BYTES = 2**23
"""Most bytes of rows of one source, but at least `LEAST_ROWS` rows."""

ROWS_PER_CHANNEL, LEAST_ROWS = 4, 256
"""Rows for K channels: the relative error of the Gram matrix is about sqrt(K / rows)
(docs/weights.md#constants)."""


@dataclass(frozen=True)
class FittingData:
    """The samples that layers are fitted to.

    Attributes:
        model: Computes in FP32; see `emulation.reference`.
        samples: Feeds; may be iterated more than once.
        count: Number of samples.
        limit: Most rows of a layer.
        sources: All sources whose rows may be needed.
        seed: Seed of the choice of rows.
    """

    model: Model
    samples: Iterable[Mapping[str, Array]]
    count: int
    limit: int
    sources: Sequence[RowSource]
    seed: int = 0

    @cached_property
    def chosen(self) -> frozenset[int]:
        """Indices of the samples that provide rows: evenly spaced, just enough for half of the layers."""
        wanted = [-(-self.needed(s) // max(1, self.available(s))) for s in self.sources]
        most = min(SAMPLES, median_high(wanted)) if wanted else 0
        runs = min(self.count, max(LEAST_SAMPLES, most))
        return frozenset(np.linspace(0, self.count - 1, runs).round().astype(int).tolist())

    def needed(self, source: RowSource) -> int:
        """Number of rows to read for a source, of all samples together."""
        groups = source.window.groups if source.window else 1
        most = max(LEAST_ROWS, ROW_BYTES // (4 * source.width))
        return min(self.limit, most, max(LEAST_ROWS, ROWS_PER_CHANNEL * source.width // groups))

    def available(self, source: RowSource) -> int:
        """Number of rows in a sample, judged by the first one's shapes."""
        shape = self.shapes.get(source.tensor)
        taps = prod(source.window.kernel) if source.window else 1
        return self.limit if shape is None else prod(shape) * taps // source.width

    def per_sample(self, source: RowSource) -> int:
        """Most rows to read from one sample."""
        return -(-self.needed(source) // len(self.chosen))

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of the main graph's tensors for the first sample."""
        return inferred_shapes(self.model, next(iter(self.samples)))

    @property
    def last(self) -> Mapping[str, Array]:
        """The last of the chosen samples, which is held out if there are several."""
        return next(feeds for i, feeds in enumerate(self.samples) if i == max(self.chosen))

    @property
    def largest(self) -> int:
        """Bytes of the largest computed tensor. Measuring ranges has held several of that size."""
        stored = {tensor.name for tensor in self.model.proto.graph.initializer}
        return max((4 * prod(shape) for name, shape in self.shapes.items() if name not in stored), default=0)

    def room(self, weights: Weights) -> int:
        """Bytes of rows that are held at once."""
        half = sum(value.nbytes for value in weights.values()) // 2
        return max(HELD_BYTES, half, self.largest)

    def reader(self, weights: Weights) -> Reader:
        """Returns a reader of the chosen samples that keeps bounded memory between reads."""
        chosen: Iterable[Mapping[str, Array]] = Chosen(self.samples, self.chosen)
        if sum(array.nbytes for array in next(iter(self.samples)).values()) * len(self.chosen) <= FEEDS_BYTES:
            chosen = list(chosen)
        room = max(CUT_BYTES, self.room(weights)) // len(self.chosen)
        names = tuple(value.name for value in self.model.proto.graph.output)
        return Reader(self.model, chosen, self.shapes, room, self.seed, names)

    def rows(
        self, reader: Reader, sources: Sequence[RowSource], afterwards: Collection[str]
    ) -> dict[RowSource, Rows]:
        """Rows of those sources that ONNX Runtime can compute.

        Args:
            afterwards: Tensors that later reads need.

        Raises:
            ArithmeticRunError: a sample does not run; the message names the node.
        """
        proto = self.model.proto.graph
        known = {v.name for v in proto.input} | {name for node in proto.node for name in node.output}
        wanted = [source for source in sources if source.tensor in known]
        while wanted:
            try:
                limits = {source: self.per_sample(source) for source in wanted}
                return reader.read(limits, [t for t in afterwards if t in known])
            except NoKernelError as error:
                computable = [source for source in wanted if not self._depends(source, error)]
                if len(computable) == len(wanted):
                    raise
                wanted = computable
        return {}

    def _depends(self, source: RowSource, error: NoKernelError) -> bool:
        op = error.op.rpartition(".")[2]
        return any(node.op_type == op for node in leading_to(self.model.proto.graph, [source.tensor]))


def compensate(
    weights: Weights,
    found: Sequence[Layer],
    data: FittingData,
    reader: Reader,
    kept: MutableMapping[Hashable, Any],
) -> Iterator[Rounded | Skipped]:
    """Round every weight that is not on the grid of its type, or report why it is skipped.

    Args:
        weights: Values of the layers' weights and biases, float32.
        reader: Of `data`, for these weights.
        kept: Results for layers with common rows, by what they depend on: of this model and its samples.

    Raises:
        ArithmeticRunError: a sample does not run; the message names the node.
    """
    wanted: list[Layer] = []
    for layer in found:
        value, grid = weights[layer.weight], Grid(layer.dtype)
        refusal = grid.refusal(value)
        if refusal is not None:
            yield Skipped(layer.node, refusal)
        elif not grid.holds(value):
            lost = layer.bias and grid.refusal(weights[layer.bias]) is not None
            wanted.append(replace(layer, bias="") if lost else layer)
    if wanted and data.model.opset < OPSET:
        reason = f"rows are read from operator set {OPSET} on (the pass `upgrade-opset` raises it)"
        yield Skipped(wanted[0].node, reason)
        return
    together = by_sources(_by_depth(wanted, data.model))
    keys = {s: (data.limit, data.chosen, data.seed, *layers) for s, layers in together.items()}
    for key in keys.values():
        yield from kept.get(key, ())
    unknown = {sources: layers for sources, layers in together.items() if keys[sources] not in kept}
    keeps = sum(value.nbytes for value in weights.values()) <= KEPT_BYTES
    for sources, done in _read_and_rounded(unknown, weights, data, reader):
        if keeps:
            kept[keys[sources]] = done
        yield from done


def _read_and_rounded(
    together: Mapping[tuple[RowSource, ...], Sequence[Layer]],
    weights: Weights,
    data: FittingData,
    reader: Reader,
) -> Iterator[tuple[tuple[RowSource, ...], list[Rounded | Skipped]]]:
    """Yields the results for layers with common rows, which are held for as many of them as there is room."""
    groups = list(_groups(list(together), data, data.room(weights)))
    for index, group in enumerate(groups):
        afterwards = dict.fromkeys(s.tensor for later in groups[index + 1 :] for key in later for s in key)
        rows = data.rows(reader, list(dict.fromkeys(s for sources in group for s in sources)), [*afterwards])
        last = {source: sources for sources in group for source in sources}
        for sources in group:
            with one_thread():
                done = list(_by_type([rows.get(s) for s in sources], together[sources], weights))
            yield sources, done
            for source in sources:
                if last[source] == sources:  # rows are freed while the new weights need memory
                    rows.pop(source, None)


def _by_depth(found: Iterable[Layer], model: Model) -> list[Layer]:
    """Sorts layers by the node that completes their rows.

    A weight that several nodes share has rows as deep as the last of them. Read with the rows of the first,
    it would have the graph run that far, and hold every tensor on the way that a later read needs.
    """
    place = {name: i for i, node in enumerate(model.proto.graph.node) for name in node.output}
    return sorted(found, key=lambda layer: max(place.get(s.tensor, -1) for s in layer.sources))


def _by_type(
    rows: Sequence[Rows | None], found: Sequence[Layer], weights: Weights
) -> Iterator[Rounded | Skipped]:
    """Round the layers of one type at a time: they share a grid and a bias channel."""
    for dtype in sorted({layer.dtype for layer in found}):
        yield from fitted(rows, [layer for layer in found if layer.dtype == dtype], weights, Grid(dtype))


def _groups(
    keys: Sequence[tuple[RowSource, ...]], data: FittingData, room: int
) -> Iterator[list[tuple[RowSource, ...]]]:
    """Splits keys, in order, into groups whose rows fit `room` bytes."""
    group: list[tuple[RowSource, ...]] = []
    held = 0
    for key in keys:
        rows = sum(min(data.per_sample(source), data.available(source)) * source.width for source in key)
        size = rows * 4 * len(data.chosen)
        if group and held + size > room:
            yield group
            group, held = [], 0
        group.append(key)
        held += size
    if group:
        yield group
