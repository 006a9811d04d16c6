"""fold-strides: turns a strided Conv of an image into a Conv of stride 1 over blocks of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.weights import NewWeights, Replacement
from rewriter.ir.model import Array
from rewriter.passes.algorithms.windows import IMAGE_CHANNELS, Windows, pads_of, reason_against, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

STRIDES = frozenset({2, 4})
"""The measured strides (docs/accuracy.md#stems-with-a-stride). Blocks of larger strides would have more
channels than any known stem."""

LEAST_WINDOW = 7
"""Smallest window that is folded: 7x7 gains and 3x3 does not (docs/accuracy.md#stems-with-a-stride)."""


@dataclass(frozen=True)
class FoldStrides(WeightPass):
    """The space-to-depth stem: TensorRT-RTX has no good kernel for a strided Conv of 3 or 4 channels.

    The pixels of each block of s x s become channels (Reshape, Transpose, Reshape). Over blocks it is a Conv
    of stride 1, its weight padded with zeros to whole blocks. ResNet's and SegFormer's stems need about half
    the time and are more accurate (docs/accuracy.md#stems-with-a-stride).

    With first padding p and window k: y(i) = sum over u of w[u] x[s i + u - p]. Put f = (-p) mod s zeros
    before w and write u + f = s q + r: y(i) = sum over q and r of w[s q + r - f] x[s j + r], where
    j = i + q - (p + f) / s. That is a Conv of ceil((k + f) / s) blocks with padding (p + f) / s.

    Skipped without a report: Convs of more than 4 channels, smaller windows, windows that do not overlap (see
    `unfold-patches`), strides other than 2 and 4, Convs of one or three axes, computed weights.

    Declines:
        - a height or width that is unknown, or that the stride does not divide
        - dilation, groups, negative padding
    """

    requires = Requires(opset=7)  # from there on Add broadcasts a row
    exactness = Exactness(1e-5, "ONNX Runtime orders the sums differently: 7.4e-7 measured on a SegFormer")
    example = """
         g (float[N,1,8,8] x) => (float[N,1,4,4] y)
        -<float[1,1,7,7] w> {
        -    y = Conv<kernel_shape = [7, 7], strides = [2, 2], pads = [3, 3, 3, 3]>(x, w)
        +<float[1,4,4,4] weight, int64[6] split = {0, 1, 4, 2, 4, 2}, int64[4] joined = {0, 4, 4, 4}> {
        +    blocks = Reshape(x, split)
        +    moved = Transpose<perm = [0, 1, 3, 5, 2, 4]>(blocks)
        +    folded = Reshape(moved, joined)
        +    y = Conv<kernel_shape = [4, 4], pads = [2, 2, 1, 1]>(folded, weight)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = NewWeights(graph)
        for node in graph.nodes:
            windows = windows_of(graph, node)
            if windows is None or not self._accepts(windows):
                continue
            negative = "its padding is negative" if min(attribute(node, "pads", [0])) < 0 else None
            reason = negative or reason_against(graph, node, windows, context.kept)
            folding = _Folding(graph, node, "folded", windows=windows, weights=weights)
            yield refused(node, "it keeps its stride", reason) or folding.write()

    def _accepts(self, windows: Windows) -> bool:
        image = len(windows.kernel) == 2 and windows.channels <= IMAGE_CHANNELS
        return image and min(windows.kernel) >= LEAST_WINDOW and STRIDES.issuperset(windows.strides)


@dataclass(frozen=True)
class _Axis:
    """One spatial axis, counted in blocks."""

    step: int  # elements of a block
    count: int  # blocks of the input
    window: int  # blocks that a window reads
    lead: int  # zeros before the weight, in elements
    tail: int  # zeros after it
    begin: int  # padding in blocks
    end: int  # padding in blocks

    @classmethod
    def of(cls, size: int, kernel: int, step: int, begin: int, end: int) -> _Axis:
        """Returns the axis of `size` elements, padded by `begin` and `end`.

        The padding in blocks is never negative: the windows leave less than `step` elements unread.
        """
        lead = -begin % step
        window = -(-(kernel + lead) // step)
        tail = window * step - kernel - lead
        results = (size + begin + end - kernel) // step + 1
        before, count = (begin + lead) // step, size // step
        return cls(step, count, window, lead, tail, before, results + window - 1 - before - count)


@dataclass(frozen=True, kw_only=True)
class _Folding(Replacement):
    windows: Windows
    weights: NewWeights

    @cached_property
    def axes(self) -> list[_Axis]:
        pads = pads_of(self.node, self.windows)
        assert pads is not None  # the sizes are known
        sizes, kernel, strides = self.windows.known, self.windows.kernel, self.windows.strides
        return [_Axis.of(*axis) for axis in zip(sizes, kernel, strides, pads[:2], pads[2:], strict=True)]

    def write(self) -> Change:
        conv, channels, (high, wide) = self.node, self.windows.channels, self.axes
        sizes = (channels, high.count, high.step, wide.count, wide.step)
        split = self.reshape(conv.input[0], sizes, self.tensor("blocks"))
        moved = self.add("Transpose", [split], self.tensor("moved"), perm=[0, 1, 3, 5, 2, 4])
        depth = channels * high.step * wide.step
        folded = self.reshape(moved, (depth, high.count, wide.count), self.tensor("folded"))
        window, pads = [high.window, wide.window], [high.begin, wide.begin, high.end, wide.end]
        inputs = [folded, self._weight(), *conv.input[2:]]
        self.finish("Conv", inputs, self.name, kernel_shape=window, pads=pads)
        what = f"stride 1 and a window of {high.window}x{wide.window} in {depth} channels"
        return Change(display_name(conv), what)

    def _weight(self) -> str:
        """Returns the name of the constant [O, C * s * s, window of blocks]."""
        name, high, wide = self.node.input[1], *self.axes

        def folded() -> Array:
            value = self.graph.value(name)
            padded = np.pad(value, ((0, 0), (0, 0), (high.lead, high.tail), (wide.lead, wide.tail)))
            split = padded.reshape(*value.shape[:2], high.window, high.step, wide.window, wide.step)
            return split.transpose(0, 1, 3, 5, 2, 4).reshape(len(value), -1, high.window, wide.window)

        key = (name, *((axis.step, axis.lead, axis.tail) for axis in self.axes))
        return self.weights.made(key, f"{name}/folded", folded)
