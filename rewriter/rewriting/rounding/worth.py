"""Estimates what rounding a weight together with others can gain, next to the error of FP16 sums.

Each product errs by the rounding of its weights, of its result, and of its sum. Rounded weights are the same
in every row: averaging rows downstream does not reduce their error. It reduces the others, which are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from onnx import TensorProto

from rewriter.emulation.accumulate import ONE_ROUNDING, sum_error
from rewriter.model import Model
from rewriter.rewriting.rounding.layers import Layer
from rewriter.rewriting.rounding.segments import Shapes


@dataclass(frozen=True)
class Worth:
    """Splits layers into those whose weights are worth the time, and the others.

    Attributes:
        least: Least share of a squared error that is worth removing, 0.0 to 1.0.
        shapes: Shapes of the main graph's tensors and weights, where known.
        results: Elements of all outputs of the network.
        fp16_sums: True if the target sums Convs of FP16 in FP16.
    """

    least: float
    shapes: Shapes = field(repr=False)
    results: int
    fp16_sums: bool

    @classmethod
    def of(cls, model: Model, shapes: Shapes, least: float, *, fp16_sums: bool) -> Worth:
        """Reads the size of the results; an output of unknown shape counts as one element."""
        sizes = [prod(shapes.get(port.name, ())) for port in model.signature.outputs]
        return cls(least, shapes, sum(sizes), fp16_sums)

    def share(self, found: Sequence[Layer], given_up: Sequence[Layer] = ()) -> float:
        """Share of the squared error of all these layers that the weights of `found` cause."""
        gained = ONE_ROUNDING**2 * len(found)
        noise = sum(self._noise(layer) for layer in (*found, *given_up))
        whole = gained + ONE_ROUNDING**2 * len(given_up) + noise
        return gained / whole if whole else 0.0

    def _noise(self, layer: Layer) -> float:
        """The squared error of a rounded result and of its FP16 sum, as far as averaging leaves it.

        The network's results can average a layer's elements by no more than the ratio of their numbers.
        """
        weight, source = self.shapes.get(layer.weight, ()), layer.sources[0]
        shape = self.shapes.get(source.tensor)
        if shape is None or not weight:
            return 0.0
        depth = source.width // max(1, layer.groups)
        channels = prod(weight) // max(1, depth)
        taps = prod(source.window.kernel) if source.window else 1
        elements = max(1, prod(shape) * taps // source.width * channels)
        squared = ONE_ROUNDING**2
        dense = source.window is not None and depth > taps
        if self.fp16_sums and dense and layer.dtype == TensorProto.FLOAT16:
            squared += sum_error(depth) ** 2
        return squared * min(1.0, self.results / elements)
