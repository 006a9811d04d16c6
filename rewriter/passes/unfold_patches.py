"""unfold-patches: replaces a Conv whose windows do not overlap by a matrix product of its patches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name, is_op
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.weights import NewWeights, Replacement
from rewriter.ir.model.tensors import Shape
from rewriter.ir.plan import NodePatterns
from rewriter.passes.algorithms.windows import IMAGE_CHANNELS, Windows, reason_against, windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, Requires, WeightPass, refused

MOST_AXES = 3
"""Patches of more spatial axes need a Transpose of more than 8 axes, TensorRT's Dims::MAX_DIMS."""


@dataclass(frozen=True)
class UnfoldPatches(WeightPass):
    """A Conv of image patches is slow in TensorRT-RTX and sums in FP16; a MatMul before FP32 sums in FP32.

    A Conv with kernel = stride and no padding is a MatMul of its patches: the patch embeddings of ViT, Swin
    and ConvNeXt. As a MatMul, with its bias as an Add, it can have an FP32 epilogue
    (`mixed-precision{epilogues=all}`). A ViT-S needs 20 % less time. With more input channels the Conv is
    about as fast or faster (docs/accuracy.md#patches).

    If a Transpose, or a Reshape and a Transpose, bring the result to [N, L, O] or to channels last next, they
    are removed: the product has that layout already. Without a bias, zeros are added.

    On an image of one pixel, the two Convs of squeeze-and-excitation need 0.4 to 0.9 of their time as
    products of one row (docs/accuracy.md#patches). For several images that is not known: an EfficientNet of
    16 lost 5 % by this pass and two others (benchmarks/README.md#deployed-sizes).

    Skipped without a report: Convs of more channels, windows that overlap or leave gaps, computed weights,
    and other windows of one element.

    Options:
        images: Most images of one pixel, in the first sample, whose Convs become products; 0 for any.
        depth: Least depth of sums (input channels times elements of the window) that are unfolded whatever
            their channels; 0: none, 1: all. The preset `accurate` has 1024: from there the error is 8.8e-4.

    Declines:
        - sizes that are unknown, or that the windows do not divide: Conv drops the remainder
        - padding, dilation, groups
        - a Conv of more than 3 spatial axes
        - 8 channels before a Relu (docs/findings.md, `narrow-product-relu`)
    """

    images: int = 1
    depth: int = 0

    requires = Requires(opset=7)  # from there on Add broadcasts a row
    exactness = Exactness(1e-5, "ONNX Runtime orders the sums differently: 7.2e-7 measured on a SegFormer")
    example = """
         g (float[N,1,4,4] x) => (float[N,4,2] y)
        -<float[2,1,2,2] w, float[2] bias, int64[3] flat = {0, 2, 4}> {
        -    c = Conv<kernel_shape = [2, 2], strides = [2, 2]>(x, w, bias)
        -    f = Reshape(c, flat)
        -    y = Transpose<perm = [0, 2, 1]>(f)
        +<float[4,2] weight, float[2] bias, int64[6] windows = {0, 1, 2, 2, 2, 2},
        + int64[3] rows = {0, 4, 4}> {
        +    split = Reshape(x, windows)
        +    moved = Transpose<perm = [0, 2, 4, 1, 3, 5]>(split)
        +    patches = Reshape(moved, rows)
        +    product = MatMul(patches, weight)
        +    y = Add(product, bias)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights, facts = NewWeights(graph), graph.model.at_sizes(context.sample).facts().main
        for node in graph.nodes:
            windows = windows_of(graph, node)
            if windows is None or not self._accepts(windows):
                continue
            known = facts.get(node.input[0]) or graph.facts(node.input[0])
            images = next(iter(known.shape or ()), None) if known is not None else None
            many = _of_one_pixel(windows) and isinstance(images, int) and 0 < self.images < images
            reason = f"no gain was measured for {images} images" if many else None
            reason = reason or _reason_against(graph, node, windows, context.kept)
            refusal = refused(node, "it stays a Conv", reason)
            unfolding = _Unfolding(graph, node, "unfolded", windows=windows, weights=weights)
            yield refusal or unfolding.write(context.kept)

    def _accepts(self, windows: Windows) -> bool:
        elements = math.prod(windows.kernel)
        deep = bool(self.depth) and windows.channels * elements >= self.depth
        patches = windows.kernel == windows.strides and elements > 1
        return _of_one_pixel(windows) or (patches and (deep or windows.channels <= IMAGE_CHANNELS))


def _of_one_pixel(windows: Windows) -> bool:
    """True for a pointwise Conv of an image of one pixel."""
    return all(size == 1 for size in (*windows.kernel, *windows.sizes))


def _reason_against(graph: GraphEditor, node: NodeProto, windows: Windows, kept: NodePatterns) -> str | None:
    """Returns why the Conv is no product of patches, or why its windows do not partition the input."""
    if len(windows.kernel) > MOST_AXES:
        return f"TensorRT cannot transpose patches of {len(windows.kernel)} spatial axes"
    if attribute(node, "auto_pad", "NOTSET") == "NOTSET" and any(attribute(node, "pads", [0])):
        return "it pads"
    if windows.out == 8 and any(is_op(reader, "Relu") for reader in graph.consumers(node.output[0])):
        return "TensorRT-RTX has a wrong kernel for a product of 8 columns with a Relu"
    return reason_against(graph, node, windows, kept)  # without a remainder, auto_pad pads nothing


@dataclass(frozen=True, kw_only=True)
class _Unfolding(Replacement):
    windows: Windows
    weights: NewWeights

    @property
    def depth(self) -> int:
        return self.windows.channels * math.prod(self.windows.kernel)

    def write(self, kept: NodePatterns) -> Change:
        graph, conv, counts, out = self.graph, self.node, self.windows.counts, self.windows.out
        if _of_one_pixel(self.windows):
            pixel = self.reshape(conv.input[0], (self.depth,), self.tensor("pixel"))
            self._product(pixel, row := self.tensor("row"))
            self.reshape(row, (out, *counts), conv.output[0])
            graph.remove(conv)
            return Change(display_name(conv), f"a product of one row of {self.depth} elements")
        end = _channels_last(graph, conv, counts, out, kept)
        rank = len(graph.shape(end.output[0]) or ()) if end is not None else 0
        rows = end.output[0] if end is not None and rank == 3 else self.tensor("rows")
        self._product(self._patches(), rows)
        if end is not None:
            if rank != 3:
                self.reshape(rows, (*counts, out), end.output[0])
            graph.remove(end)
        if graph.producer(conv.output[0]) is conv:  # other consumers read the layout of Conv
            self._channels_first(rows)
            graph.remove(conv)
        what = f"a product of {math.prod(counts)} patches of {self.depth} elements"
        return Change(display_name(conv), what)

    def _patches(self) -> str:
        """Computes [N, L, C * window] from [N, C, H, W]."""
        counts, kernel = self.windows.counts, self.windows.kernel
        sizes = [size for pair in zip(counts, kernel, strict=True) for size in pair]
        split = self.reshape(self.node.input[0], (self.windows.channels, *sizes), self.tensor("windows"))
        end = 2 + 2 * len(kernel)
        perm = [0, *range(2, end, 2), 1, *range(3, end, 2)]
        moved = self.add("Transpose", [split], self.tensor("moved"), perm=perm)
        return self.reshape(moved, (math.prod(counts), self.depth), self.tensor("patches"))

    def _product(self, patches: str, rows: str) -> None:
        """Computes rows [..., O] from patches [..., C * window]."""
        weight = self.weights.changed(self.node.input[1], "unfolded", lambda w: w.reshape(len(w), -1).T)
        product = self.add("MatMul", [patches, weight], self.tensor("product"), self.name)
        self.add("Add", [product, self._bias()], rows, f"{self.name}/Add")

    def _channels_first(self, rows: str) -> None:
        """Restores the Conv's layout from [N, L, O]."""
        result, flat = self.node.output[0], len(self.windows.kernel) == 1
        turned = self.add("Transpose", [rows], result if flat else self.tensor("turned"), perm=[0, 2, 1])
        if not flat:
            self.reshape(turned, (self.windows.out, *self.windows.counts), result)

    def _bias(self) -> str:
        if bias := optional_input(self.node, 2):
            return bias
        weight = self.node.input[1]
        return self.graph.add_constant(f"{weight}/unfolded/bias", np.zeros(self.windows.out), like=weight)


