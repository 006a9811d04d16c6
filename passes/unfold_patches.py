"""unfold-patches: a Conv whose windows do not overlap becomes a matrix product of its patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Kept, Refusal
from rewriter.edits import GraphEditor, attribute, is_own, is_quantised, label
from rewriter.facts import Shape
from rewriter.model import Array

FIRST_OPSET = 7
"""From opset 5 on Reshape takes its shape as an input, from 7 on Add broadcasts a row by itself."""

MOST_AXES = 3
"""Patches of more spatial axes need a Transpose of more than 8, TensorRT's Dims::MAX_DIMS."""

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(frozen=True)
class UnfoldPatches(GraphPass):
    """TensorRT-RTX sums an FP16 Conv in FP16 whatever reads it, and an FP16 MatMul before FP32 in FP32.

    A Conv with kernel = stride and no padding is a MatMul of its patches: the patch embeddings of ViT, Swin
    and ConvNeXt, 2x2 downsampling, the spatial reductions of SegFormer. Written as one, with its bias as an
    Add, it can have an FP32 epilogue (mixed-precision{epilogues=true}). Measured on one H200 with
    TensorRT-RTX 1.6.1: ViT-S's patch Conv, of depth 768, had a relative error of 2.4e-3 in FP16, and what
    it errs stands in the residual stream to the end; a MatMul of that depth with an FP32 bias has 2.1e-4
    (docs/accuracy.md). What the Transposes before and behind it cost was not measured.

    Patches hold their elements in the order of the weight: channel, then place in the window. Where the
    result is brought to [N, L, O] or to channels last next (Transpose, or Reshape and Transpose), the product
    is that already, and these go. Otherwise a Transpose (and Reshape) gives what Conv gave. Without a bias it
    adds zeros: the epilogue needs an Add. The new weights are held in memory until they are lowered, those
    of external data, too.

    Left alone without a word: windows of one element, whose Conv is faster than a MatMul (a NAFNet with its
    64 pointwise Convs as MatMuls was 17 to 28 % slower on that GPU), windows that overlap or leave gaps,
    computed weights.

    Declines:
        - sizes that are not known, or of which the windows leave a remainder: Conv drops it
        - padding, dilation, groups
        - a Conv that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, or that belong to a graph around this one
        - a model below opset 7, a Conv of more than 3 spatial axes
    """

    name = "unfold-patches"
    exactness = Exactness(
        1e-5, "ONNX Runtime blocks the same sums otherwise: 7.2e-7 measured on a SegFormer, 6.1e-7 on a ViT"
    )
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N,1,4,4] x) => (float[N,4,2] y)
        <float[2,1,2,2] w = {1.0, 2.0, 3.0, 4.0, 0.1, 0.2, 0.3, 0.4}, float[2] bias = {0.5, 0.25},
         int64[3] flat = {0, 2, 4}> {
            c = Conv<kernel_shape = [2, 2], strides = [2, 2]>(x, w, bias)
            f = Reshape(c, flat)
            y = Transpose<perm = [0, 2, 1]>(f)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N,1,4,4] x) => (float[N,4,2] y)
        <float[4,2] weight = {1.0, 0.1, 2.0, 0.2, 3.0, 0.3, 4.0, 0.4}, float[2] bias = {0.5, 0.25},
         int64[6] windows = {0, 1, 2, 2, 2, 2}, int64[3] rows = {0, 4, 4}> {
            split = Reshape(x, windows)
            moved = Transpose<perm = [0, 2, 4, 1, 3, 5]>(split)
            patches = Reshape(moved, rows)
            product = MatMul(patches, weight)
            y = Add(product, bias)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights: dict[str, str] = {}
        for node in graph.nodes:
            kernel = _tiled(graph, node)
            if kernel is None:
                continue
            reason = _reason_against(graph, node, kernel, context.kept)
            if reason is not None:
                yield Refusal(label(node), f"it stays a Conv: {reason}")
            else:
                yield _Unfolding(graph, node, kernel, weights).write(context.kept)


def _tiled(graph: GraphEditor, node: NodeProto) -> tuple[int, ...] | None:
    """The window of a Conv with a constant weight that steps by its own size; None for other nodes."""
    if node.op_type != "Conv" or node.domain not in {"", "ai.onnx"}:
        return None
    shape = graph.shape(node.input[1])
    if shape is None or len(shape) < 3:
        return None
    kernel = tuple(size for size in shape[2:] if isinstance(size, int))
    strides = tuple(attribute(node, "strides", [1] * len(kernel)))
    if len(kernel) != len(shape) - 2 or kernel != strides or math.prod(kernel) < 2:
        return None
    if graph.constant(node.input[1]) is None and not is_quantised(graph, node.input[1]):
        return None
    return kernel


def _reason_against(graph: GraphEditor, node: NodeProto, kernel: tuple[int, ...], kept: Kept) -> str | None:
    if graph.model.opset < FIRST_OPSET:
        return f"a product needs opset {FIRST_OPSET}, the model has {graph.model.opset}: run upgrade-opset"
    if len(kernel) > MOST_AXES:
        return f"TensorRT cannot transpose patches of {len(kernel)} spatial axes"
    option = next(kept.options(node), None)
    if option is not None:
        return f"it is kept in FP32 by {option}"
    return _reason_in_weight(graph, node.input[1]) or _reason_in_windows(graph, node, kernel)


def _reason_in_weight(graph: GraphEditor, weight: str) -> str | None:
    if is_quantised(graph, weight):
        return "its weight is quantised: TensorRT runs it so"
    if not is_own(graph, weight):
        return "its weight belongs to a graph around it, and would be copied"
    if graph.dtype(weight) not in _FLOATS:
        return "its weight is of a type that TensorRT has no product for"
    return None


def _reason_in_windows(graph: GraphEditor, node: NodeProto, kernel: tuple[int, ...]) -> str | None:
    """What keeps the windows from being a partition of the input."""
    if attribute(node, "group", 1) != 1:
        return "its groups would be a product each"
    dilations = attribute(node, "dilations", [1] * len(kernel))
    if any(dilation != 1 and size != 1 for dilation, size in zip(dilations, kernel, strict=True)):
        return "its windows are dilated"
    if attribute(node, "auto_pad", "NOTSET") == "NOTSET" and any(attribute(node, "pads", [0])):
        return "it pads"
    for axis, (size, window) in enumerate(zip(_sizes(graph, node, kernel), kernel, strict=True), start=2):
        if not isinstance(size, int):
            return f"the size of axis {axis} of {node.input[0]} is not known, and {window} may not divide it"
        if size < window or size % window:
            return f"windows of {window} leave a remainder of {size} elements along axis {axis}"
    return None  # auto_pad adds nothing where the windows leave no remainder


def _sizes(graph: GraphEditor, node: NodeProto, kernel: tuple[int, ...]) -> tuple[int | str | None, ...]:
    shape = graph.shape(node.input[0])
    return (None,) * len(kernel) if shape is None or len(shape) != len(kernel) + 2 else shape[2:]


@dataclass(frozen=True)
class _Unfolding:
    """One Conv on its way to a product.

    Attributes:
        kernel: Its window, for each spatial axis.
        weights: By the name of a Conv's weight, that of the product's: Convs that share one go on doing so.
    """

    graph: GraphEditor
    conv: NodeProto
    kernel: tuple[int, ...]
    weights: dict[str, str]

    @property
    def counts(self) -> tuple[int, ...]:
        """Windows along each spatial axis."""
        sizes = _sizes(self.graph, self.conv, self.kernel)
        return tuple(s // k for s, k in zip(sizes, self.kernel, strict=True) if isinstance(s, int))

    @property
    def channels(self) -> tuple[int, int]:
        """Of the result and of what is read."""
        shape = self.graph.shape(self.conv.input[1]) or ()
        out, read = (size for size in shape[:2] if isinstance(size, int))
        return out, read

    def write(self, kept: Kept) -> Change:
        """Put the product in the place of the Conv."""
        graph, conv, counts = self.graph, self.conv, self.counts
        end = _channels_last(graph, conv, counts, self.channels[0], kept)
        rank = len(graph.shape(end.output[0]) or ()) if end is not None else 0
        rows = end.output[0] if end is not None and rank == 3 else self._tensor("rows")
        self._product(rows)
        if end is not None:
            if rank != 3:
                self._reshape(rows, (*counts, self.channels[0]), end.output[0])
            graph.remove(end)
        if graph.producer(conv.output[0]) is conv:  # it is read in the layout of Conv, too
            self._channels_first(rows)
            graph.remove(conv)
        depth = self.channels[1] * math.prod(self.kernel)
        return Change(label(conv), f"a product of {math.prod(counts)} patches of {depth} elements")

    def _product(self, rows: str) -> None:
        """[N, C, H, W] to [N, L, O], O innermost."""
        count, (out, read) = len(self.kernel), self.channels
        sizes = [size for pair in zip(self.counts, self.kernel, strict=True) for size in pair]
        windows = self._reshape(self.conv.input[0], (read, *sizes), self._tensor("windows"))
        places, inside = range(2, 2 + 2 * count, 2), range(3, 3 + 2 * count, 2)
        moved = self._add("Transpose", [windows], self._tensor("moved"), perm=[0, *places, 1, *inside])
        depth = read * math.prod(self.kernel)
        patches = self._reshape(moved, (math.prod(self.counts), depth), self._tensor("patches"))
        name = f"{label(self.conv)}/unfolded"
        product = self._add("MatMul", [patches, self._weight()], self._tensor("product"), name)
        self._add("Add", [product, self._bias(out)], rows, f"{name}/Add")

    def _channels_first(self, rows: str) -> None:
        """[N, L, O] to what the Conv gave."""
        result, flat = self.conv.output[0], len(self.kernel) == 1
        turned = result if flat else self._tensor("turned")
        self._add("Transpose", [rows], turned, perm=[0, 2, 1])
        if not flat:
            self._reshape(turned, (self.channels[0], *self.counts), result)

    def _weight(self) -> str:
        """Name of the constant [C * window, O]."""
        name = self.conv.input[1]
        if name not in self.weights:
            value = self.graph.constant(name)
            assert value is not None, name  # `_tiled` asked
            turned = np.ascontiguousarray(value.reshape(value.shape[0], -1).T)
            self.weights[name] = self.graph.add_constant(f"{name}/unfolded", turned)
        return self.weights[name]

    def _bias(self, columns: int) -> str:
        if len(self.conv.input) > 2 and self.conv.input[2]:
            return self.conv.input[2]
        dtype = helper.tensor_dtype_to_np_dtype(self.graph.dtype(self.conv.input[1]) or TensorProto.FLOAT)
        zeros: Array = np.zeros(columns, dtype)
        return self.graph.add_constant(f"{self.conv.input[1]}/unfolded/bias", zeros)

    def _reshape(self, tensor: str, sizes: tuple[int, ...], out: str) -> str:
        """Reshape behind the batch, whose size (0) is copied."""
        shape = self.graph.add_constant(f"{out}/shape", np.asarray((0, *sizes), np.int64))
        return self._add("Reshape", [tensor, shape], out)

    def _tensor(self, what: str) -> str:
        dtype = self.graph.dtype(self.conv.input[1])
        return self.graph.tensor(f"{self.conv.output[0]}/{what}", dtype=dtype)

    def _add(self, op: str, inputs: list[str], out: str, name: str = "", **attributes: Any) -> str:
        node = self.graph.make(
            op, inputs, [out], name=name or f"{label(self.conv)}/unfolded/{op}", **attributes
        )
        self.graph.insert(node, before=self.conv)
        return out


def _channels_last(
    graph: GraphEditor, conv: NodeProto, counts: tuple[int, ...], channels: int, kept: Kept
) -> NodeProto | None:
    """The Transpose that alone brings the result to [N, L, O] or [N, *counts, O]; others read its shape."""
    result = conv.output[0]
    readers = [n for n in graph.consumers(result) if n.op_type != "Shape"]
    if len(readers) != 1:
        return None
    last, rank = readers[0], len(counts) + 2
    if last.op_type == "Reshape":
        if not _is_flat(graph.shape(last.output[0]), graph.shape(result), channels, math.prod(counts)):
            return None
        following = graph.only_consumer(last.output[0])
        if following is None or any(kept.options(last)):
            return None
        last, rank = following, 3
    turns = last.op_type == "Transpose" and attribute(last, "perm") == [0, *range(2, rank), 1]
    return last if turns and not any(kept.options(last)) else None


def _is_flat(shape: Shape | None, result: Shape | None, channels: int, places: int) -> bool:
    """Whether a Reshape of `result` gives [N, channels, places]: N or the places need not be known."""
    if shape is None or len(shape) != 3 or shape[1] != channels:
        return False
    return shape[2] == places or (result is not None and shape[0] is not None and shape[0] == result[0])
