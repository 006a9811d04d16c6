"""Rows that weights are multiplied by, chosen inside the graph: what leaves ONNX Runtime is bounded.

The rows of a tensor are its vectors along the channels; those of a Conv are what its window holds at one
output position. Of both, a seeded choice that is spread evenly is gathered where the tensor is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.engines.onnxruntime import Session
from rewriter.model import Array, Model
from rewriter.ranges.binades import leading_to
from rewriter.ranges.instrument import unused_prefix
from rewriter.ranges.statistics import Emitter, Names
from rewriter.rounding.layers import Source, Window

OPSET = 12
"""Min of integers came with it. Of older models no rows are read."""

FRACTIONS = 2**20
"""Steps of the random offsets between evenly spaced rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of one source.

    Attributes:
        samples: Float32 [groups, rows, K], one array for each sample that was run.
    """

    samples: tuple[Array, ...]

    def split(self) -> tuple[Array, Array]:
        """Rows to fit to, and rows to judge by: the last sample, or of one sample every fourth row."""
        *fitted, last = self.samples
        if fitted:
            return np.concatenate(fitted, axis=1), last
        judged = np.arange(last.shape[1]) % 4 == 3
        return last[:, ~judged], last[:, judged]


def read_rows(
    model: Model, samples: Iterable[Mapping[str, Array]], limits: Mapping[Source, int], seed: int
) -> dict[Source, Rows]:
    """The rows of sources in the main graph.

    Args:
        model: Computes in FP32; see `emulation.reference`.
        samples: Feeds; only one is held at a time.
        limits: The sources, and how many rows of each one sample gives at most.
        seed: Of the choice of rows.

    Raises:
        NoKernelError, ArithmeticRunError: a sample does not run; the message names the node.
    """
    probe, names = _instrumented(model, limits, seed)
    found: dict[Source, list[Array]] = {source: [] for source in limits}
    with Session(probe) as session:
        for feeds in samples:
            outputs = session.run(feeds)
            for source, name in names.items():
                found[source].append(_grouped(outputs[name], source))
    return {source: Rows(tuple(arrays)) for source, arrays in found.items()}


def _grouped(array: Array, source: Source) -> Array:
    """What was gathered, as [groups, rows, K]; of a Conv it is [batch, channels, positions, taps]."""
    if source.window is None:
        return array[np.newaxis]
    batch, channels, positions, taps = array.shape
    groups = source.window.groups
    split = array.reshape(batch, groups, channels // groups, positions, taps)
    return split.transpose(1, 0, 3, 2, 4).reshape(groups, batch * positions, -1)


def _instrumented(model: Model, limits: Mapping[Source, int], seed: int) -> tuple[Model, dict[Source, str]]:
    """A copy of the model that gathers rows, and nothing else, with the output of each source."""
    result = model.copy()
    graph = result.proto.graph
    nodes: list[NodeProto] = []
    emit = Emitter(Names(unused_prefix(result.proto, "rows:"), model.opset), nodes)
    offsets = np.random.default_rng(seed).integers(FRACTIONS, size=max(limits.values()))
    gather = _Gather(emit, limits, offsets)
    wanted: dict[str, list[Source]] = {}
    for source in limits:
        wanted.setdefault(source.tensor, []).append(source)
    names: dict[Source, str] = {}

    def choose(tensors: Iterable[str]) -> None:
        for tensor in tensors:
            names.update((source, gather.rows(source)) for source in wanted.get(tensor, ()))

    choose(value.name for value in graph.input)
    for node in leading_to(graph, wanted):
        nodes.append(NodeProto.FromString(node.SerializeToString()))
        choose(node.output)
    del graph.node[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    for name in names.values():
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return result, names


@dataclass(frozen=True)
class _Gather:
    """Appends the nodes that choose rows."""

    emit: Emitter
    limits: Mapping[Source, int]
    offsets: Array

    def rows(self, source: Source) -> str:
        return self._vectors(source) if source.window is None else self._windows(source, source.window)

    def _vectors(self, source: Source) -> str:
        tensor = source.tensor
        if source.swapped:
            *first, last = range(source.swapped)
            tensor = self.emit.add("Transpose", [tensor], perm=[*first[:-1], last, first[-1]])
        flat = self.emit.add("Reshape", [tensor, self._ints([-1, source.width])])
        total = self._size(flat, 0)
        return self.emit.add("Gather", [flat, self._spread(total, self._int(self.limits[source]))], axis=0)

    def _windows(self, source: Source, window: Window) -> str:
        tensor = source.tensor
        if any(window.pads):
            axes = len(window.kernel)
            pads = [0, 0, *window.pads[:axes], 0, 0, *window.pads[axes:]]
            tensor = self.emit.add("Pad", [tensor, self._ints(pads)])
        share = self._op("Div", self._int(self.limits[source]), self._size(tensor, 0))
        limit = self._op("Max", share, self._int(1))
        flat = self.emit.add("Reshape", [tensor, self._ints([0, 0, -1])])
        return self.emit.add("Gather", [flat, self._indices(tensor, window, limit)], axis=2)

    def _indices(self, tensor: str, window: Window, limit: str) -> str:
        """Where the taps of the chosen windows are in the flat tensor: [positions, taps]."""
        sizes = [self._size(tensor, 2 + axis) for axis in range(len(window.kernel))]
        counts = [self._positions(window, axis, size) for axis, size in enumerate(sizes)]
        total = counts[0]
        for count in counts[1:]:
            total = self._op("Mul", total, count)
        rest = self._spread(total, limit)
        taps = np.indices(window.kernel).reshape(len(window.kernel), 1, -1)
        corner, offset, pitch = self._ints([0]), self._ints([[0]]), self._int(1)
        for axis in reversed(range(len(sizes))):
            place = self._op("Mod", rest, counts[axis])
            rest = self._op("Div", rest, counts[axis])
            step = self._op("Mul", pitch, self._int(window.strides[axis]))
            corner = self._op("Add", corner, self._op("Mul", place, step))
            spread = self._op("Mul", self._ints(taps[axis] * window.dilations[axis]), pitch)
            offset = self._op("Add", offset, spread)
            pitch = self._op("Mul", pitch, sizes[axis])
        column = self.emit.add("Reshape", [corner, self._ints([-1, 1])])
        return self._op("Add", column, offset)

    def _positions(self, window: Window, axis: int, size: str) -> str:
        """Output positions along an axis."""
        span = (window.kernel[axis] - 1) * window.dilations[axis] + 1
        room = self._op("Sub", size, self._int(span))
        return self._op("Add", self._op("Div", room, self._int(window.strides[axis])), self._int(1))

    def _spread(self, total: str, limit: str) -> str:
        """That many of `total` indices at most, one at random in each of as many equal parts."""
        count = self._op("Min", total, limit)
        ranks = self.emit.add("Range", [self._int(0), count, self._int(1)])
        starts = self._op("Mul", ranks, total)
        ends = self.emit.add("Reshape", [count, self._ints([1])])
        offsets = self.emit.add("Slice", [self._ints(self.offsets), self._ints([0]), ends])
        inside = self._op("Div", self._op("Mul", offsets, total), self._int(FRACTIONS))
        return self._op("Div", self._op("Add", starts, inside), count)

    def _size(self, tensor: str, axis: int) -> str:
        return self.emit.add("Gather", [self.emit.add("Shape", [tensor]), self._int(axis)])

    def _op(self, op: str, a: str, b: str) -> str:
        return self.emit.add(op, [a, b])

    def _int(self, value: int) -> str:
        return self.emit.constant(value, np.int64)

    def _ints(self, values: object) -> str:
        return self.emit.constant(values, np.int64)
