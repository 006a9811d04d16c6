"""Finds what an optimisation profile needs: inputs that are shapes, and a model's smallest shapes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
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


def least_shapes(model: Model, feeds: Mapping[str, Array]) -> dict[str, Shape]:
    """The smallest shapes that a model runs with, of inputs with dynamic axes; {} if they are the sample's.

    One size is tried for all dynamic axes, 1 and then powers of two; first with a batch of 1. The data is
    cut from a sample, so that ids and masks stay valid.

    Args:
        model: In FP32.
        feeds: A sample that it runs with.
    """
    free = {
        port.name: [
            axis
            for axis, size in enumerate(feeds[port.name].shape)
            if size > 1 and (port.shape is None or not isinstance(port.shape[axis], int))
        ]
        for port in model.signature.inputs
    }
    sizes = [feeds[name].shape[axis] for name, axes in free.items() for axis in axes]
    if not sizes:
        return {}
    tried = [2**power for power in range(max(sizes).bit_length()) if 2**power < max(sizes)]
    with suppress(ArithmeticRunError), Session(model) as session:
        for one_batch, size in product((True, False), (*tried, max(sizes))):
            cut = {name: _cut(array, free[name], size, one_batch) for name, array in feeds.items()}
            with suppress(ArithmeticRunError):
                if all(output.size for output in session.run(cut).values()):
                    return {name: cut[name].shape for name, axes in free.items() if axes}
    return {}


def _cut(array: Array, axes: list[int], size: int, one_batch: bool) -> Array:
    """The beginning of an array along its dynamic axes; the first of several is the batch."""
    batch = {0} if one_batch and array.ndim > 1 else set[int]()
    ends = [(1 if axis in batch else size) if axis in axes else None for axis in range(array.ndim)]
    return np.ascontiguousarray(array[tuple(map(slice, ends))])
