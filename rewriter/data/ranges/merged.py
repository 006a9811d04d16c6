"""Ranges of the products that merge-projections makes, derived from those of the parts without a run."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from onnx import GraphProto, NodeProto

from rewriter.data.ranges import Ranges, constant_ranges
from rewriter.graph import made_by
from rewriter.model import Model, walk_graphs
from rewriter.plan import Range

MADE = frozenset({"MatMul", "Add", "Reshape", "Split"})
"""Operators that merge-projections makes."""


def merged_ranges(model: Model, ranges: Ranges, tags: AbstractSet[str]) -> Ranges | None:
    """The ranges of `model`, given those of its products before the merge; None if they must be measured.

    The operand of a Split has the extremes of its parts, and the mean of their means. A part that only a
    scale reads has the range of the scaled part, divided by the scale. A Reshape changes no value. A product
    before its bias has the extremes after it, minus those of the bias.

    Args:
        tags: Tags of the nodes that merges made.
    """
    known = ranges.rescaled(())
    known.update(constant_ranges(model, known))
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        readers = _only_readers(graph)
        for node in reversed(graph.node):
            if node.op_type not in MADE or not made_by(node, tags):
                continue
            for name in node.output:
                reader = None if (scope, name) in known else readers.get(name)
                found = known.get((scope, name)) if reader is None else _before(scope, name, reader, known)
                if found is None:
                    return None
                known[scope, name] = found
    return known


def _only_readers(graph: GraphProto) -> dict[str, NodeProto | None]:
    found: dict[str, NodeProto | None] = {}
    for node in graph.node:
        for name in node.input:
            found[name] = None if name in found else node
    return found


def _before(scope: int, name: str, reader: NodeProto, known: Ranges) -> Range | None:
    """The range of a tensor with the only reader `reader`, from the ranges of the reader's results."""
    results = [known.get((scope, out)) for out in reader.output]
    parts = [part for part in results if part is not None]
    if not parts or len(parts) != len(results):
        return None
    low, high = min(p.low for p in parts), max(p.high for p in parts)
    mean, finite = sum(p.mean_abs for p in parts) / len(parts), all(p.finite for p in parts)
    if reader.op_type in {"Split", "Reshape"}:
        return Range(low, high, mean, finite)
    other = known.get((scope, next((other for other in reader.input if other != name), "")))
    if other is None or reader.op_type not in {"Add", "Mul"}:
        return None
    if reader.op_type == "Mul":
        return _unscaled(parts[0], other)
    return Range(low - other.high, high - other.low, mean, finite)


def _unscaled(product: Range, factor: Range) -> Range | None:
    """The range of a tensor from its product with one number; None if that is 0."""
    if factor.low != factor.high or factor.low == 0:
        return None
    low, high = sorted((product.low / factor.low, product.high / factor.low))
    return Range(low, high, product.mean_abs / abs(factor.low), product.finite)
