"""Finds what an optimisation profile needs: inputs that are shapes, and a model's smallest shapes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from rewriter.base.errors import ArithmeticRunError
from rewriter.ir.graph import open_graphs, reachable
from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.tensor_files import Shape
from rewriter.runtime.inputs.samples import SHAPE_TYPES

SHAPE_OPERANDS: Mapping[str, range] = {
    **dict.fromkeys("Reshape Expand Tile TopK OneHot CenterCropPad AffineGrid".split(), range(1, 2)),
    **dict.fromkeys("ConstantOfShape Loop".split(), range(1)),
    **dict.fromkeys("Resize Upsample".split(), range(1, 4)),
    **dict.fromkeys("Slice Pad Split Squeeze Unsqueeze".split(), range(1, 5)),
    "Range": range(3),
}
"""Operands by which TensorRT computes shapes or counts steps: their values must be known on the host."""


def shape_inputs(model: Model) -> list[str]:
    """The integer inputs of one axis at most whose values decide shapes, or how often a loop runs."""
    ports = [p for p in model.signature.inputs if p.dtype in SHAPE_TYPES and len(p.shape or ()) <= 1]
    if not ports:
        return []
    graph = open_graphs(model)[0]

    def onward(tensor: str) -> list[str]:
        results = [name for node in graph.consumers(tensor) for name in node.output]
        return [name for name in results if (shape := graph.shape(name)) is not None and len(shape) <= 1]

    def decides(tensor: str) -> bool:
        return any(
            name == tensor and index in SHAPE_OPERANDS.get(node.op_type, ())
            for node in graph.consumers(tensor)
            for index, name in enumerate(node.input)
        )

    return [p.name for p in ports if any(map(decides, reachable([p.name], onward)))]


@dataclass(frozen=True)
class Room:
    """The sizes that a model takes along its dynamic axes.

    Attributes:
        least: The smallest shapes that it runs with, by input; {} if they are not known.
        rigid: Axes that cannot be longer than in the sample, as pairs of input and axis.
    """

    least: Mapping[str, Shape] = field(default_factory=dict)
    rigid: frozenset[tuple[str, int]] = frozenset()


def room(model: Model, feeds: Mapping[str, Array]) -> Room:
    """Tries which sizes a model takes along its dynamic axes, with data cut from a sample, or repeated.

    For the smallest shapes, one size is tried for all axes: 1 and then powers of two, first with a batch of
    1. From these shapes, each dynamic dimension by itself is made twice as long as in the sample.

    Args:
        model: In FP32.
        feeds: A sample that it runs with.
    """
    axes: dict[str, list[tuple[str, int]]] = {}
    for port in model.signature.inputs:
        for axis, size in enumerate(feeds[port.name].shape):
            named = port.shape[axis] if port.shape is not None else None
            if size > 1 and not isinstance(named, int):
                axes.setdefault(named or f"{port.name}:{axis}", []).append((port.name, axis))
    free = [axis for several in axes.values() for axis in several]
    longest = max((feeds[name].shape[axis] for name, axis in free), default=0)
    tried = [2**power for power in range(longest.bit_length()) if 2**power < longest]
    with suppress(ArithmeticRunError), Session(model) as session:
        for one_batch, size in product((True, False), (*tried, longest) if free else ()):
            batch = {axis for axis in free if one_batch and axis[1] == 0 and feeds[axis[0]].ndim > 1}
            sizes = {axis: 1 if axis in batch else min(size, feeds[axis[0]].shape[axis[1]]) for axis in free}
            if not _runs(session, feeds, sizes):
                continue
            longer = {
                name: {(n, axis): 2 * feeds[n].shape[axis] for n, axis in several}
                for name, several in axes.items()
            }
            rigid = [axes[name] for name, more in longer.items() if not _runs(session, feeds, sizes | more)]
            least = {name: _sized(feeds[name], name, sizes).shape for name, _ in free}
            return Room(least, frozenset(axis for several in rigid for axis in several))
    return Room()


def _runs(session: Session, feeds: Mapping[str, Array], sizes: Mapping[tuple[str, int], int]) -> bool:
    """True if the model gives outputs that are not empty."""
    with suppress(ArithmeticRunError):
        outputs = session.run({name: _sized(array, name, sizes) for name, array in feeds.items()})
        return all(output.size for output in outputs.values())
    return False


def _sized(array: Array, name: str, sizes: Mapping[tuple[str, int], int]) -> Array:
    """The array with other sizes of some axes: its beginning, or it and again its beginning."""
    for axis in range(array.ndim):
        if (name, axis) in sizes:
            array = np.take(array, np.arange(sizes[name, axis]) % array.shape[axis], axis)
    return np.ascontiguousarray(array)
