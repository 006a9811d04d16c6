"""convtranspose-to-depth-to-space: replaces ConvTransposes by products whose channels become places."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.weights import NewWeights, Replacement, layout_obstacle
from rewriter.ir.model import Array
from rewriter.ir.plan.node_patterns import NodePatterns
from rewriter.passes.algorithms.windows import Windows, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

ALIGNED = 8
"""Channels that Tensor Cores read together in FP16."""

MOST_OVERLAP = 4
"""Most windows over a place for which products were measured: each copies the input once."""


@dataclass(frozen=True)
class ConvtransposeToDepthToSpace(WeightPass):
    """The end of a vocoder, detector or upscaler: TensorRT is slow at many ConvTransposes.

    A ConvTranspose of stride s writes s places for each element that it reads, and m = kernel / s windows
    overlap at a place. So its result is a stride-1 product of m elements with s * channels columns, which are
    rearranged: a sub-pixel convolution (Shi et al. 2016, arXiv 1609.05158).

    - **One axis** (audio): a MatMul of m shifted copies, and its bias as an Add, which can have an FP32
      epilogue. On an H200 twelve shapes took 0.03 to 0.96 of their time, at 0.8 of their error: the inverse
      STFT of a vocoder (1026 channels to 1, kernel 1024, stride 256) 21 us instead of 696.
    - **Two axes** (images): a Conv and DepthToSpace, where the result has few channels, which the kernels of
      a ConvTranspose are not made for: 0.15 to 0.5 of their time (docs/accuracy.md#convtransposes). With
      16 channels and more the gain is small, or none. An FP16 Conv sums in FP16, where deep sums are
      inaccurate, so they are skipped. In FP32 the sums are the same.

    Skipped without a report: images of more channels or deeper sums, strides that differ along the axes or
    are 1, three axes, more than 4 windows over a place of one axis, computed weights.

    Options:
        channels: Fewest output channels of a ConvTranspose of images that is skipped.
        depth: Most products in a sum of one that is replaced. FP16 sums of 256 products have an error of
            6.4e-4, FP32 sums one of 3.0e-4 (docs/accuracy.md#nets-of-convs).

    Declines:
        - dilation, groups, output_shape
        - a bias that is computed
    """

    channels: int = ALIGNED
    depth: int = 256

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
            channels = Conv<kernel_shape = [1, 1], pads = [0, 0, 0, 0]>(x, weight, biases)
            y = DepthToSpace<blocksize = 2, mode = "CRD">(channels)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = NewWeights(graph)
        for node in graph.nodes:
            windows = windows_of(graph, node, "ConvTranspose")
            if windows is None or not self._accepts(windows):
                continue
            reason = _reason_against(graph, node, windows, context.kept)
            refusal = refused(node, "it stays a ConvTranspose", reason)
            yield refusal or _SubPixel(graph, node, "shuffled", windows=windows, weights=weights).write()

    def _accepts(self, windows: Windows) -> bool:
        taps = [-(-k // step) for k, step in zip(windows.kernel, windows.strides, strict=True)]
        if len(taps) == 1:
            return windows.strides[0] > 1 and taps[0] <= MOST_OVERLAP
        square = len(windows.kernel) == 2 and windows.strides[0] == windows.strides[1] > 1
        return square and windows.out < self.channels and windows.channels * math.prod(taps) <= self.depth


def _reason_against(graph: GraphEditor, node: NodeProto, windows: Windows, kept: NodePatterns) -> str | None:
    if attribute(node, "group", 1) != 1:
        return "its groups would have to be written one by one"
    same = attribute(node, "auto_pad", "NOTSET").startswith("SAME")
    if attribute(node, "output_shape") or (same and min(windows.kernel) < windows.strides[0]):
        return "its padding follows from the size of its result"
    if any(step != 1 and size != 1 for step, size in zip(windows.dilations, windows.kernel, strict=True)):
        return "its windows are dilated"
    bias = optional_input(node, 2)
    if bias and graph.constant(bias) is None:
        return f"its bias {bias} is computed"
    return kept.reason(node) or layout_obstacle(graph, node.input[1])


@dataclass(frozen=True, kw_only=True)
class _SubPixel(Replacement):
    """Writes the sums of all windows that reach from an element to the next, and cuts off the padding."""

    windows: Windows
    weights: NewWeights

    @property
    def step(self) -> int:
        return self.windows.strides[0]

    @property
    def cut(self) -> tuple[list[int], list[int]]:
        """Elements of all windows' sums that are no results, at the beginning and the end of each axis.

        Negative at the end where `output_padding` is longer than the windows.
        """
        axes, auto = len(self.windows.kernel), attribute(self.node, "auto_pad", "NOTSET")
        longer = attribute(self.node, "output_padding", [0] * axes)
        if auto.startswith("SAME"):  # the result is as large as the steps
            total = [k - self.step + more for k, more in zip(self.windows.kernel, longer, strict=True)]
            less, rest = [size // 2 for size in total], [size - size // 2 for size in total]
            begin, end = (less, rest) if auto == "SAME_UPPER" else (rest, less)
        else:
            pads = attribute(self.node, "pads", [0] * 2 * axes) if auto == "NOTSET" else [0] * 2 * axes
            begin, end = pads[:axes], pads[axes:]
        return begin, [size - more for size, more in zip(end, longer, strict=True)]

    @property
    def taps(self) -> list[int]:
        """Windows that overlap at a place, along each axis; the last may be of zeros."""
        return [
            -(-(k - min(end, 0)) // self.step)
            for k, end in zip(self.windows.kernel, self.cut[1], strict=True)
        ]

    def write(self) -> Change:
        axes, whole = (
            len(self.taps),
            [step * tap for step, tap in zip(self.windows.strides, self.taps, strict=True)],
        )
        left, right = self.cut
        ends = [size - k + end for size, k, end in zip(whole, self.windows.kernel, right, strict=True)]
        cut = any((*left, *ends))
        result = self.tensor("whole") if cut else self.node.output[0]
        (self._product if axes == 1 else self._conv)(result)
        if cut:
            last = [-end if end else np.iinfo(np.int64).max for end in ends]
            ints = (left, last, range(2, 2 + axes))
            bounds = [
                self.graph.add_ints(f"{result}/{n}", *map(int, v))
                for n, v in zip(("starts", "ends", "axes"), ints, strict=True)
            ]
            self.add("Slice", [result, *bounds], self.node.output[0])
        self.graph.remove(self.node, keep=self.node.output)
        how = "a product and a Transpose" if axes == 1 else "a Conv and DepthToSpace"
        return Change(display_name(self.node), f"{how} by {self.step}")

    def _product(self, result: str) -> None:
        """Computes [N, O, L * s] from [N, C, L]: row u of the product has the elements u, u - 1, ..."""
        (taps,), out = self.taps, self.windows.out
        rows = self.add("Transpose", [self.node.input[0]], self.tensor("rows"), perm=[0, 2, 1])
        if taps > 1:
            shifted = []
            for tap in range(taps):
                pads = self.graph.add_ints(f"{rows}/pads", 0, tap, 0, 0, taps - 1 - tap, 0)
                shifted.append(
                    self.add("Pad", [rows, pads], self.tensor(f"shifted{tap}"), f"{self.name}/Pad{tap}")
                )
            rows = self.add("Concat", shifted, self.tensor("windows"), axis=2)
        product = self.add("MatMul", [rows, self._weight()], self.tensor("product"), self.name)
        summed = self.add("Add", [product, self._bias()], self.tensor("sums"))
        places = self.add(
            "Reshape",
            [summed, self.graph.add_ints(f"{summed}/shape", 0, 0, out, self.step)],
            self.tensor("places"),
            f"{self.name}/Split",
        )
        turned = self.add(
            "Transpose", [places], self.tensor("turned"), f"{self.name}/Turn", perm=[0, 2, 1, 3]
        )
        self.reshape(turned, (out, -1), result)

    def _conv(self, result: str) -> None:
        """Computes [N, O, H * s, W * s]; channels are ordered (channel, row, column): the mode CRD."""
        inputs, taps = [self.node.input[0], self._weight()], self.taps
        if optional_input(self.node, 2):
            inputs.append(self._bias())
        pads = [tap - 1 for tap in taps] * 2
        channels = self.add("Conv", inputs, self.tensor("channels"), self.name, kernel_shape=taps, pads=pads)
        self.add("DepthToSpace", [channels], result, blocksize=self.step, mode="CRD")

    def _weight(self) -> str:
        """[m * C, O * s] for a product, [O * s * s, C, m, m] for a Conv, whose windows run the other way."""
        taps, step = self.taps, self.step

        def changed(weight: Array) -> Array:
            more = [(0, tap * step - size) for tap, size in zip(taps, weight.shape[2:], strict=True)]
            padded = np.pad(weight, [(0, 0), (0, 0), *more])
            split = padded.reshape(*weight.shape[:2], *(size for tap in taps for size in (tap, step)))
            if len(taps) == 1:
                return split.transpose(2, 0, 1, 3).reshape(taps[0] * len(weight), -1)
            turned = split[:, :, ::-1, :, ::-1].transpose(1, 3, 5, 0, 2, 4)
            return turned.reshape(-1, len(weight), *taps)

        kernel = self.node.input[1]
        return self.weights.made(
            (kernel, *taps, step), f"{kernel}/shuffled", lambda: changed(self.graph.value(kernel))
        )

    def _bias(self) -> str:
        bias, kernel, count = optional_input(self.node, 2), self.node.input[1], self.step ** len(self.taps)
        if not bias:
            return self.graph.add_constant(
                f"{kernel}/shuffled/bias", np.zeros(self.windows.out * count), like=kernel
            )
        return self.weights.made(
            (bias, count), f"{bias}/shuffled", lambda: np.repeat(self.graph.value(bias), count)
        )