def _channels_last(
    graph: GraphEditor, conv: NodeProto, counts: tuple[int, ...], channels: int, kept: NodePatterns
) -> NodeProto | None:
    """Returns the Transpose to [N, L, O] or [N, *counts, O] that is the result's only reader but Shapes."""
    result = conv.output[0]
    readers = [n for n in graph.consumers(result) if n.op_type != "Shape"]
    if len(readers) != 1:
        return None
    last, rank = readers[0], len(counts) + 2
    if last.op_type == "Reshape":
        if not _is_flat(graph.shape(last.output[0]), graph.shape(result), channels, math.prod(counts)):
            return None
        following = graph.only_consumer(last.output[0])
        if following is None or any(kept.requests(last)):
            return None
        last, rank = following, 3
    turns = last.op_type == "Transpose" and attribute(last, "perm") == [0, *range(2, rank), 1]
    return last if turns and not any(kept.requests(last)) else None


def _is_flat(shape: Shape | None, result: Shape | None, channels: int, elements: int) -> bool:
    """True if a Reshape of `result` gives [N, channels, pixels]; N or the pixels may be unknown."""
    if shape is None or len(shape) != 3 or shape[1] != channels:
        return False
    return shape[2] == elements or (result is not None and shape[0] is not None and shape[0] == result[0])
