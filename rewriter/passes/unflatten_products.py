"""unflatten-products: lets a matrix product between two Reshapes compute on all axes instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Kept, Requires, refused
from rewriter.ir.graph import GraphEditor, is_op, is_own, label
from rewriter.ir.graph.match import consumed, optional_input, produced
from rewriter.ir.graph.ops import PRODUCTS
from rewriter.ir.graph.weights import NewWeights, float_matrix, gemm_obstacle, is_transposed, row_obstacle
from rewriter.ir.model.facts import Shape

Views = dict[tuple[str, tuple[int, ...]], str]
"""Reshaped data, by the tensor that was reshaped and its new shape."""


@dataclass(frozen=True)
class UnflattenProducts(GraphPass):
    """A Reshape between a product and its elementwise operators keeps the product from summing in FP32.

    Gemm has two axes, and so has the MatMul that Keras writes for a Dense layer. Exporters join the leading
    axes of [batch, length, depth] before it and split them again after it. A MatMul takes any number of
    axes: the Reshape after it is removed, and the C of a Gemm becomes an Add. The Reshape before it is
    removed, too, if it only joined those axes; otherwise it joins fewer. The elementwise operators then
    follow the product directly, and `mixed-precision{epilogues=true}` can keep them in FP32. The arithmetic
    is the same. Figures of a GPT-2 are in docs/accuracy.md.

    Skipped without a report: products without a Reshape on either side, a Reshape that also splits the last
    axis, empty tensors, products with other consumers, computed weights.

    Declines:
        - a result with more than one unknown size: export the model with a fixed length
        - a product that --keep-fp32, --keep-fp32-op or an edited plan names
        - Gemm with alpha or beta other than 1, a transposed A, or a C that is computed or no row
        - a transposed weight that belongs to an enclosing graph, or that is also the table of a Gather
    """

    name = "unflatten-products"
    requires = Requires(opset=7)  # from there on Add broadcasts a row over any number of axes
    exactness = Exactness(1e-5, "ONNX Runtime may order the same sums differently, and adds C after them")
    before = """
        g (float[1,3,2] x) => (float[1,3,2] y)
        <int64[2] flat = {3, 2}, float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2] b = {0.5, 0.25},
         int64[3] back = {1, 3, 2}> {
            rows = Reshape(x, flat)
            product = Gemm(rows, w, b)
            y = Reshape(product, back)
        }"""
    after = """
        g (float[1,3,2] x) => (float[1,3,2] y)
        <float[2,2] w = {1.0, 2.0, 3.0, 4.0}, float[2] b = {0.5, 0.25}> {
            product = MatMul(x, w)
            y = Add(product, b)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights, views = NewWeights(graph), Views()
        for node in graph.nodes:
            found = _flattened(graph, node)
            if found is not None:
                reason = _reason_against(graph, found, context.kept)
                refusal = refused(node, "it stays between Reshapes", reason)
                yield refusal or _write(graph, found, weights, views)


@dataclass(frozen=True)
class _Flattened:
    """A product whose leading axes are joined before and split again after it.

    Attributes:
        before, after: The Reshapes.
        target: What the product is to read, -1 for a size that is not known; None: what `before` reads.
        columns: Size of its last axis.
        ambiguous: Whether more than one size is not known.
    """

    node: NodeProto
    before: NodeProto
    after: NodeProto
    target: tuple[int, ...] | None
    columns: int
    ambiguous: bool = False

    @property
    def transposed(self) -> bool:
        return is_transposed(self.node)

    @property
    def c(self) -> str:
        """The third input of a Gemm; "" if there is none."""
        return optional_input(self.node, 2)


def _flattened(graph: GraphEditor, node: NodeProto) -> _Flattened | None:
    if not is_op(node, *PRODUCTS):
        return None
    before = produced(graph, node.input[0], "Reshape", "Flatten")
    after = consumed(graph, node.output[0], "Reshape")
    if before is None or graph.rank(node.input[0]) != 2:
        return None
    if after is None or after.input[0] != node.output[0]:
        return None
    weight = float_matrix(graph, node.input[1])
    if weight is None:
        return None
    depth, columns = weight.shape[::-1] if is_transposed(node) else weight.shape
    split = graph.shape(after.output[0])
    if split is None or len(split) < 3 or split[-1] != columns:
        return None
    given, wanted = graph.shape(before.input[0]), (*split[:-1], depth)
    if 0 in wanted or 0 in (given or ()):
        return None
    if _says_as_much(given, wanted):
        return _Flattened(node, before, after, None, columns)
    target = tuple(size if isinstance(size, int) else -1 for size in wanted)
    return _Flattened(node, before, after, target, columns, ambiguous=target.count(-1) > 1)


def _says_as_much(given: Shape | None, wanted: Shape) -> bool:
    """True if a tensor already has the wanted shape and none of its sizes is less known.

    One size may be unknown on both sides: it follows from the others.
    """
    if given is None or len(given) != len(wanted):
        return False
    differing = [pair for pair in zip(given, wanted, strict=True) if None in pair or pair[0] != pair[1]]
    return not differing or (len(differing) == 1 and not isinstance(differing[0][1], int))


def _reason_against(graph: GraphEditor, found: _Flattened, kept: Kept) -> str | None:
    node = found.node
    around = (found.before, node, found.after)
    if (reason := kept.reason(*around)) is not None:
        return reason
    if found.ambiguous:
        return "more than one size of its result is unknown: export the model with a fixed length"
    if (obstacle := gemm_obstacle(node) or row_obstacle(graph, node, found.columns)) is not None:
        return obstacle
    if found.transposed and not is_own(graph, node.input[1]):
        return "its weight belongs to an enclosing graph, and would be copied"
    if found.transposed and any(reader.op_type == "Gather" for reader in graph.consumers(node.input[1])):
        return "its weight is also the table of a Gather, and would be stored twice"
    return None


def _write(graph: GraphEditor, found: _Flattened, weights: NewWeights, views: Views) -> Change:
    """Writes the product; products may share weights and views."""
    node, result = found.node, found.after.output[0]
    data = found.before.input[0] if found.target is None else _joined(graph, found, found.target, views)
    weight = node.input[1]
    if found.transposed:
        weight = weights.changed(weight, "transposed", np.transpose)
    name = f"{label(node)}/unflattened"
    product = graph.tensor(f"{node.output[0]}/unflattened", like=result) if found.c else result
    nodes = [graph.make("MatMul", [data, weight], [product], name=name)]
    if found.c:
        nodes.append(graph.make("Add", [product, found.c], [result], name=f"{name}/Add"))
    graph.substitute(result, *nodes)
    return Change(
        label(node), f"a product of {graph.rank(result)} axes in place of one of 2 between Reshapes"
    )


def _joined(graph: GraphEditor, found: _Flattened, target: tuple[int, ...], views: Views) -> str:
    """Returns the product's input in the shape that its result has."""
    source = found.before.input[0]
    if (source, target) not in views:
        base = found.node.input[0]
        wanted = graph.add_ints(f"{base}/unflattened/shape", *target)
        shape = tuple(None if size < 0 else size for size in target)
        tensor = views[source, target] = graph.tensor(f"{base}/unflattened", like=base, shape=shape)
        graph.insert(graph.make("Reshape", [source, wanted], [tensor]), before=found.node)
    return views[source, target]
