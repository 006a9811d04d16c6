"""convtranspose-to-depth-to-space: replaces ConvTransposes by products whose channels become places."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.weights import NewWeights, Replacement, layout_obstacle
from rewriter.ir.model import Array
from rewriter.ir.plan import NodePatterns
from rewriter.passes.algorithms.windows import Windows, pads_of, reason_against_product, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

ALIGNED = 8  # channels that Tensor Cores read together in FP16

MOST_DEPTH = 256
"""Most products in a sum of an image: FP16 sums of so many have an error of 6.4e-4, FP32 sums one of 3.0e-4
(docs/accuracy.md#nets-of-convs)."""

MOST_OVERLAP = 4
"""Most windows over a place for which products were measured: each copies the input once."""


@dataclass(frozen=True)
class ConvtransposeToDepthToSpace(WeightPass):
    """The end of a vocoder, detector or upscaler: TensorRT is slow at many ConvTransposes.

    A ConvTranspose of stride s writes s places for each element that it reads, and m = kernel / s windows
    overlap at a place. So its result is a stride-1 product of m elements with s * channels columns, which are
    rearranged: a sub-pixel convolution (Shi et al. 2016, arXiv 1609.05158).

    - **One axis** (audio): a MatMul of m shifted copies, and its bias as an Add. On an H200 twelve shapes
      took 0.03 to 0.94 of their time, at 0.8 to 1 of their error: the inverse STFT of a vocoder 20 us
      instead of 659.
    - **Two axes** (images): a Conv and DepthToSpace, where the result has few channels: 0.15 to 0.5 of their
      time (docs/accuracy.md#convtransposes). Deep sums are skipped: an FP16 Conv sums in FP16.
    - **Three axes** (volumes), where no windows overlap: a MatMul. Six took 0.06 to 0.13 of their time.

    Skipped without a report: images of 8 channels and more or deeper sums, strides of images that differ
    along the axes, strides of 1, more than 4 windows over a place of one axis, volumes whose windows overlap,
    computed weights.

    Declines:
        - dilation, groups, output_shape
        - a bias that is computed
        - a volume whose sizes are not known
    """

    requires = Requires(opset=11)  # from there on DepthToSpace has a mode
    exactness = Exactness(1e-5, "ONNX Runtime orders the same sums differently")
    example = """
         g (float[N,2,2,3] x) => (float[N,1,4,6] y)
        -<float[2,1,2,2] w, float[1] bias> {
        -    y = ConvTranspose<kernel_shape = [2, 2], strides = [2, 2]>(x, w, bias)
        +<float[4,2,1,1] weight, float[4] biases> {
        +    channels = Conv<kernel_shape = [1, 1], pads = [0, 0, 0, 0]>(x, weight, biases)
        +    y = DepthToSpace<blocksize = 2, mode = "CRD">(channels)
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
        if len(taps) != 2:
            most = MOST_OVERLAP if len(taps) == 1 else 1
            return math.prod(windows.strides) > 1 and len(taps) <= 3 and max(taps) <= most
        square = windows.strides[0] == windows.strides[1] > 1
        return square and windows.out < ALIGNED and windows.channels * math.prod(taps) <= MOST_DEPTH


def _reason_against(graph: GraphEditor, node: NodeProto, windows: Windows, kept: NodePatterns) -> str | None:
    if (reason := reason_against_product(node, windows)) is not None:
        return reason
    if attribute(node, "output_shape") or pads_of(node, windows) is None:
        return "its padding follows from the size of its result"
    bias = optional_input(node, 2)
    if bias and graph.constant(bias) is None:
        return f"its bias {bias} is computed"
    if len(windows.kernel) == 3 and len(windows.known) < 3:
        return f"the sizes of {node.input[0]} are not known, and no Reshape can join three axes of any size"
    if len(windows.kernel) == 3 and any(attribute(node, "output_padding", [0])):
        return "its result is longer than its windows"
    return kept.reason(node) or layout_obstacle(graph, node.input[1])


@dataclass(frozen=True, kw_only=True)
class _SubPixel(Replacement):
    """Writes the sums of all windows that reach from an element to the next, and cuts off the padding."""

    windows: Windows
    weights: NewWeights

    @property
    def places(self) -> int:
        """Places that are written for each element."""
        return math.prod(self.windows.strides)

    @property
    def cut(self) -> tuple[list[int], list[int]]:
        """Elements of all windows' sums that are no results, at the beginning and the end of each axis.

        Negative at the end where `output_padding` is longer than the windows.
        """
        pads, axes = pads_of(self.node, self.windows), len(self.windows.kernel)
        assert pads is not None  # else the node is declined
        longer = attribute(self.node, "output_padding", [0] * axes)
        return [*pads[:axes]], [size - more for size, more in zip(pads[axes:], longer, strict=True)]

    @property
    def taps(self) -> list[int]:
        """Windows that overlap at a place, along each axis; the last may have zeros at its end."""
        sizes = zip(self.windows.kernel, self.cut[1], self.windows.strides, strict=True)
        return [-(-(k - min(end, 0)) // step) for k, end, step in sizes]

    def write(self) -> Change:
        taps, (begin, end) = self.taps, self.cut
        sizes = zip(taps, self.windows.strides, self.windows.kernel, end, strict=True)
        ends = [tap * step - k + more for tap, step, k, more in sizes]
        images = len(taps) == 2
        text, whole = self._conv() if images else self._product()
        if any((*begin, *ends)):
            last = [-size if size else np.iinfo(np.int64).max for size in ends]
            whole = f"Slice({whole}, {begin}, {last}, {[*range(2, 2 + len(taps))]})"
        tensors = {"x": self.node.input[0], "w": self._weight(), "b": self._bias()}
        self.replace_by(f"{text} y0 = {whole}", **tensors)
        how = "a Conv and DepthToSpace" if images else "a product and a Transpose"
        return Change(display_name(self.node), f"{how}: {self.places} places for each element")

    def _product(self) -> tuple[str, str]:
        """[N, O, places] from [N, C, elements]; row u of the product has elements u, u - 1, ..."""
        (most, *_), strides, out = self.taps, self.windows.strides, self.windows.out
        axes, text = len(strides), ""
        rows = f"Transpose<perm = {[0, *range(2, 2 + axes), 1]}>(x)"
        if most > 1:
            text = f"rows = {rows} "
            shifted = (f"Pad(rows, {[0, tap, 0, 0, most - 1 - tap, 0]})" for tap in range(most))
            rows = f"Concat<axis = 2>({', '.join(shifted)})"
        perm = [0, 1 + axes, *(axis + step for axis in range(1, 1 + axes) for step in (0, 1 + axes))]
        sizes = [-1]  # one axis may be of any size
        if axes > 1:
            sizes = [size * step for size, step in zip(self.windows.known, strides, strict=True)]
        parts = f"Reshape(Add(product, b), {[*[0] * (1 + axes), out, *strides]})"
        whole = f"Reshape(Transpose<perm = {perm}>({parts}), {[0, out, *sizes]})"
        return f"{text} product = MatMul({rows}, w) ", whole

    def _conv(self) -> tuple[str, str]:
        """[N, O, H * s, W * s]; channels are ordered (channel, row, column): the mode CRD."""
        inputs = "x, w, b" if optional_input(self.node, 2) else "x, w"
        window = f"kernel_shape = {self.taps}, pads = {[tap - 1 for tap in self.taps] * 2}"
        step = self.windows.strides[0]
        return (
            f"product = Conv<{window}>({inputs}) ",
            f'DepthToSpace<blocksize = {step}, mode = "CRD">(product)',
        )

    def _weight(self) -> str:
        """Of a product [taps * C, O * places]; of a Conv [O * places, C, taps, taps], the taps reversed."""
        taps, strides = self.taps, self.windows.strides

        def changed(weight: Array) -> Array:
            channels, out, *kernel = weight.shape
            sizes = list(zip(taps, strides, kernel, strict=True))
            padded = np.pad(weight, [(0, 0), (0, 0), *((0, tap * step - k) for tap, step, k in sizes)])
            if len(taps) == 2:
                split = padded.reshape(channels, out, *(size for pair in sizes for size in pair[:2]))
                return split[:, :, ::-1, :, ::-1].transpose(1, 3, 5, 0, 2, 4).reshape(-1, channels, *taps)
            split = padded.reshape(channels, out, taps[0], -1)
            return split.transpose(2, 0, 1, 3).reshape(taps[0] * channels, -1)

        kernel = self.node.input[1]
        key = (kernel, *taps, *strides)
        return self.weights.made(key, f"{kernel}/shuffled", lambda: changed(self.graph.value(kernel)))

    def _bias(self) -> str:
        bias, kernel, count = optional_input(self.node, 2), self.node.input[1], self.places
        if not bias:
            zeros = np.zeros(self.windows.out * count)
            return self.graph.add_constant(f"{kernel}/shuffled/bias", zeros, like=kernel)
        repeated = partial(np.repeat, self.graph.value(bias), count)
        return self.weights.made((bias, count), f"{bias}/shuffled", repeated)
