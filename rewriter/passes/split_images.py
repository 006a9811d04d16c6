"""split-images: a Conv in FP32 reads an image as two tensors that TF32 holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires, Stage
from rewriter.graph import GraphEditor, attribute, label
from rewriter.patterns.windows import IMAGE_CHANNELS, reason_in_weight

LARGEST = np.finfo(np.float16).max
"""What is beyond it is left to the second tensor."""


@dataclass(frozen=True)
class SplitImages(GraphPass):
    """Tensor Cores round what a Conv in FP32 reads to TF32: of an image, before anything was computed of it.

    An image x is written as hi, which is x rounded to FP16, and lo = x - hi, side by side along the channels,
    and the weight twice. TF32 holds hi, and rounds lo, 2^-11 of x. An image has few channels, so the Conv
    costs next to nothing more: TensorRT-RTX pads them anyway. Measured on one H200 with TensorRT-RTX 1.6.1:
    a NAFNet in FP32, 839 us without and 841 with it; emulated, it errs by 2.8e-4 without and 2.5e-4 with it.

    It follows mixed-precision, because it adds Casts, and takes what is FP32 then.

    Left alone without a word: Convs in FP16, those that read no input of the model, those of more channels,
    computed weights, grouped Convs.

    Options:
        channels: Most input channels of a Conv that it takes.

    Declines:
        - weights that are quantised, or that belong to a graph around this one
        - a model below opset 13
    """

    channels: int = IMAGE_CHANNELS

    name = "split-images"
    requires = Requires(opset=13)  # from there on emulation rounds to TF32
    exactness = Exactness(1e-6, "hi + lo is x; ONNX Runtime adds the same products in another order")
    stage = Stage.LOWERED
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,1,4,4] x) => (float[1,2,4,4] y) <float[2,1,1,1] w = {0.1, 0.2}> {
            y = Conv(x, w)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
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
            if not self._takes(graph, node):
                continue
            reason = _reason_against(graph, node)
            if reason is not None:
                yield Refusal(label(node), f"it reads the image as it is: {reason}")
            else:
                yield _split(graph, node, split)

    def _takes(self, graph: GraphEditor, node: NodeProto) -> bool:
        if node.op_type != "Conv" or node.domain not in {"", "ai.onnx"} or not graph.is_input(node.input[0]):
            return False
        types = {graph.dtype(name) for name in node.input[:2]}
        weight = graph.constant(node.input[1])
        if types != {TensorProto.FLOAT} or weight is None or attribute(node, "group", 1) != 1:
            return False
        return bool(weight.shape[1] <= self.channels)


def _reason_against(graph: GraphEditor, node: NodeProto) -> str | None:
    return reason_in_weight(graph, node.input[1])


def _split(graph: GraphEditor, node: NodeProto, split: dict[str, str]) -> Change:
    """Let the Conv read both tensors; Convs of one image share them."""
    image = node.input[0]
    if image not in split:
        split[image] = _both(graph, node, image)
    weight = graph.constant(node.input[1])
    assert weight is not None  # `_takes` asked
    twice = graph.add_constant(f"{node.input[1]}/twice", np.concatenate([weight, weight], axis=1))
    graph.set_input(node, 0, split[image])
    graph.set_input(node, 1, twice)
    return Change(label(node), f"{weight.shape[1]} channels of an image as {2 * weight.shape[1]}")


def _both(graph: GraphEditor, node: NodeProto, image: str) -> str:
    """Name of hi and lo, side by side."""
    bounds = [
        graph.add_constant(f"{image}/{name}", np.asarray(sign * LARGEST, np.float32))
        for name, sign in (("least", -1), ("largest", 1))
    ]
    names = {what: graph.tensor(f"{image}/{what}", like=image) for what in ("held", "hi", "lo")}
    half = graph.tensor(f"{image}/half", like=image, dtype=TensorProto.FLOAT16)
    shape = graph.shape(image)
    wide = None if shape is None else (shape[0], 2 * _count(shape[1]), *shape[2:])
    both = graph.tensor(f"{image}/both", like=image, shape=wide)
    graph.insert(
        graph.make("Clip", [image, *bounds], [names["held"]]),
        graph.make("Cast", [names["held"]], [half], to=TensorProto.FLOAT16),
        graph.make("Cast", [half], [names["hi"]], to=TensorProto.FLOAT),
        graph.make("Sub", [image, names["hi"]], [names["lo"]]),
        graph.make("Concat", [names["hi"], names["lo"]], [both], axis=1),
        before=node,
    )
    return both


def _count(size: int | str | None) -> int:
    assert isinstance(size, int), size  # the weight says how many channels an image has
    return size
