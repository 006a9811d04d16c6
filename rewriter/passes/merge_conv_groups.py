"""merge-conv-groups: merges groups of a Conv into fewer, wider ones, with zeros between their weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto

from rewriter.base.text import count as counted
from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.weights import NewWeights, layout_obstacle
from rewriter.ir.model import Array
from rewriter.passes.algorithms.windows import Windows, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

WIDEST = 128  # channels of a joined group

MOST_WORK = 2**27
"""Most multiplications of a joined Conv: with more, arithmetic decides (docs/accuracy.md#grouped-convs)."""

NO_TENSOR_CORE = 8
"""Groups of up to so many channels were measured to gain at any size: their kernels use no Tensor Cores."""


@dataclass(frozen=True)
class MergeConvGroups(WeightPass):
    """TensorRT-RTX has no fast kernel for a grouped Conv with fewer than 48 channels in a group.

    ResNeXt, RegNet, DPN, ResNeSt and Next-ViT have such Convs, and need less time for wider groups, although
    these multiply more (docs/accuracy.md#grouped-convs). Sums only gain zeros. Groups of up to 8 channels sum
    in FP32, and wider ones in FP16.

    It was measured with TensorRT-RTX: Convs for a release of TensorRT itself stay.

    Skipped without a report: depthwise and pointwise Convs; Convs of one or three axes; results with another
    number of channels; groups that cannot be joined to `width` to 128 channels; more than 8 channels in a
    group where the Conv has a stride, sizes are unknown, or the work is above 2^27 multiplications.

    Options:
        width: Fewest channels of a group that has a fast kernel.
        step: What the channels of joined groups are a multiple of: 72 are slower than 24.
    """

    width: int = 48
    step: int = 16

    requires = Requires(precisions=frozenset({"fp16"}))  # in TF32 more than 8 channels lose by it
    exactness = Exactness(1e-6, "ONNX Runtime may order sums with more zeros differently")
    example_options: ClassVar[Mapping[str, Any]] = {"width": 4, "step": 4}
    example = """
         g (float[N,4,2,2] x) => (float[N,4,2,1] y)
        -<float[4,2,1,2] w = {1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1}> {
        -    y = Conv<group = 2>(x, w)
        +<float[4,4,1,2] w = {1, 2, 3, 4, 0, 0, 0, 0, 5, 6, 7, 8, 0, 0, 0, 0,
        +                     0, 0, 0, 0, 8, 7, 6, 5, 0, 0, 0, 0, 4, 3, 2, 1}> {
        +    y = Conv<group = 1>(x, w)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        target, weights = context.target, NewWeights(graph)
        for node in graph.nodes if target.library == "tensorrt-rtx" or not target.version else ():
            windows = windows_of(graph, node)
            if windows is not None and (groups := self._fewer_groups(graph, node, windows)):
                reason = context.kept.reason(node) or layout_obstacle(graph, node.input[1])
                yield refused(node, "it keeps its groups", reason) or _widen(graph, node, groups, weights)

    def _fewer_groups(self, graph: GraphEditor, node: NodeProto, windows: Windows) -> int:
        """The number of groups to write a Conv with; 0 to leave it."""
        channels, elements = windows.channels, math.prod(windows.kernel)
        width = channels // attribute(node, "group", 1)
        slow = width < self.width or (width < WIDEST and width % self.step)
        if len(windows.kernel) != 2 or elements == 1 or windows.out != channels or width < 2 or not slow:
            return 0
        wider = range(self.width, WIDEST + 1, self.step)
        joined = next((new for new in wider if new % width == 0 == channels % new and new > width), 0)
        sizes = graph.sizes(node.output[0])
        small = sizes is not None and math.prod(sizes) * joined * elements <= MOST_WORK
        gains = width <= NO_TENSOR_CORE or (small and set(windows.strides) == {1})
        return channels // joined if joined and gains else 0


def _widen(graph: GraphEditor, node: NodeProto, groups: int, weights: NewWeights) -> Change:
    narrow, old = node.input[1], attribute(node, "group", 1)
    weight = weights.changed(narrow, "wide", lambda w: _wide(w, old, old // groups))
    graph.set_input(node, 1, weight)
    next(item for item in node.attribute if item.name == "group").i = groups
    width = len(graph.value(weight)) // groups
    return Change(display_name(node), f"{counted(groups, 'group')} of {width} channels instead of {old}")


def _wide(weight: Array, groups: int, factor: int) -> Array:
    """Joins `factor` groups each: [O, width, ...] becomes [O, factor * width, ...], the rest zeros."""
    out, width, *window = weight.shape
    wide = np.zeros((groups // factor, factor, out // groups, factor, width, *window), weight.dtype)
    parts = weight.reshape(groups // factor, factor, out // groups, width, *window)
    for index in range(factor):
        wide[:, index, :, index] = parts[:, index]
    return wide.reshape(out, factor * width, *window)
