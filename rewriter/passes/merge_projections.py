"""merge-projections: merges products of one tensor by several weights, and splits the result by heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, constant_row, display_name, is_op, is_quantised
from rewriter.ir.graph.match import consumed, optional_input, other_operand
from rewriter.ir.graph.ops import PRODUCTS
from rewriter.ir.graph.weights import NewWeights, Replacement, gemm_obstacle, is_transposed, layout_obstacle
from rewriter.ir.model import Array
from rewriter.ir.model.schemas import NUMPY_TYPES
from rewriter.ir.model.tensors import Shape
from rewriter.ir.plan import NodePatterns
from rewriter.passes.base import Change, Context, Event, Exactness, Refusal, Requires, WeightPass, refused

RANK = 4
"""Axes of a result in heads, [batch, length, heads, size]: others were not measured (docs/accuracy.md)."""

_Target = tuple[int, ...]
"""Entries of a Reshape's target: a size, 0 (the size of its input's axis), or -1 (not known)."""


@dataclass(frozen=True)
class MergeProjections(WeightPass):
    """TensorRT itself merges products of one tensor, and then sums them in FP16 whatever reads them.

    As one product with one bias they can have an FP32 epilogue (`mixed-precision{epilogues=all}`), and the
    kernel sums in FP32. Q, K and V then have a fifth of the error at the same speed
    (docs/accuracy.md#products-of-one-tensor). Without any bias zeros are added: the epilogue needs an Add.

    If every result only goes through a Reshape to [batch, length, heads, size] with one size, a single
    Reshape comes before the Split, and the Split counts heads. TensorRT then moves Q, K and V in one kernel
    instead of three. A Mul by one number before such a Reshape moves after it. In all other cases, and where
    the user keeps a node that would be removed or moved, the Split counts columns.

    The results share one range and one exponent. So the pass runs after `rescale`, which can save one that
    overflows, and before `mixed-precision`, which keeps all of them in FP32 if one cannot be saved.

    Without an FP32 epilogue, only heads of short sequences gain: 4 to 8 % of five drawn networks of 64 to 196
    tokens on an H200. With 470 tokens, or where the Split counts columns, the move costs 2 to 3 %
    (benchmarks/README.md#population), so the default preset has `longest=256`.

    Options:
        longest: Longest sequence whose products are merged, and only where they are cut into heads; 0: all.

    Declines:
        - with `longest`, results that are not cut into heads, and longer or unknown sequences
        - Gemm with alpha or beta other than 1, a transposed A, or a C that is computed or no row
    """

    longest: int = 0

    requires = Requires(opset=13)  # from there on Split takes its sizes as an input
    exactness = Exactness(1e-5, "ONNX Runtime may order sums differently: 6.5e-7 measured on a UNet")
    example = """
         g (float[1,3,2] x) => (float[1,3,2,1] q, float[1,3,1,1] k)
        -<float[2,2] wq, float[2,1] wk, float[2] bias, int64[4] two = {1, 3, 2, 1},
        - int64[4] one = {1, 3, 1, 1}> {
        -    product = MatMul(x, wq)
        +<float[2,3] weight, float[3] bias, int64[4] all = {1, 3, 3, 1}, int64[2] heads = {2, 1}> {
        +    product = MatMul(x, weight)
             biased = Add(product, bias)
        -    q = Reshape(biased, two)
        -    other = MatMul(x, wk)
        -    k = Reshape(other, one)
        +    cut = Reshape(biased, all)
        +    q, k = Split<axis = -2>(cut, heads)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        weights = NewWeights(graph)
        for group in _groups(graph):
            members = [product for product in group if product.obstacle is None]
            yield from (Refusal(display_name(p.node), p.obstacle) for p in group if p.obstacle is not None)
            if len(members) > 1:
                first = members[0].node
                reason = context.kept.reason(*(node for m in members for node in (m.node, m.end)))
                apart = f"{len(members)} products of {first.input[0]} stay apart"
                reason = reason or self._too_long(graph, context.kept, members)
                yield refused(first, apart, reason) or _merge(graph, context.kept, members, weights)

    def _too_long(self, graph: GraphEditor, kept: NodePatterns, members: list[_Product]) -> str | None:
        """Why moving the results costs more than the merged product saves; None if it does not."""
        if not self.longest:
            return None
        if _heads(graph, kept, members) is None:
            return "their results are not cut into heads"
        shape = graph.shape(members[0].node.input[0])
        length = shape[-2] if shape is not None and len(shape) > 1 else None
        if isinstance(length, int) and length <= self.longest:
            return None
        return f"the sequence is {'of unknown length' if length is None else f'longer than {self.longest}'}"


@dataclass(frozen=True)
class _Product:
    """A product by a constant weight."""

    node: NodeProto
    end: NodeProto  # the node that writes the result: the product itself, or the Add of its bias
    columns: int = 0
    bias: Array | None = None  # shape [columns]; None if there is none
    obstacle: str | None = None  # why it cannot be merged


def _groups(graph: GraphEditor) -> list[list[_Product]]:
    """Returns the products of each tensor that has several, in the order of the graph."""
    groups: dict[str, list[_Product]] = {}
    for node in graph.nodes:
        if (product := _product(graph, node)) is not None:
            groups.setdefault(node.input[0], []).append(product)
    return [group for group in groups.values() if len(group) > 1]


def _product(graph: GraphEditor, node: NodeProto) -> _Product | None:
    if not is_op(node, *PRODUCTS) or graph.constant(node.input[0]) is not None:
        return None
    weight = graph.constant(node.input[1])
    fits = weight is not None and weight.ndim == 2 and weight.size and weight.dtype in NUMPY_TYPES.values()
    if not fits and not is_quantised(graph, node.input[1]):
        return None
    if (obstacle := layout_obstacle(graph, node.input[1])) is not None:
        return _Product(node, node, obstacle=obstacle)
    columns = graph.value(node.input[1]).shape[0 if is_transposed(node) else 1]
    return _with_bias(graph, _Product(node, node, columns))


def _with_bias(graph: GraphEditor, product: _Product) -> _Product:
    """Returns the product with its C, or else with the bias that is its only consumer."""
    node, columns = product.node, product.columns
    c = optional_input(node, 2)
    row = constant_row(graph, c, columns, rank=2) if c else None
    obstacle = gemm_obstacle(node) or (f"its C, {c}, is no constant row" if c and row is None else None)
    if obstacle is not None:
        return replace(product, obstacle=f"it is not merged with its siblings: {obstacle}")
    if c:
        return replace(product, bias=row)
    add = consumed(graph, node.output[0], "Add")
    other = other_operand(add, node.output[0]) if add is not None else None
    if add is None or other is None:
        return product
    row = constant_row(graph, other, columns, graph.rank(node.output[0]))
    return product if row is None else replace(product, end=add, bias=row)


def _weight(members: list[_Product], weights: NewWeights) -> str:
    """Returns the name of the constant [depth, sum of columns]."""
    key = tuple((member.node.input[1], is_transposed(member.node)) for member in members)

    def joined() -> Array:
        values = ((weights.graph.value(name), transposed) for name, transposed in key)
        return np.concatenate([value.T if transposed else value for value, transposed in values], axis=1)

    return weights.made(key, f"{key[0][0]}/merged", joined)


def _bias(graph: GraphEditor, members: list[_Product]) -> str:
    """Returns the name of the constant [sum of columns], with zeros for members without a bias."""
    first = members[0].node.input[1]
    dtype = graph.value(first).dtype
    rows = [np.zeros(m.columns, dtype) if m.bias is None else m.bias for m in members]
    return graph.add_constant(f"{first}/merged/bias", np.concatenate(rows))


def _merge(graph: GraphEditor, kept: NodePatterns, members: list[_Product], weights: NewWeights) -> Change:
    first = members[0].node
    data, new, heads = first.input[0], Replacement(graph, first, "merged"), _heads(graph, kept, members)
    product = new.add("MatMul", [data, _weight(members, weights)], new.tensor("merged"), new.name)
    biased = new.add("Add", [product, _bias(graph, members)], new.tensor("merged/biased"))
    if heads is None:
        _split(new, biased, [m.end.output[0] for m in members], [m.columns for m in members], axis=-1)
    else:
        _cut(new, biased, *heads)
    for cut in heads[0] if heads else ():
        graph.remove(cut.view)
    for member in members:
        graph.remove(member.end)
    total = sum(m.columns for m in members)
    names = ", ".join(display_name(m.node) for m in members[1:])
    form = f" in {sum(cut.heads for cut in heads[0])} heads" if heads else ""
    return Change(display_name(first), f"one product of {data} with {names}: {total} columns{form}")


@dataclass(frozen=True)
class _Cut:
    """The nodes that cut one result [.., heads * size] into [*rows, heads, size]."""

    view: NodeProto
    scale: NodeProto | None  # the Mul by one number between the result and the Reshape
    rows: _Target  # entries for the axes before the heads
    heads: int  # known, and with `size` the columns of the result
    size: int


def _heads(
    graph: GraphEditor, kept: NodePatterns, members: list[_Product]
) -> tuple[list[_Cut], _Target] | None:
    """The cuts of all results into heads of one size, and the entries of the axes before the heads.

    None if the results are not cut, or if the user keeps one. All results have equally many rows: one axis
    on which their targets differ follows from the others.
    """
    cuts = [_cut_of(graph, member.end.output[0], member.columns) for member in members]
    alike = [cut for cut in cuts if cut is not None and cut.size == (cuts[0] or cut).size]
    moved = [node for cut in alike for node in (cut.scale, cut.view) if node is not None]
    if len(alike) < len(members) or kept.reason(*moved) is not None:
        return None
    rows = tuple(row[0] if len(set(row)) == 1 else -1 for row in zip(*(c.rows for c in alike), strict=True))
    return (alike, rows) if rows.count(-1) <= 1 else None


def _cut_of(graph: GraphEditor, tensor: str, columns: int) -> _Cut | None:
    scale = _scale(graph, tensor)
    view = consumed(graph, tensor if scale is None else scale.output[0], "Reshape")
    if view is None:
        return None
    before = graph.shape(tensor)
    target = _target(graph, view, before)
    if target is None:
        return None
    *rows, heads, size = target if before is None else _filled(target, before, columns)
    # Heads and size make up the columns: then the axes before them hold what they held, in that order.
    fits = heads > 0 and size > 0 and heads * size == columns
    return _Cut(view, scale, tuple(rows), heads, size) if fits else None


def _filled(target: _Target, before: Shape, columns: int) -> _Target:
    """The target with heads or size from the other one, where all axes before them stay as they were."""
    *rows, heads, size = target
    stay = len(before) == RANK - 1 and all(row in (0, old) for row, old in zip(rows, before, strict=False))
    if not stay or max(heads, size) <= 0:
        return target
    return (*rows, heads if heads > 0 else columns // size, size if size > 0 else columns // heads)


def _scale(graph: GraphEditor, tensor: str) -> NodeProto | None:
    """The Mul by one number that is the only consumer of a tensor: it may be moved after a Reshape."""
    node = consumed(graph, tensor, "Mul")
    other = other_operand(node, tensor) if node is not None else None
    factor = graph.constant(other) if other is not None else None
    return node if factor is not None and factor.size == 1 and factor.ndim <= 1 else None


def _target(graph: GraphEditor, view: NodeProto, before: Shape | None) -> _Target | None:
    """The shape that a Reshape of a tensor of shape `before` gives, as far as target and inference tell."""
    written, inferred = graph.constant(view.input[1]), graph.shape(view.output[0])
    entries = [-1] * RANK if written is None else [int(entry) for entry in written.reshape(-1)]
    sizes = (None,) * len(entries) if inferred is None else inferred
    if len(entries) != RANK or len(sizes) != RANK or (attribute(view, "allowzero", 0) and 0 in entries):
        return None
    old = () if before is None else before[:-1]  # its last axis is the columns
    return tuple(_entry(entry, sizes[i], old[i : i + 1]) for i, entry in enumerate(entries))


def _entry(written: int, size: int | str | None, old: Shape) -> int:
    """One axis: its size if known, 0 if it equals the input's (`old`, of one axis or none), else -1."""
    if written > 0 or isinstance(size, int):
        return written if written > 0 else int(size or -1)
    return 0 if old and (written == 0 or (isinstance(size, str) and size == old[0])) else -1


def _cut(new: Replacement, tensor: str, cuts: list[_Cut], rows: _Target) -> None:
    """Adds a Reshape and a Split by heads; a scale before a Reshape moves after the Split."""
    graph, dtype = new.graph, new.graph.dtype(tensor)
    reshaped, counts = graph.tensor(f"{tensor}/heads", dtype=dtype), [cut.heads for cut in cuts]
    outputs = [_part(graph, cut, dtype) for cut in cuts]
    target = graph.add_ints(f"{new.name}/shape", *rows, sum(counts), cuts[0].size)
    new.add("Reshape", [tensor, target], reshaped)
    _split(new, reshaped, outputs, counts, axis=-2)


def _part(graph: GraphEditor, cut: _Cut, dtype: int | None) -> str:
    """The tensor that the Split writes for this result: the Reshape's, or the new input of the scale.

    The scale then writes the Reshape's result; the caller removes the Reshape.
    """
    scale, result = cut.scale, cut.view.output[0]
    if scale is None:
        return result
    index = 0 if graph.constant(scale.input[0]) is None else 1
    part = graph.tensor(f"{scale.input[index]}/heads", dtype=dtype)
    graph.rename(scale.output[0], result)
    graph.set_input(scale, index, part)
    return part


def _split(new: Replacement, tensor: str, outputs: list[str], sizes: list[int], axis: int) -> None:
    graph, name = new.graph, f"{new.name}/Split"
    counts = graph.add_ints(f"{name}/sizes", *sizes)
    graph.insert(graph.make("Split", [tensor, counts], outputs, name=name, axis=axis), before=new.node)
