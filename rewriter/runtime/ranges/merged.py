"""Ranges of merged products and of views, derived from those of their parts without a run."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from onnx import GraphProto, NodeProto

from rewriter.ir.graph import made_by
from rewriter.ir.graph.ops import LAYOUTS
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.model.facts import FLOATS, Facts
from rewriter.ir.plan import Range
from rewriter.runtime.ranges import Ranges, constant_ranges

MADE = frozenset({"MatMul", "Add", "Reshape", "Split"})
"""Operators that merge-projections makes."""


def merged_ranges(model: Model, ranges: Ranges, tags: AbstractSet[str], facts: Facts) -> Ranges | None:
    """The ranges of `model`, given those of its products before the merge; None if they must be measured.

    The operand of a Split has the extremes of its parts, and the mean of their means. A part that only a
    scale reads has the range of the scaled part, divided by the scale. A view changes no value. A product
    before its bias has the extremes after it, minus those of the bias.

    Args:
        tags: Tags of the nodes that merges made, and passes that insert views.
        facts: Of `model`.
    """
    known = ranges.rescaled(())
    known.update(constant_ranges(model, known))
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        _through_views(scope, graph, known)
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
        made = (name for node in graph.node if made_by(node, tags) for name in node.output if name)
        if any((scope, name) not in known and _is_float(facts, scope, name) for name in made):
            return None
    return known


def _is_float(facts: Facts, scope: int, name: str) -> bool:
    found = facts.scopes[scope].get(name)
    return found is None or found.dtype in FLOATS


def _through_views(scope: int, graph: GraphProto, known: Ranges) -> None:
    """Gives the operand and the result of a view each other's range, where one of them has none."""
    views = [(node.input[0], node.output[0]) for node in graph.node if node.op_type in LAYOUTS]
    backward = [(result, operand) for operand, result in reversed(views)]
    for source, target in (*backward, *views):
        found = known.get((scope, source))
        if found is not None:
            known.setdefault((scope, target), found)


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
