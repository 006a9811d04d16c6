"""split-images: lets an FP32 Conv read an image as two tensors that TF32 can hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Requires, Stage, refused
from rewriter.graph import GraphEditor, attribute, is_op, label
from rewriter.graph.new_weights import layout_obstacle
from rewriter.patterns.windows import IMAGE_CHANNELS

LARGEST = np.finfo(np.float16).max
"""The second tensor holds what is beyond FP16."""


@dataclass(frozen=True)
class SplitImages(GraphPass):
    """Tensor Cores round the input of an FP32 Conv to TF32: an image loses bits before anything is computed.

    An image x is written as hi, which is x rounded to FP16, and lo = x - hi, side by side along the
    channels, and the weight twice. TF32 holds hi, and rounds lo, which is 2^-11 of x. As an image has few
    channels, which TensorRT-RTX pads anyway, the Conv costs next to nothing more
    (docs/accuracy.md#nets-of-convs).

    The pass runs after `mixed-precision`, because it adds Casts, and rewrites Convs that are FP32 then.

    Skipped without a report: Convs in FP16, Convs that read no input of the model, Convs of more channels,
    computed weights, grouped Convs.

    Options:
        channels: Most input channels of a Conv that is rewritten.

    Declines:
        - weights that are quantised, or that belong to an enclosing graph
    """

    channels: int = IMAGE_CHANNELS

    name = "split-images"
    requires = Requires(opset=13)  # from there on emulation rounds to TF32
    exactness = Exactness(1e-6, "hi + lo is x; ONNX Runtime adds the same products in another order")
    stage = Stage.LOWERED
    before = """
        g (float[1,1,4,4] x) => (float[1,2,4,4] y) <float[2,1,1,1] w = {0.1, 0.2}> {
            y = Conv(x, w)
        }"""
    after = """
        g (float[1,1,4,4] x) => (float[1,2,4,4] y)
        <float[2,2,1,1] w = {0.1, 0.1, 0.2, 0.2}, float least = {-65504.0}, float largest = {65504.0}> {
            held = Clip(x, least, largest)
            half = Cast<to = 10>(held)
            hi = Cast<to = 1>(half)
            lo = Sub(x, hi)
            both = Concat<axis = 1>(hi, lo)
            y = Conv(both, w)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        split: dict[str, str] = {}
        for node in graph.nodes:
            if self._accepts(graph, node):
                refusal = refused(node, "it reads the image as it is", layout_obstacle(graph, node.input[1]))
                yield refusal or _split(graph, node, split)

    def _accepts(self, graph: GraphEditor, node: NodeProto) -> bool:
        if not is_op(node, "Conv") or not graph.is_input(node.input[0]):
            return False
        types = {graph.dtype(name) for name in node.input[:2]}
        weight = graph.constant(node.input[1])
        if types != {TensorProto.FLOAT} or weight is None or attribute(node, "group", 1) != 1:
            return False
        return bool(weight.shape[1] <= self.channels)


def _split(graph: GraphEditor, node: NodeProto, split: dict[str, str]) -> Change:
    """Lets the Conv read both tensors; Convs of one image share them."""
    image = node.input[0]
    weight = graph.value(node.input[1])
    if image not in split:
        split[image] = _both(graph, node, image)
    twice = graph.add_constant(f"{node.input[1]}/twice", np.concatenate([weight, weight], axis=1))
    graph.set_input(node, 0, split[image])
    graph.set_input(node, 1, twice)
    return Change(label(node), f"{weight.shape[1]} channels of an image as {2 * weight.shape[1]}")


def _both(graph: GraphEditor, node: NodeProto, image: str) -> str:
    """Returns the name of hi and lo, side by side: twice the channels of the image."""
    bounds = [
        graph.add_constant(f"{image}/{name}", sign * LARGEST, like=image)
        for name, sign in (("least", -1), ("largest", 1))
    ]
    names = {what: graph.tensor(f"{image}/{what}", like=image) for what in ("held", "hi", "lo")}
    half = graph.tensor(f"{image}/half", like=image, dtype=TensorProto.FLOAT16)
    both = graph.tensor(f"{image}/both", dtype=TensorProto.FLOAT)
    graph.insert(
        graph.make("Clip", [image, *bounds], [names["held"]]),
        graph.make("Cast", [names["held"]], [half], to=TensorProto.FLOAT16),
        graph.make("Cast", [half], [names["hi"]], to=TensorProto.FLOAT),
        graph.make("Sub", [image, names["hi"]], [names["lo"]]),
        graph.make("Concat", [names["hi"], names["lo"]], [both], axis=1),
        before=node,
    )
    return both
