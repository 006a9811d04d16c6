"""unfold-einsum: writes an Einsum that is a matrix product as MatMul."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal
from rewriter.ir.graph import GraphEditor, attribute, is_op, label
from rewriter.ir.patterns.einsum import Product, Size, merged, product_of, split


@dataclass(frozen=True)
class UnfoldEinsum(GraphPass):
    """torch.einsum and Flax write projections and attention as Einsum, which no rule about products knows.

    With MatMul, attention is recognised, sums in FP32 where that is free, and weights are rounded with the
    others. Transposes and Reshapes bring the axes in order; those of a constant are computed at once
    (docs/accuracy.md#as-flax-writes-it).

    Declines:
        - more or fewer than two operands, an ellipsis, a diagonal, a sum over one operand alone, an outer
          product
        - a label with two sizes, one of which is broadcast
        - axes to be merged of which more than one size is unknown
    """

    name = "unfold-einsum"
    exactness = Exactness(1e-6, "FP32 sums in another order: some ulps")
    before = """
        g (float[1,4,2,8] q, float[1,6,2,8] k) => (float[1,2,4,6] s) {
            s = Einsum<equation = "bqhd,bkhd->bhqk">(q, k)
        }"""
    after = """
        g (float[1,4,2,8] q, float[1,6,2,8] k) => (float[1,2,4,6] s) {
            heads = Transpose<perm = [0, 2, 1, 3]>(q)
            turned = Transpose<perm = [0, 2, 3, 1]>(k)
            s = MatMul(heads, turned)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if is_op(node, "Einsum"):
                product = product_of(attribute(node, "equation", ""))
                reason = _unfold(graph, node, product) if product else "it is no product of two matrices"
                yield Refusal(label(node), reason) if reason else Change(label(node), "became MatMul")


def _unfold(graph: GraphEditor, node: NodeProto, product: Product) -> str | None:
    """Replaces the Einsum; returns the reason against it, with the graph unchanged."""
    sizes = _sizes(graph, node, product)
    if sizes is None:
        return "one of its labels has two sizes"
    batch = len(product.batch)
    grouped = (product.rows, product.summed), (product.summed, product.columns)
    orders = [product.batch + "".join(groups) for groups in grouped]
    flat = [
        None if _fits(product, groups) else merged(order, sizes, batch, *groups)
        for order, groups in zip(orders, grouped, strict=True)
    ]
    result = product.batch + product.rows + product.columns
    is_split = not all(_fits(product, groups) for groups in grouped)
    target = split(sizes, batch, product.rows + product.columns) if is_split else None
    needed = [not _fits(product, groups) for groups in grouped]
    if any(need and to is None for need, to in zip(needed, flat, strict=True)) or (
        is_split and target is None
    ):
        return "the sizes of the axes to be merged are not known"
    nodes: list[NodeProto] = []
    labels = product.left, product.right
    operands = [
        _ordered(graph, name, _perm(given, order), to, nodes)
        for name, given, order, to in zip(node.input, labels, orders, flat, strict=True)
    ]
    _multiply(graph, node, operands, target, _perm(result, product.output), nodes)
    graph.substitute(node.output[0], *nodes)
    return None


def _sizes(graph: GraphEditor, node: NodeProto, product: Product) -> dict[str, Size] | None:
    """The sizes of the labels, as far as one of the operands shows them; None if they contradict."""
    found: dict[str, Size] = {}
    for name, labels in zip(node.input, (product.left, product.right), strict=True):
        for letter, size in zip(labels, graph.shape(name) or (), strict=False):
            if isinstance(size, int) and found.setdefault(letter, size) != size:
                return None
    return found


def _fits(product: Product, groups: tuple[str, str]) -> bool:
    """True if MatMul takes an operand of these axes as it is: rows of a Dense layer need not be merged."""
    rows, columns = groups
    dense_rows = product.is_dense and rows == product.rows and len(product.columns) == 1
    return len(columns) == 1 and (len(rows) == 1 or dense_rows)


def _perm(given: str, wanted: str) -> list[int]:
    return [given.index(letter) for letter in wanted]


def _ordered(
    graph: GraphEditor, name: str, perm: list[int], target: list[int] | None, nodes: list[NodeProto]
) -> str:
    """An operand with its axes in order, and merged to `target`; a constant is computed at once."""
    moves = perm != sorted(perm)
    value = graph.constant(name)
    if value is not None and (moves or target is not None):
        turned = np.ascontiguousarray(value.transpose(perm))
        whole = [turned.shape[i] if size == 0 else size for i, size in enumerate(target or turned.shape)]
        return graph.add_constant(f"{name}/product", turned.reshape(whole), like=name)
    if moves:
        result = graph.tensor(f"{name}/ordered", dtype=graph.dtype(name))
        nodes.append(graph.make("Transpose", [name], [result], perm=perm))
        name = result
    return _reshaped(graph, name, target, nodes)


def _reshaped(graph: GraphEditor, name: str, target: list[int] | None, nodes: list[NodeProto]) -> str:
    if target is None:
        return name
    result = graph.tensor(f"{name}/merged", dtype=graph.dtype(name))
    nodes.append(graph.make("Reshape", [name, graph.add_ints(f"{name}/target", *target)], [result]))
    return result


def _multiply(
    graph: GraphEditor,
    node: NodeProto,
    operands: list[str],
    target: list[int] | None,
    perm: list[int],
    nodes: list[NodeProto],
) -> None:
    """Adds the MatMul, and what brings its axes into the order of the result."""
    end, dtype = node.output[0], graph.dtype(node.output[0])
    moves = perm != sorted(perm)
    made = graph.tensor(f"{end}/product", dtype=dtype) if moves or target is not None else end
    nodes.append(graph.make("MatMul", operands, [made]))
    if target is not None:
        shaped = graph.tensor(f"{end}/split", dtype=dtype) if moves else end
        nodes.append(graph.make("Reshape", [made, graph.add_ints(f"{end}/target", *target)], [shaped]))
        made = shaped
    if moves:
        nodes.append(graph.make("Transpose", [made], [end], perm=perm))
