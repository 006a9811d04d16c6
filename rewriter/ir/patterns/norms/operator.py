"""Replaces a decomposed normalisation by LayerNormalization or RMSNormalization."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor
from rewriter.ir.patterns.norms import Frame, Norm
from rewriter.ir.patterns.norms.affine import unrepeated, weight


class _UnknownSizeError(Exception):
    """The operator cannot be written, as a normalised axis has no known size."""


def frame(graph: GraphEditor, norm: Norm) -> Frame:
    """The axes of a norm and what is known of their sizes."""
    return Frame(norm.axes, graph.shape(norm.input))


def replace(graph: GraphEditor, norm: Norm, op_type: str) -> str | None:
    """Replaces `norm` by one operator; between Transposes if its axes are not the last.

    The operators normalise over the axes from `axis` to the last, their scale and bias have exactly
    the shape of those axes (bias may be left out, scale may not), and `epsilon` is an FP32
    attribute: it holds the value of an FP16, BF16 or FP32 constant exactly.

    Returns:
        The reason against it, with the graph unchanged; None if it was done.
    """
    where = frame(graph, norm)
    try:
        parts = [_ones(graph, norm, where) if norm.scale is None else _shaped(graph, norm.scale, where)]
        if norm.bias is not None:
            parts.append(_shaped(graph, norm.bias, where))
    except _UnknownSizeError as error:
        return str(error)
    perm = _last(where)
    source, output = norm.input, norm.output
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    if perm:
        dtype = graph.dtype(norm.output)
        source, output = (graph.tensor(f"{norm.output}/{end}", dtype=dtype) for end in ("in", "out"))
        before.append(graph.make("Transpose", [norm.input], [source], perm=perm))
        after.append(graph.make("Transpose", [output], [norm.output], perm=np.argsort(perm).tolist()))
    node = graph.make(op_type, [source, *parts], [output], axis=-len(norm.axes), epsilon=norm.epsilon)
    graph.substitute(norm.output, *before, node, *after)
    return None


def _last(where: Frame) -> list[int]:
    """The permutation that brings the normalised axes to the end; [] if they are there."""
    if where.trailing or where.rank is None:
        return []
    return [i for i in range(where.rank) if i not in where.axes] + list(where.axes)


def _ones(graph: GraphEditor, norm: Norm, where: Frame) -> str:
    sizes = [s for s in where.sizes if s is not None]
    if len(sizes) != len(where.axes):
        raise _UnknownSizeError(
            "it has no scale, and a scale of ones needs the sizes of its axes, which are not known"
        )
    return graph.add_constant(f"{norm.output}/scale", np.ones(sizes), like=norm.input)


def _shaped(graph: GraphEditor, tensor: str, where: Frame) -> str:
    """A scale or bias with exactly the shape of the normalised axes: `tensor` itself if it has it."""
    known = weight(graph, tensor)
    if known is None:
        return tensor
    value, rank = unrepeated(known[0], where), where.rank or len(where.axes)
    whole = (1,) * (rank - value.ndim) + value.shape
    own = [whole[a] for a in where.axes]
    sizes = [d if s is None and d > 1 else s for d, s in zip(own, where.sizes, strict=True)]
    target = [s for s in sizes if s is not None]
    if len(target) != len(sizes):
        raise _UnknownSizeError(f"{tensor} is broadcast along an axis whose size is not known")
    if list(known[0].shape) == target:
        return tensor
    return graph.add_constant(f"{tensor}/normalised", np.broadcast_to(value.reshape(own), target).copy())
