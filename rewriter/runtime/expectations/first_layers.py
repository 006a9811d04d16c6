"""Follows an input to the first layer with weights: constants that normalise it, and the layer itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.graph.match import other_operand
from rewriter.ir.graph.ops import SCALING
from rewriter.ir.model import Array

STEPS = 12
"""Most nodes that an input is followed through: Cast, Transpose, Div, Sub, Div and some Identities."""

IMAGE_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class FirstLayers:
    """The first operations on an input: value * factor + offset, then possibly a BatchNormalization.

    Attributes:
        factor, offset: One per channel, or one for all (size 1).
        normalizes: True if the model has such constants.
        channels: Channels of the image that the first Conv reads; None without a Conv or an image.
        channel_axis: Axis of the input (before Transposes), if a Conv or BatchNormalization shows it.
        mean, deviation: Training statistics of the BatchNormalization.
        text: The constants in words.
    """

    factor: Array
    offset: Array
    normalizes: bool = False
    channels: int | None = None
    channel_axis: int | None = None
    mean: Array | None = None
    deviation: Array | None = None
    text: str = ""


def first_layers(graph: GraphEditor, tensor: str) -> FirstLayers:
    """Follows `tensor` through operators with one reader each, to the first that has weights."""
    name, rank = tensor, graph.rank(tensor)
    axes = list(range(rank)) if rank is not None else None
    factor, offset = np.ones(1), np.zeros(1)
    words: list[str] = []
    node: NodeProto | None = None
    for _ in range(STEPS):
        node = graph.only_consumer(name)
        if node is None:
            break
        if node.op_type in ("Cast", "Identity"):
            pass
        elif node.op_type == "Transpose" and axes is not None:
            axes = [axes[i] for i in attribute(node, "perm", list(range(len(axes)))[::-1])]
        else:
            step = _affine(graph, node, name)
            if step is None:
                break
            factor, offset = factor * step[0], offset * step[0] + step[1]
            words.append(node.op_type)
        name = node.output[0]
    read = FirstLayers(factor, offset, bool(words), text=_words(words, factor, offset))
    if node is None or axes is None or len(axes) < 2:
        return read
    if node.op_type == "Conv":
        return replace(read, channels=_channels(graph, node), channel_axis=axes[1])
    if node.op_type == "BatchNormalization" and len(node.input) >= 5:
        mean, variance = (graph.constant(node.input[i]) for i in (3, 4))
        if mean is not None and variance is not None:
            deviation = np.sqrt(np.maximum(variance.astype(np.float64), 1e-12))
            text = f"{read.text}{', and ' * bool(words)}a BatchNormalization comes first"
            return replace(read, channel_axis=axes[1], mean=mean, deviation=deviation, text=text)
    return read


def _channels(graph: GraphEditor, conv: NodeProto) -> int | None:
    """Channels of the image that a Conv reads; None if they are unknown, or it reads no image."""
    weight = graph.shape(conv.input[1])
    count = weight[1] * int(attribute(conv, "group", 1)) if weight and isinstance(weight[1], int) else None
    return count if count in IMAGE_CHANNELS else None


def _affine(graph: GraphEditor, node: NodeProto, name: str) -> tuple[Array, Array] | None:
    """Factor and offset of an operator with one constant; None for other operators."""
    other = other_operand(node, name) if node.op_type in SCALING | {"Add", "Sub"} else None
    first, constant = node.input[0] == name, graph.constant(other) if other else None
    if constant is None or not _by_channel(constant):
        return None
    value = constant.astype(np.float64).reshape(-1)
    one, zero = np.ones_like(value), np.zeros_like(value)
    if node.op_type == "Add":
        return one, value
    if node.op_type == "Mul":
        return value, zero
    if node.op_type == "Sub":
        return (one, -value) if first else (-one, value)
    return (one / value, zero) if first and np.all(value) else None


def _by_channel(constant: Array) -> bool:
    """True if at most one axis has several entries, as many as an image has channels."""
    return sum(size > 1 for size in constant.shape) <= 1 and constant.size in (*IMAGE_CHANNELS, 1)


def _words(operators: list[str], factor: Array, offset: Array) -> str:
    if not operators:
        return ""
    shown = [", ".join(f"{v:.4g}" for v in part.tolist()) for part in (factor, offset)]
    return (
        f"the model normalises this input itself ({' and '.join(operators)}: x * ({shown[0]}) + ({shown[1]}))"
    )
