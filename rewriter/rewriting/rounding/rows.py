"""Rows that weights are multiplied by, chosen inside the graph: what leaves ONNX Runtime is bounded.

The rows of a tensor are its vectors along the channels; those of a Conv are what its window holds at one
output position. Which ones is worked out here for the shapes of a sample and stands in the graph as
constants: with nodes that compute it from shapes a NAFNet took 3 s to load, without them 0.2 s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from onnx import helper

from rewriter.data.ranges.reductions import Emitter
from rewriter.engines.onnxruntime import Session
from rewriter.model import Array, Model
from rewriter.rewriting.rounding import positions
from rewriter.rewriting.rounding.layers import Source, Window
from rewriter.rewriting.rounding.positions import Taps
from rewriter.rewriting.rounding.segments import Segment, segment
from rewriter.rewriting.rounding.shapes import Shapes, emitter, keep_only, shapes

OPSET = 5
"""Reshape to a shape that is an input came with it. Of older models no rows are read."""


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


@dataclass(frozen=True)
class Chosen:
    """Some of the samples, to be gone through as often as wanted."""

    samples: Iterable[Mapping[str, Array]]
    indices: frozenset[int]

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        return (feeds for i, feeds in enumerate(self.samples) if i in self.indices)


@dataclass
class Reader:
    """Reads rows of the main graph, those of some sources at a time.

    What is computed for some and needed for others later is held between, if it has room: then all together
    run the graph once for each sample.

    Attributes:
        model: Computes in FP32; see `emulation.reference`.
        samples: Feeds, gone through at each `read`; those of one are held at a time. For one of other shapes
            the model is loaded anew.
        shapes: Of the tensors for the first sample, as far as they are known.
        room: For what is held of a sample, in bytes.
        seed: Of the choice of rows.
        held: Of each sample, by name.
    """

    model: Model
    samples: Iterable[Mapping[str, Array]]
    shapes: Shapes
    room: int
    seed: int = 0
    held: list[dict[str, Array]] = field(default_factory=list)

    def read(self, limits: Mapping[Source, int], afterwards: Collection[str] = ()) -> dict[Source, Rows]:
        """The rows of some sources.

        Args:
            limits: The sources, and how many rows of each one sample gives at most.
            afterwards: The tensors that will be asked for later.

        Raises:
            NoKernelError, ArithmeticRunError: a sample does not run; the message names the node.
        """
        found: dict[Source, list[Array]] = {source: [] for source in limits}
        part = self._segment({source.tensor for source in limits}, afterwards)
        computed = {name for node in part.nodes for name in node.output}
        handed = [name for name in part.later if name in computed]
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
                    probe, gathered = _instrumented(self.model, part, types, handed, limits, sizes, self.seed)
                    session, loaded = stack.enter_context(Session(probe)), given
                outputs = session.run({**feeds, **{name: held[name] for name in part.given}})
                self.held[index] = {name: held[name] for name in part.later if name not in computed}
                self.held[index].update((name, outputs.pop(name).copy()) for name in handed)
                for source, (name, taps) in gathered.items():
                    found[source].append(_grouped(outputs.pop(name), source, taps))
        return {source: Rows(tuple(arrays)) for source, arrays in found.items()}

    def _segment(self, wanted: Collection[str], afterwards: Collection[str]) -> Segment:
        """What is to be run; nothing is handed on that has no room: then it is computed again."""
        held = self.held[0].keys() if self.held else frozenset()
        part = segment(self.model.proto.graph, wanted, afterwards, held)
        size = part.size(self.shapes)
        return part if size is not None and size <= self.room else replace(part, later=())


def _grouped(array: Array, source: Source, taps: Taps | None) -> Array:
    """What was gathered, as [groups, rows, K]; of a Conv it is [batch, channels, positions, taps]."""
    if source.window is None or taps is None:
        return array[np.newaxis].copy()  # or ONNX Runtime's memory stays taken
    batch, channels, places, _ = array.shape
    groups = source.window.groups
    split = array.reshape(batch, groups, channels // groups, places, -1).transpose(1, 0, 3, 2, 4)
    rows = np.ascontiguousarray(split)
    if taps.outside.any():
        np.copyto(rows, 0, where=taps.outside[:, np.newaxis])
    return rows.reshape(groups, batch * places, -1)


Gathered = dict[Source, tuple[str, Taps | None]]
"""The output of each source, and of a Conv what its windows read."""


def _instrumented(
    model: Model,
    part: Segment,
    given: Mapping[str, np.dtype[np.generic]],
    handed: Collection[str],
    limits: Mapping[Source, int],
    shapes: Shapes,
    seed: int,
) -> tuple[Model, Gathered]:
    """A copy of a part of the model that gathers rows and hands tensors on.

    Each Gather stands behind what it reads, so that no tensor lives longer for it.

    Args:
        given: The types of what the part is given.
    """
    result = model.copy()
    graph = result.proto.graph
    emit = emitter(result)
    gather = _Gather(emit, limits, shapes, positions.offsets(seed, max(limits.values())))
    wanted: dict[str, list[Source]] = {}
    for source in limits:
        wanted.setdefault(source.tensor, []).append(source)
    gathered: Gathered = {}

    def choose(tensors: Iterable[str]) -> None:
        for tensor in tensors:
            gathered.update((source, gather.rows(source)) for source in wanted.get(tensor, ()))

    graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), None)
        for name, dtype in given.items()
    )
    choose(value.name for value in graph.input)
    for node in part.nodes:
        emit.nodes.append(node)
        choose(node.output)
    outputs = [name for name, _ in gathered.values()]
    keep_only(result, emit.nodes, [*outputs, *handed])
    return result, gathered


@dataclass(frozen=True)
class _Gather:
    """Appends the nodes that choose rows.

    Attributes:
        constants: Names of index tensors, which sources of equal shapes share, and of shapes.
    """

    emit: Emitter
    limits: Mapping[Source, int]
    shapes: Shapes
    offsets: Array
    constants: dict[tuple[object, ...], tuple[str, Taps | None]] = field(default_factory=dict)

    def rows(self, source: Source) -> tuple[str, Taps | None]:
        if source.window is None:
            return self._vectors(source), None
        return self._windows(source, source.window)

    def _vectors(self, source: Source) -> str:
        tensor = source.tensor
        if source.swapped:
            *first, last = range(source.swapped)
            tensor = self.emit.add("Transpose", [tensor], perm=[*first[:-1], last, first[-1]])
        flat = tensor
        if source.swapped or len(self.shapes[source.tensor]) != 2:
            flat = self.emit.add("Reshape", [tensor, self._shape(-1, source.width)])
        key = (prod(self.shapes[source.tensor]) // source.width, self.limits[source])
        if key not in self.constants:
            self.constants[key] = self._ints(positions.spread(*key, self.offsets)), None
        return self.emit.add("Gather", [flat, self.constants[key][0]], axis=0)

    def _windows(self, source: Source, window: Window) -> tuple[str, Taps]:
        batch, _, *sizes = self.shapes[source.tensor]
        flat = self.emit.add("Reshape", [source.tensor, self._shape(0, 0, -1)])
        limit = max(1, self.limits[source] // max(1, batch))
        key = (window, *sizes, limit)
        if key not in self.constants:
            taps = positions.windows(window, tuple(sizes), limit, self.offsets)
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
