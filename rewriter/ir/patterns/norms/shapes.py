"""Shapes of statistics: what they meet when they are broadcast against the tensor they were made of."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor
from rewriter.ir.graph.match import produced
from rewriter.ir.patterns.expands import repeats_reshape
from rewriter.ir.patterns.norms.values import same_value


def is_aligned(graph: GraphEditor, statistic: str, tensor: str, axes: tuple[int, ...] | None) -> bool:
    """True if each element of a reshaped statistic meets the elements of `tensor` that it was made of.

    A Reshape keeps the number of elements, so one size may have a name that does not tell that it is equal.

    Args:
        axes: The reduced axes; () for all, None if they are computed.
    """
    have, want = graph.shape(statistic), graph.shape(tensor)
    if have is None or want is None or axes is None or len(have) != len(want):
        return False
    reduced = {axis % len(want) for axis in axes or range(len(want))}
    kept = [(h, w) for i, (h, w) in enumerate(zip(have, want, strict=True)) if i not in reduced]
    unequal = [(h, w) for h, w in kept if h is None or h != w]
    if all(have[i] == 1 for i in reduced):
        return len(unequal) <= 1 and not any(isinstance(h, int) and isinstance(w, int) for h, w in unequal)
    return not unequal and all(have[i] in {1, want[i]} - {None} for i in reduced)


def is_harmless(graph: GraphEditor, expand: NodeProto, tensor: str) -> bool:
    """True if an Expand of a statistic of `tensor` leaves it at most as large as `tensor`.

    Then each element meets the same elements of `tensor` as without the Expand.
    """
    if repeats_reshape(graph, expand) or _is_shape_of(graph, expand.input[1], tensor):
        return True
    shapes = (graph.shape(name) for name in (expand.output[0], expand.input[0], tensor))
    after, before, whole = (shape and shape[::-1] for shape in shapes)
    if after is None or before is None or whole is None or len(after) > len(whole):
        return False
    return all(
        size == 1 or (size is not None and size in {*before[i : i + 1], whole[i]})
        for i, size in enumerate(after)
    )


def _is_shape_of(graph: GraphEditor, target: str, tensor: str) -> bool:
    shape = produced(graph, target, "Shape")
    return shape is not None and not shape.attribute and same_value(graph, shape.input[0], tensor)
