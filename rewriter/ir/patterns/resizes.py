"""Scales of a Resize, and the conditions under which it is a known mean in each channel."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphView, attribute, label
from rewriter.ir.graph.match import optional_input
from rewriter.ir.model import Array
from rewriter.ir.model.facts import Shape

FIRST_OPSET = 11
"""First version in which Resize names its mapping of coordinates and has its scales as the third input."""

_ALIGNED = frozenset(
    {"align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel"}
)
"""Coordinate modes in which every weight is of an element of the tensor, and a scale of 1 changes nothing."""


def reason_against(graph: GraphView, resize: NodeProto) -> str:
    """The reason why a Resize or Upsample is no known mean in each channel; "" if it is one."""
    if graph.model.opset < FIRST_OPSET:
        needed = f"{label(resize)} names its mapping of coordinates from opset {FIRST_OPSET} on"
        return f"{needed}, the model has {graph.model.opset}: run upgrade-opset"
    mode = attribute(resize, "coordinate_transformation_mode", "half_pixel")
    if mode not in _ALIGNED:
        return f"{label(resize)} has coordinates by {mode}"
    if attribute(resize, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return f"{label(resize)} keeps the aspect ratio"
    return "" if scales_of(graph, resize) else f"how much {label(resize)} enlarges is not known"


def scales_of(graph: GraphView, resize: NodeProto) -> tuple[float, ...] | None:
    """The factor by which each axis grows; None if one is not known. For opset 11 and later."""
    before, after = graph.shape(resize.input[0]), graph.shape(resize.output[0])
    if before is None:
        return None
    if _has_sizes(resize):
        return _growth(before, after, _axes(resize, len(before)))
    axes, given = _axes(resize, len(before)), graph.constant(resize.input[2])
    if given is None or given.size != len(axes):
        return None
    named = dict(zip(axes, given.tolist(), strict=True))
    return tuple(float(named.get(axis, 1.0)) for axis in range(len(before)))


def inputs_for(graph: GraphView, resize: NodeProto, channels: int) -> Sequence[str | Array] | None:
    """The other inputs of the same Resize of a tensor with other channels: names, or a new constant.

    None if it has sizes for a batch that is not known. Its scales must be known (`scales_of`).
    """
    after = graph.shape(resize.output[0]) or ()
    axes = _axes(resize, len(after))
    if not _has_sizes(resize) or 1 not in axes:
        return list(resize.input[1:])
    sizes = [channels if axis == 1 else after[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return [resize.input[1], resize.input[2], np.asarray(sizes, np.int64)]


def _has_sizes(resize: NodeProto) -> bool:
    return bool(optional_input(resize, 3))


def _axes(resize: NodeProto, rank: int) -> list[int]:
    """The axes that the scales or sizes of a Resize belong to, in their order."""
    return [axis % rank for axis in attribute(resize, "axes", range(rank))]


def _growth(before: Shape, after: Shape | None, axes: Collection[int]) -> tuple[float, ...] | None:
    if after is None or len(after) != len(before):
        return None
    grown: list[float] = []
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if axis not in axes or (old is not None and old == new):
            grown.append(1.0)
        elif isinstance(old, int) and isinstance(new, int) and old > 0:
            grown.append(new / old)
        else:
            return None
    return tuple(grown)
