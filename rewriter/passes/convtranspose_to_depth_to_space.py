"""convtranspose-to-depth-to-space: replaces ConvTransposes without overlap by Conv and DepthToSpace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.weights import NewWeights, Replacement, layout_obstacle
from rewriter.ir.plan.node_patterns import NodePatterns
from rewriter.passes.algorithms.windows import Windows, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

ALIGNED = 8  # channels that Tensor Cores read together in FP16


@dataclass(frozen=True)
class ConvtransposeToDepthToSpace(WeightPass):
    """The last layer of a detector or an upscaler: TensorRT is slow at a ConvTranspose of few channels.

    A ConvTranspose whose kernel is its stride s writes s x s pixels for each pixel that it reads, and no
    pixel twice. A pointwise Conv computes the same sums as s * s channels for each channel, and DepthToSpace
    rearranges them: a sub-pixel convolution (Shi et al. 2016, arXiv 1609.05158). The kernels of a
    ConvTranspose are made for multiples of 8 channels. With one channel, as at the end of a text detector, it
    takes 198 of the 630 us of the network (docs/accuracy.md#convtransposes-of-few-channels).

    With 16 channels and more the gain is small, or none. In FP32 the sums are the same. An FP16 Conv sums in
    FP16, where deep sums are inaccurate, so they are skipped. The error was not measured on a GPU.

    Skipped without a report: ConvTransposes of more channels, deeper sums, windows that overlap or leave
    gaps, strides that differ along the axes, one or three axes, computed weights.

    Options:
        channels: Fewest output channels of a ConvTranspose that is skipped.
        depth: Most input channels of one that is replaced. FP16 sums of 256 products have an error of 6.4e-4,
            FP32 sums one of 3.0e-4 (docs/accuracy.md#nets-of-convs).

    Declines:
        - padding, an output_padding or output_shape, dilation, groups
        - a bias that is computed
    """

    channels: int = ALIGNED
    depth: int = 192

    name = "convtranspose-to-depth-to-space"
    requires = Requires(opset=11)  # from there on DepthToSpace has a mode
    exactness = Exactness(1e-5, "ONNX Runtime orders the same sums differently")
    before = """
        g (float[N,2,2,3] x) => (float[N,1,4,6] y)
        <float[2,1,2,2] w = {1.0, 2.0, 3.0, 4.0, 0.1, 0.2, 0.3, 0.4}, float[1] bias = {0.5}> {
            y = ConvTranspose<kernel_shape = [2, 2], strides = [2, 2]>(x, w, bias)
        }"""
    after = """
        g (float[N,2,2,3] x) => (float[N,1,4,6] y)
        <float[4,2,1,1] weight = {1.0, 0.1, 2.0, 0.2, 3.0, 0.3, 4.0, 0.4},
         float[4] biases = {0.5, 0.5, 0.5, 0.5}> {
            channels = Conv<kernel_shape = [1, 1]>(x, weight, biases)
            y = DepthToSpace<blocksize = 2, mode = "CRD">(channels)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = NewWeights(graph)
        for node in graph.nodes:
            windows = windows_of(graph, node, "ConvTranspose")
            if windows is None or not self._accepts(windows):
                continue
            refusal = refused(node, "it stays a ConvTranspose", _reason_against(graph, node, context.kept))
            yield refusal or _shuffled(graph, node, windows.strides[0], weights)

    def _accepts(self, windows: Windows) -> bool:
        step = windows.strides[0]
        apart = windows.kernel == windows.strides == (step, step) != (1, 1)
        return apart and windows.out < self.channels and windows.channels <= self.depth


def _reason_against(graph: GraphEditor, node: NodeProto, kept: NodePatterns) -> str | None:
    if attribute(node, "group", 1) != 1:
        return "its groups would have to be written one by one"
    if attribute(node, "auto_pad", "NOTSET") == "NOTSET" and any(attribute(node, "pads", [0])):
        return "it pads"
    if any(attribute(node, "output_padding", [0])) or attribute(node, "output_shape"):
        return "its result is larger or smaller than its windows"
    if any(step != 1 for step in attribute(node, "dilations", [1])):
        return "its windows are dilated"
    bias = optional_input(node, 2)
    if bias and graph.constant(bias) is None:
        return f"its bias {bias} is computed"
    return kept.reason(node) or layout_obstacle(graph, node.input[1])


def _shuffled(graph: GraphEditor, node: NodeProto, step: int, weights: NewWeights) -> Change:
    """Replaces the node; channels are ordered (channel, row, column), the mode CRD of DepthToSpace."""
    new, count, kernel = Replacement(graph, node, "shuffled"), step * step, node.input[1]
    # [C, O, s, s] to [O * s * s, C, 1, 1]
    weight = weights.changed(kernel, "shuffled", lambda w: w.transpose(1, 2, 3, 0).reshape(-1, len(w), 1, 1))
    inputs = [node.input[0], weight]
    if bias := optional_input(node, 2):
        key, name = (bias, count), f"{bias}/shuffled"
        inputs.append(weights.made(key, name, lambda: np.repeat(graph.value(bias), count)))
    channels = new.add("Conv", inputs, new.tensor("channels"), new.name, kernel_shape=[1, 1])
    new.finish("DepthToSpace", [channels], blocksize=step, mode="CRD")
    return Change(display_name(node), f"a pointwise Conv and DepthToSpace by {step}")
