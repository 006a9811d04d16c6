"""merge-projections: products of one tensor by several weights become one product, cut into heads at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.base import Context, Event, Exactness, GraphPass, Merged, Refusal, Requires
from rewriter.graph import GraphEditor, attribute, constant_row, is_own, is_quantised, label
from rewriter.patterns.heads import Heads, find_heads, part_of
from rewriter.model import Array
from rewriter.graph.stored import EXCHANGEABLE

SIZES_AS_INPUT = 13
"""From opset 13 on Split takes its sizes as an input; before, as an attribute."""


@dataclass(frozen=True)
class MergeProjections(GraphPass):
    """TensorRT merges products of one tensor by itself, and then sums them in FP16 whatever reads them.

    Written as one product with one bias, they can have an FP32 epilogue (mixed-precision{epilogues=true}),
    which makes the kernel sum in FP32. Measured on one H200 with TensorRT-RTX 1.6.1: Q, K and V of 128 x 768
    had a relative error of 1.04e-3 apart, with FP32 biases, too, and 2.1e-4 merged with one FP32 bias, in
    10.3 and 10.6 us; of 1500 rows 20.2 and 20.8 us; of 197 x 384 7.7e-4 and 2.1e-4 in 10.9 and 11.3 us. Gate
    and up of a SwiGLU (128 x 2048 by 5632 each): 1.49e-3 and 2.2e-4, in 52.5 and 40.0 us. Without an FP32
    bias one product is as wrong as three.

    A group is all MatMul and Gemm nodes of one graph that multiply one tensor by a constant 2-D weight. It
    becomes MatMul, Add and Split; the results keep their names. A constant bias that alone reads a product
    becomes a part of the one bias. Where none has one, it is zeros all the same: the epilogue needs an Add.

    Where a Reshape to [batch, length, heads, size] alone reads each result, with one size for all, one
    Reshape stands before the Split, which counts heads then: TensorRT moves Q, K and V in one kernel, where a
    Split of columns takes three of some 5 us. Three layers of attention took 66.6 us so, 75.8 us with a Split
    of columns and 75.1 us apart (ViT-B); 49.1, 58.0 and 58.8 us (BERT); 51.8, 59.3 and 46.7 us (T5, no
    biases); 106.4, 106.7 and 103.8 us (Whisper, 1500 tokens). A Mul by one number before such a Reshape moves
    behind it, which is bit-equal. Computed targets need shape inference that knows them. For other results,
    and where --keep-fp32 or --keep-fp32-op names what would go or move, the Split counts columns.

    All results are made at once and live until their last reader: with one state that every layer projects
    (a decoder's cross-attention, a time embedding), those of all layers. Members share one range, and one
    exponent of `rescale`: it stands behind `rescale`, which can save one member that overflows, and before
    `mixed-precision`, which keeps all of them in FP32 where one cannot be saved. The merged weights are
    held in memory until they are lowered, those of external data, too.

    Declines:
        - a group in which --keep-fp32, --keep-fp32-op or an edited plan names a member or its bias
        - weights that are quantised, or that belong to a graph around this one
        - Gemm with alpha or beta other than 1, a transposed A, or a C that is computed or no row
        - a model below opset 11
    """

    name = "merge-projections"
    requires = Requires(opset=11, after=("rescale",))  # from there on Split counts its axis from the end
    exactness = Exactness(
        1e-5, "ONNX Runtime may block the same sums otherwise: 6.5e-7 measured on a UNet, 0 on nine others"
    )
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3,2] x) => (float[1,3,2,1] q, float[1,3,1,1] k)
        <float[2,2] wq = {1.0, 2.0, 3.0, 4.0}, float[2,1] wk = {0.5, 0.25}, float[2] bias = {0.1, 0.2},
         int64[4] two = {1, 3, 2, 1}, int64[4] one = {1, 3, 1, 1}> {
            product = MatMul(x, wq)
            biased = Add(product, bias)
            q = Reshape(biased, two)
            other = MatMul(x, wk)
            k = Reshape(other, one)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,3,2] x) => (float[1,3,2,1] q, float[1,3,1,1] k)
        <float[2,3] weight = {1.0, 2.0, 0.5, 3.0, 4.0, 0.25}, float[3] bias = {0.1, 0.2, 0.0},
         int64[4] all = {1, 3, 3, 1}, int64[2] heads = {2, 1}> {
            product = MatMul(x, weight)
            biased = Add(product, bias)
            cut = Reshape(biased, all)
            q, k = Split<axis = -2>(cut, heads)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = _Weights(graph)
        for group in _groups(graph):
            members = [product for product in group if product.obstacle is None]
            yield from (Refusal(label(p.node), p.obstacle) for p in group if p.obstacle is not None)
            if len(members) > 1:
                reason = _reason_against(graph, context, members)
                what = members[0].node
                yield Refusal(label(what), reason) if reason else _merge(graph, context, members, weights)


@dataclass(frozen=True)
class _Product:
    """A product by a constant weight.

    Attributes:
        end: The node whose result is handed on: the product's own, or that of the Add of its bias.
        transposed: Whether the weight is [columns, depth].
        bias: In the shape [columns]; None if there is none.
        obstacle: Why it cannot be merged.
    """

    node: NodeProto
    end: NodeProto
    transposed: bool = False
    columns: int = 0
    bias: Array | None = None
    obstacle: str | None = None


def _groups(graph: GraphEditor) -> list[list[_Product]]:
    """Products of one tensor, in the order of the graph; a tensor with one alone has no group."""
    groups: dict[str, list[_Product]] = {}
    for node in graph.nodes:
        product = _product(graph, node)
        if product is not None:
            groups.setdefault(node.input[0], []).append(product)
    return [group for group in groups.values() if len(group) > 1]


def _product(graph: GraphEditor, node: NodeProto) -> _Product | None:
    if node.op_type not in {"MatMul", "Gemm"} or node.domain not in {"", "ai.onnx"}:
        return None
    if graph.constant(node.input[0]) is not None:
        return None
    if is_quantised(graph, node.input[1]):
        return _Product(node, node, obstacle="its weight is quantised: TensorRT runs it so")
    weight = graph.constant(node.input[1])
    if weight is None or weight.ndim != 2 or not weight.size:
        return None
    if helper.np_dtype_to_tensor_dtype(weight.dtype) not in EXCHANGEABLE:
        return None
    if not is_own(graph, node.input[1]):
        return _Product(node, node, obstacle="its weight belongs to a graph around it, and would be copied")
    transposed = node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
    columns = weight.shape[0 if transposed else 1]
    return _with_bias(graph, _Product(node, node, transposed, columns))


def _with_bias(graph: GraphEditor, product: _Product) -> _Product:
    """The product with its C, or else with the bias that alone reads it."""
    node, columns = product.node, product.columns
    if node.op_type == "Gemm":
        if attribute(node, "alpha", 1.0) != 1 or attribute(node, "beta", 1.0) != 1:
            return _refused(product, "its alpha or beta is not 1")
        if attribute(node, "transA", 0):
            return _refused(product, "it transposes what it multiplies")
        if len(node.input) > 2 and node.input[2]:
            row = constant_row(graph, node.input[2], columns, rank=2)
            if row is None:
                return _refused(product, f"its C, {node.input[2]}, is no constant row")
            return _Product(node, node, product.transposed, columns, row)
    add = graph.only_consumer(node.output[0])
    if add is None or add.op_type != "Add" or add.input[0] == add.input[1]:
        return product
    other = add.input[1 if add.input[0] == node.output[0] else 0]
    row = constant_row(graph, other, columns, graph.rank(node.output[0]))
    return product if row is None else _Product(node, add, product.transposed, columns, row)


def _refused(product: _Product, reason: str) -> _Product:
    return _Product(product.node, product.node, obstacle=f"it is not merged with its siblings: {reason}")


def _reason_against(graph: GraphEditor, context: Context, members: list[_Product]) -> str | None:
    for member in members:
        for node in (member.node, member.end):
            option = next(context.kept.options(node), None)
            if option is not None:
                others = f"{len(members)} products of {member.node.input[0]} stay apart"
                return f"{others}: {label(node)} is kept in FP32 by {option}"
    return None


class _Weights:
    """The merged constants of one graph: layers that share their weights share the merged ones, too."""

    def __init__(self, graph: GraphEditor) -> None:
        self._graph = graph
        self._weights: dict[tuple[tuple[str, bool], ...], str] = {}

    def weight(self, members: list[_Product]) -> str:
        """Name of the constant [depth, sum of columns]."""
        key = tuple((m.node.input[1], m.transposed) for m in members)
        if key not in self._weights:
            values = [self._graph.constant(name) for name, _ in key]
            parts = [v.T if t else v for v, (_, t) in zip(values, key, strict=True) if v is not None]
            merged = np.concatenate(parts, axis=1)
            self._weights[key] = self._graph.add_constant(f"{key[0][0]}/merged", merged)
        return self._weights[key]

    def bias(self, members: list[_Product], dtype: np.dtype[np.generic]) -> str:
        """Name of the constant [sum of columns], with zeros where a member has no bias."""
        rows = [np.zeros(m.columns, dtype) if m.bias is None else m.bias for m in members]
        base = f"{members[0].node.input[1]}/merged/bias"
        return self._graph.add_constant(base, np.concatenate(rows))


def _merge(graph: GraphEditor, context: Context, members: list[_Product], weights: _Weights) -> Merged:
    first = members[0].node
    data, name = first.input[0], f"{label(first)}/merged"
    weight = weights.weight(members)
    dtype = helper.tensor_dtype_to_np_dtype(graph.dtype(weight) or TensorProto.FLOAT)
    bias = weights.bias(members, dtype)
    like = graph.dtype(weight)
    product = graph.tensor(f"{first.output[0]}/merged", dtype=like)
    biased = graph.tensor(f"{first.output[0]}/merged/biased", dtype=like)
    heads = _heads(graph, context, members)
    nodes = (
        graph.make("MatMul", [data, weight], [product], name=name),
        graph.make("Add", [product, bias], [biased], name=f"{name}/Add"),
        *(_split(graph, biased, members, name) if heads is None else _cut(graph, biased, heads, name)),
    )
    graph.insert(*nodes, before=first)
    for cut in heads.cuts if heads else ():
        graph.remove(cut.view)
    for member in members:
        graph.remove(member.end)
    total = sum(m.columns for m in members)
    names = ", ".join(label(m.node) for m in members[1:])
    form = f" in {sum(heads.counts)} heads" if heads else ""
    return Merged(label(first), f"one product of {data} with {names}: {total} columns{form}")


def _heads(graph: GraphEditor, context: Context, members: list[_Product]) -> Heads | None:
    """How all results are cut into heads; None if they are not, or if the user names what cuts them."""
    heads = find_heads(graph, [(m.end.output[0], m.columns) for m in members])
    behind = [node for cut in heads.cuts for node in cut.nodes] if heads else []
    return None if any(next(context.kept.options(node), None) for node in behind) else heads


def _cut(graph: GraphEditor, tensor: str, heads: Heads, name: str) -> tuple[NodeProto, NodeProto]:
    """Reshape and Split by heads; a scale that stood before a Reshape stands behind the Split."""
    dtype = graph.dtype(tensor)
    cut = graph.tensor(f"{tensor}/heads", dtype=dtype)
    outputs = [part_of(graph, one, dtype) for one in heads.cuts]
    target = graph.add_constant(f"{name}/shape", np.asarray(heads.target, np.int64))
    view = graph.make("Reshape", [tensor, target], [cut], name=f"{name}/Reshape")
    return view, _split_node(graph, cut, outputs, heads.counts, f"{name}/Split", axis=-2)


def _split(graph: GraphEditor, tensor: str, members: list[_Product], name: str) -> tuple[NodeProto]:
    outputs, sizes = [m.end.output[0] for m in members], [m.columns for m in members]
    return (_split_node(graph, tensor, outputs, sizes, f"{name}/Split", axis=-1),)


def _split_node(
    graph: GraphEditor, tensor: str, outputs: list[str], sizes: list[int], name: str, axis: int
) -> NodeProto:
    if graph.model.opset < SIZES_AS_INPUT:
        return graph.make("Split", [tensor], outputs, name=name, axis=axis, split=sizes)
    counts = graph.add_constant(f"{name}/sizes", np.asarray(sizes, np.int64))
    return graph.make("Split", [tensor, counts], outputs, name=name, axis=axis)
