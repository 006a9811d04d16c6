"""Reads the rows that weights are multiplied by: a sample of them is chosen inside the graph.

So the size of what leaves ONNX Runtime is bounded. The rows of a tensor are its vectors along the channels;
those of a Conv are the contents of its window, one per output position. The indices are computed for the
shapes of a sample and stand in the graph as constants, which load faster than nodes that compute them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from onnx import ValueInfoProto, helper

from rewriter.data.ranges.binades import keep_only
from rewriter.data.ranges.reductions import Emitter
from rewriter.engines.onnxruntime import Session
from rewriter.model import Array, Model
from rewriter.rewriting.rounding.layers import RowSource, Window
from rewriter.rewriting.rounding.segments import Segment, Shapes, emitter, segment, shapes

OPSET = 5
"""First operator set whose Reshape takes the shape as an input; rows of older models are not read."""

FRACTIONS = 2**20
"""Resolution of the random offsets of evenly spaced rows."""


@dataclass(frozen=True)
class Taps:
    """Inputs that a Conv's windows read at the chosen output positions.

    Attributes:
        indices: Into the flattened spatial axes, int64 [positions, taps]; in the padding, the nearest input.
        outside: True where a tap reads padding, bool [positions, taps].
    """

    indices: Array
    outside: Array


@dataclass(frozen=True)
class Rows:
    """Rows of one source.

    Attributes:
        samples: Float32 [groups, rows, K], one array per sample.
    """

    samples: tuple[Array, ...]

    def split(self) -> tuple[Array, Array]:
        """Rows to fit, and rows held out: the last sample, or every fourth row of a single sample."""
        *fitted, last = self.samples
        if fitted:
            return np.concatenate(fitted, axis=1), last
        judged = np.arange(last.shape[1]) % 4 == 3
        return last[:, ~judged], last[:, judged]


@dataclass(frozen=True)
class Chosen:
    """The samples with these indices, as an iterable."""

    samples: Iterable[Mapping[str, Array]]
    indices: frozenset[int]

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        return (feeds for i, feeds in enumerate(self.samples) if i in self.indices)


@dataclass
class Reader:
    """Reads rows of the main graph, for some sources at a time.

    Tensors that later reads need are kept if they fit: then all reads together run the graph once per sample.

    Attributes:
        model: Computes in FP32; see `emulation.reference`.
        samples: Feeds, iterated at each `read`. The model is loaded again when their shapes change.
        shapes: Shapes for the first sample, where known.
        room: Bytes that may be kept per sample.
        seed: Seed of the choice of rows.
        outputs: Of the graph, for `results`: tensors that lead to them are kept where there is room for them.
        held: Kept tensors by name, one entry per sample.
    """

    model: Model
    samples: Iterable[Mapping[str, Array]]
    shapes: Shapes
    room: int
    seed: int = 0
    outputs: tuple[str, ...] = ()
    held: list[dict[str, Array]] = field(default_factory=list)

    def read(
        self, limits: Mapping[RowSource, int], afterwards: Collection[str] = ()
    ) -> dict[RowSource, Rows]:
        """Returns the rows of some sources.

        Args:
            limits: Most rows per sample, by source.
            afterwards: Tensors that later reads need.

        Raises:
            NoKernelError, ArithmeticRunError: a sample does not run; the message names the node.
        """
        found: dict[RowSource, list[Array]] = {source: [] for source in limits}
        part = self._segment({source.tensor for source in limits}, afterwards)
        computed = {name for node in part.nodes for name in node.output}
        kept = [name for name in part.later if name in computed]
        with ExitStack() as stack:
            loaded: dict[str, tuple[int, ...]] | None = None
            session: Session | None = None
            gathered: Gathered = {}
            for index, feeds in enumerate(self.samples):
                if index == len(self.held):
                    self.held.append({})
                held = self.held[index]
                given = {name: np.shape(array) for name, array in feeds.items()}
                if session is None or given != loaded:
                    stack.close()
                    sizes = shapes(self.model, {source.tensor for source in limits}, feeds)
                    types = {name: held[name].dtype for name in part.given}
                    probe, gathered = _instrumented(self.model, part, types, kept, limits, sizes, self.seed)
                    session, loaded = stack.enter_context(Session(probe)), given
                outputs = session.run({**feeds, **{name: held[name] for name in part.given}})
                self.held[index] = {name: held[name] for name in part.later if name not in computed}
                self.held[index].update((name, outputs.pop(name).copy()) for name in kept)
                for source, (name, taps) in gathered.items():
                    found[source].append(_grouped(outputs.pop(name), source, taps))
        return {source: Rows(tuple(arrays)) for source, arrays in found.items()}

    def results(self) -> dict[str, Array]:
        """Returns the outputs for the last sample, computed from the tensors held, which are released.

        Raises:
            NoKernelError, ArithmeticRunError: the sample does not run; the message names the node.
        """
        held = self.held[-1] if self.held else {}
        self.held = []
        (feeds,) = deque(self.samples, maxlen=1)
        part = segment(self.model.proto.graph, self.outputs, (), held.keys())
        rest = self.model.copy()
        rest.proto.graph.input.extend(_inputs({name: held[name].dtype for name in part.given}))
        keep_only(rest, part.nodes, self.outputs)
        with Session(rest) as session:
            return session.run({**feeds, **{name: held[name] for name in part.given}})

    def _segment(self, wanted: Collection[str], afterwards: Collection[str]) -> Segment:
        """The part to run; where its tensors do not fit, those of the last cut that did are kept."""
        held = self.held[0].keys() if self.held else frozenset()
        for later in (dict.fromkeys((*afterwards, *self.outputs)), afterwards):
            part = segment(self.model.proto.graph, wanted, later, held)
            size = part.size(self.shapes)
            if size is not None and size <= self.room:
                return part
        return replace(part, later=tuple(held))


def _inputs(types: Mapping[str, np.dtype[np.generic]]) -> Iterator[ValueInfoProto]:
    """Inputs of any shape for tensors of these types."""
    for name, dtype in types.items():
        yield helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)


def _grouped(array: Array, source: RowSource, taps: Taps | None) -> Array:
    """Gathered values as [groups, rows, K]; those of a Conv come as [batch, channels, positions, taps]."""
    if source.window is None or taps is None:
        return array[np.newaxis].copy()  # a view would keep ONNX Runtime's buffer alive
    batch, channels, places, _ = array.shape
    groups = source.window.groups
    split = array.reshape(batch, groups, channels // groups, places, -1).transpose(1, 0, 3, 2, 4)
    rows = np.ascontiguousarray(split)
    if taps.outside.any():
        np.copyto(rows, 0, where=taps.outside[:, np.newaxis])
    return rows.reshape(groups, batch * places, -1)


Gathered = dict[RowSource, tuple[str, Taps | None]]
"""Name of the output of each source, and the taps of a Conv."""


def _instrumented(
    model: Model,
    part: Segment,
    given: Mapping[str, np.dtype[np.generic]],
    kept: Collection[str],
    limits: Mapping[RowSource, int],
    shapes: Shapes,
    seed: int,
) -> tuple[Model, Gathered]:
    """Returns a copy of a part of the model that outputs the chosen rows and the tensors to keep.

    Each Gather comes right after the producer of its operand, so that no tensor lives longer for it.

    Args:
        given: Types of the part's additional inputs.
        kept: Tensors to keep.
    """
    result = model.copy()
    graph = result.proto.graph
    emit = emitter(result)
    offsets = np.random.default_rng(seed).integers(FRACTIONS, size=max(limits.values()))
    gather = _Gather(emit, limits, shapes, offsets)
    wanted: dict[str, list[RowSource]] = {}
    for source in limits:
        wanted.setdefault(source.tensor, []).append(source)
    gathered: Gathered = {}

    def choose(tensors: Iterable[str]) -> None:
        for tensor in tensors:
            gathered.update((source, gather.rows(source)) for source in wanted.get(tensor, ()))

    graph.input.extend(_inputs(given))
    choose(value.name for value in graph.input)
    for node in part.nodes:
        emit.nodes.append(node)
        choose(node.output)
    outputs = [name for name, _ in gathered.values()]
    keep_only(result, emit.nodes, [*outputs, *kept])
    return result, gathered


@dataclass(frozen=True)
class _Gather:
    """Appends nodes that choose rows.

    Attributes:
        offsets: Random offsets of rows within their strata, int64 below `FRACTIONS`.
        constants: Names of index tensors, shared by sources of equal shapes, and of shapes.
    """

    emit: Emitter
    limits: Mapping[RowSource, int]
    shapes: Shapes
    offsets: Array
    constants: dict[tuple[object, ...], tuple[str, Taps | None]] = field(default_factory=dict)

    def rows(self, source: RowSource) -> tuple[str, Taps | None]:
        if source.window is not None:
            return self._windows(source, source.window)
        tensor = source.tensor
        if source.swapped:
            *first, last = range(source.swapped)
            tensor = self.emit.add("Transpose", [tensor], perm=[*first[:-1], last, first[-1]])
        flat = tensor
        if source.swapped or len(self.shapes[source.tensor]) != 2:
            flat = self.emit.add("Reshape", [tensor, self._shape(-1, source.width)])
        key = (prod(self.shapes[source.tensor]) // source.width, self.limits[source])
        if key not in self.constants:
            self.constants[key] = self._ints(_spread(*key, self.offsets)), None
        return self.emit.add("Gather", [flat, self.constants[key][0]], axis=0), None

    def _windows(self, source: RowSource, window: Window) -> tuple[str, Taps]:
        batch, _, *sizes = self.shapes[source.tensor]
        flat = self.emit.add("Reshape", [source.tensor, self._shape(0, 0, -1)])
        limit = max(1, self.limits[source] // max(1, batch))
        key = (window, *sizes, limit)
        if key not in self.constants:
            taps = _window_taps(window, tuple(sizes), limit, self.offsets)
            self.constants[key] = self._ints(taps.indices), taps
        name, taps_ = self.constants[key]
        assert taps_ is not None
        return self.emit.add("Gather", [flat, name], axis=2), taps_

    def _shape(self, *sizes: int) -> str:
        if sizes not in self.constants:
            self.constants[sizes] = self._ints(sizes), None
        return self.constants[sizes][0]

    def _ints(self, values: object) -> str:
        return self.emit.constant(values, np.int64)


def _spread(total: int, limit: int, offsets: Array) -> Array:
    """A stratified sample of at most `limit` of `total` indices, one in each stratum; int64, ascending."""
    count = min(total, limit)
    inside = offsets[:count] * total // FRACTIONS
    found: Array = (np.arange(count) * total + inside) // max(count, 1)
    return found


def _window_taps(window: Window, sizes: tuple[int, ...], limit: int, offsets: Array) -> Taps:
    """Returns the taps of at most `limit` windows on an image of these sizes."""
    axes = len(sizes)
    counts = [_positions(window, axis, size) for axis, size in enumerate(sizes)]
    chosen = np.unravel_index(_spread(prod(counts), limit, offsets), [max(count, 1) for count in counts])
    steps = np.indices(window.kernel).reshape(axes, -1)
    places = [
        place[:, np.newaxis] * window.strides[axis] + steps[axis] * window.dilations[axis] - window.pads[axis]
        for axis, place in enumerate(chosen)
    ]
    indices, outside = np.zeros_like(places[0]), np.zeros(places[0].shape, bool)
    for place, size in zip(places, sizes, strict=True):
        outside |= (place < 0) | (place >= size)
        indices = indices * size + np.clip(place, 0, size - 1)
    return Taps(indices, outside)


def _positions(window: Window, axis: int, size: int) -> int:
    """Number of output positions along an axis."""
    padded = size + window.pads[axis] + window.pads[axis + len(window.kernel)]
    span = (window.kernel[axis] - 1) * window.dilations[axis] + 1
    return max(0, (padded - span) // window.strides[axis] + 1)
