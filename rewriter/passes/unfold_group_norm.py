"""unfold-group-norm: a GroupNorm becomes LayerNormalization over the channels and places of its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires
from rewriter.ir.graph import GraphEditor, attribute, is_op, label
from rewriter.ir.graph.match import other_operand
from rewriter.ir.graph.ops import RESHAPES

ACTIVATIONS = ("Relu", "Sigmoid", "Swish")
WIDTH = 64
"""TensorRT-RTX's own kernel was right wherever the channels are a multiple of this."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class UnfoldGroupNorm(GraphPass):
    """TensorRT-RTX's own kernel for GroupNorm is slow, wrong for 96 channels, and may not load.

    Exporters write GroupNorm as InstanceNormalization, of scale 1 and bias 0, between two Reshapes: its rows
    are groups. LayerNormalization over a group's channels and places is the same. On one H200 (1.6.1, FP16)
    a ResNetV2-50 takes 914 us instead of 961, and 1316 if the rows are normalised, an EfficientNet-B0 825
    instead of 1194 us and NaN, the UNet of a latent diffusion model 958, and 1120 if the rows are.

    The own kernel takes 20 us for any size, the other up to 120: a norm of 2^20 elements stays if channels are
    a multiple of 64 and an activation follows, since all such were right and loaded. The decoder of a latent
    diffusion model takes 326 us so, 414 if none stays, and 370 if only those go that do not load.

    Options:
        largest: Norms of fewer elements become LayerNormalization.

    Declines:
        - a larger norm before Relu or SiLU, of a multiple of 64 channels
        - groups of unknown size
    """

    name = "unfold-group-norm"
    largest: int = 2**20
    requires = Requires(opset=17)
    exactness = Exactness(1e-5, "sums of FP32 in another order")
    before = """
        g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <int64[3] groups = {0, 2, -1}, int64[4] whole = {1, 4, 2, 2},
         float[2] one = {1, 1}, float[2] zero = {0, 0}, float[4,1,1] scale = {1, 2, 3, 4}> {
            rows = Reshape(x, groups)
            norm = InstanceNormalization<epsilon = 0.000001>(rows, one, zero)
            image = Reshape(norm, whole)
            y = Mul(image, scale)
        }"""
    after = """
        g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <int64[5] places = {0, 2, 2, 2, 2}, int64[3] groups = {0, 2, -1}, int64[4] whole = {1, 4, 2, 2},
         float[2,2,2] ones = {1, 1, 1, 1, 1, 1, 1, 1}, float[4,1,1] scale = {1, 2, 3, 4}> {
            view = Reshape(x, places)
            norm = LayerNormalization<axis = 2, epsilon = 0.000001>(view, ones)
            rows = Reshape(norm, groups)
            image = Reshape(rows, whole)
            y = Mul(image, scale)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        scales: dict[tuple[Sizes, int | None], str] = {}
        for node in graph.nodes:
            if not is_op(node, "InstanceNormalization") or not _normalises_rows(graph, node):
                continue
            data, sizes = _unfolded(graph, node.input[0])
            channels, elements = math.prod(sizes[:2]), math.prod(graph.sizes(data) or sizes)
            wide = len(sizes) > 2 and channels % WIDTH == 0 and elements >= self.largest
            if not sizes:
                yield Refusal(label(node), "the number of elements of a group is not known")
            elif wide and _activated(graph, node.output[0]):
                yield Refusal(label(node), "TensorRT's kernel is fast for so large a norm with an activation")
            else:
                key = (sizes, graph.dtype(data))
                if key not in scales:
                    # ONNX Runtime's FP16 kernel is wrong for a scale of one element, which ONNX allows
                    ones = np.ones(sizes[1:])
                    scales[key] = graph.add_constant(f"{node.output[0]}/ones", ones, like=data)
                _write(graph, node, data, sizes, scales[key])
                yield Change(label(node), "a GroupNorm became LayerNormalization over its groups")


def _normalises_rows(graph: GraphEditor, node: NodeProto) -> bool:
    """True for [N, G, L] with scale 1 and bias 0."""
    scale, bias = (graph.constant(name) for name in node.input[1:3])
    plain = scale is not None and bias is not None and bool((scale == 1).all() and (bias == 0).all())
    return plain and graph.rank(node.input[0]) == 3


def _unfolded(graph: GraphEditor, rows: str) -> tuple[str, Sizes]:
    """What to normalise, and its sizes after the batch: of an image [groups, channels of one, height, width].

    Rows that are no view of an image stay [groups, length]. The sizes are () if one is not known.
    """
    view, known = graph.producer(rows), _inner(graph, rows)
    if view is not None and is_op(view, "Reshape") and known:
        channels, *places = _inner(graph, view.input[0]) or (0,)
        if len(places) > 1 and channels % known[0] == 0 and channels * math.prod(places) == math.prod(known):
            return view.input[0], (known[0], channels // known[0], *places)
    return rows, known


def _inner(graph: GraphEditor, tensor: str) -> Sizes:
    """Sizes after the batch; () if one is not known."""
    sizes = (graph.shape(tensor) or ())[1:]
    return tuple(s for s in sizes if isinstance(s, int)) if all(isinstance(s, int) for s in sizes) else ()


def _activated(graph: GraphEditor, tensor: str) -> bool:
    """True if Relu or SiLU reads a tensor, through views, and through a scale and a bias for each channel."""
    while (reader := graph.only_consumer(tensor)) is not None:
        other = other_operand(reader, tensor) if is_op(reader, "Mul", "Add") else None
        if not is_op(reader, *RESHAPES) and (other is None or graph.constant(other) is None):
            break
        tensor = reader.output[0]
    return any(is_op(reader, *ACTIVATIONS) for reader in graph.consumers(tensor))


def _write(graph: GraphEditor, node: NodeProto, data: str, sizes: Sizes, scale: str) -> None:
    """Puts LayerNormalization in the place of `node`, between two views if `data` is an image."""
    result, like, of_rows = node.output[0], graph.dtype(data), data == node.input[0]
    new = [graph.tensor(f"{result}/{what}", dtype=like) for what in ("view", "normal") if not of_rows]
    view, normal = new or (data, result)
    fields = {"name": node.name, "axis": 2, "epsilon": attribute(node, "epsilon", 1e-5)}
    norm = graph.make("LayerNormalization", [view, scale], [normal], **fields)
    before = [] if of_rows else [_reshaped(graph, data, view, sizes)]
    after = [] if of_rows else [_reshaped(graph, normal, result, (sizes[0], -1))]
    graph.substitute(result, *before, norm, *after)


def _reshaped(graph: GraphEditor, tensor: str, out: str, sizes: Sizes) -> NodeProto:
    return graph.make("Reshape", [tensor, graph.add_ints(f"{out}/sizes", 0, *sizes)], [out])
