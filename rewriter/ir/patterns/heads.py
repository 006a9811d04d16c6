"""Products whose results are cut into attention heads, and the one Reshape that cuts all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.graph.match import consumed, other_operand
from rewriter.ir.model.facts import Shape

RANK = 4
"""Axes of a result in heads, [batch, length, heads, size]: others were not measured (docs/accuracy.md)."""

Target = tuple[int, ...]
"""Entries of a Reshape's target: a size, 0 (that of its input's axis), or -1 (not known)."""


@dataclass(frozen=True)
class Cut:
    """The nodes that cut one result [.., heads * size] into [*rows, heads, size].

    Attributes:
        view: The Reshape.
        scale: The Mul by one number between the result and the Reshape; None if there is none.
        rows: Entries for the axes before the heads.
        heads, size: Known, and together the columns of the result.
    """

    view: NodeProto
    scale: NodeProto | None
    rows: Target
    heads: int
    size: int

    @property
    def nodes(self) -> list[NodeProto]:
        """The consumers of the result that are moved or removed."""
        return [self.view] if self.scale is None else [self.scale, self.view]


@dataclass(frozen=True)
class Heads:
    """One Reshape to [*rows, sum of heads, size] in place of one for each result.

    Attributes:
        cuts: One for each result, all of one size.
        rows: Entries for the axes before the heads, which hold for all.
    """

    cuts: tuple[Cut, ...]
    rows: Target

    @property
    def counts(self) -> list[int]:
        return [cut.heads for cut in self.cuts]

    @property
    def target(self) -> list[int]:
        """The second input of the Reshape: at most one -1, and 0 for an axis that stays."""
        return [*self.rows, sum(self.counts), self.cuts[0].size]


def find_heads(graph: GraphEditor, results: Sequence[tuple[str, int]]) -> Heads | None:
    """The common cut into heads of the results of products of one tensor; None if there is none.

    Args:
        results: Tensors [.., columns] and their columns, the only axis in which they differ.
    """
    cuts: list[Cut] = []
    for tensor, columns in results:
        cut = _cut(graph, tensor, columns)
        if cut is None or cut.size != (cuts or [cut])[0].size:
            return None
        cuts.append(cut)
    rows = _common_rows([cut.rows for cut in cuts])
    return None if rows is None else Heads(tuple(cuts), rows)


def part_of(graph: GraphEditor, cut: Cut, dtype: int | None) -> str:
    """The tensor that a Split writes for this result: that of the Reshape, or the new input of the scale.

    The scale then writes the Reshape's result; the caller removes the Reshape.

    Args:
        dtype: The element type of the result (TensorProto.DataType).
    """
    scale, result = cut.scale, cut.view.output[0]
    if scale is None:
        return result
    index = 0 if graph.constant(scale.input[0]) is None else 1
    part = graph.tensor(f"{scale.input[index]}/heads", dtype=dtype)
    graph.rename(scale.output[0], result)
    graph.set_input(scale, index, part)
    return part


def _cut(graph: GraphEditor, tensor: str, columns: int) -> Cut | None:
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
    return Cut(view, scale, tuple(rows), heads, size) if fits else None


def _filled(target: Target, before: Shape, columns: int) -> Target:
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


def _target(graph: GraphEditor, view: NodeProto, before: Shape | None) -> Target | None:
    """The shape that a Reshape gives, as far as it is known, from its target and from shape inference.

    Args:
        before: The shape of what it reads.
    """
    written, inferred = graph.constant(view.input[1]), graph.shape(view.output[0])
    entries = [-1] * RANK if written is None else [int(entry) for entry in written.reshape(-1)]
    sizes = (None,) * len(entries) if inferred is None else inferred
    if len(entries) != RANK or len(sizes) != RANK or (attribute(view, "allowzero", 0) and 0 in entries):
        return None
    old = () if before is None else before[:-1]  # its last axis is the columns
    return tuple(_entry(entry, sizes[i], old[i : i + 1]) for i, entry in enumerate(entries))


def _entry(written: int, size: int | str | None, old: Shape) -> int:
    """One axis: its size where that is known, 0 where it is the one of what is read, or else -1.

    Args:
        old: That axis, as (size,); () if there is none at its place.
    """
    if written > 0 or isinstance(size, int):
        return written if written > 0 else int(size or -1)
    return 0 if old and (written == 0 or (isinstance(size, str) and size == old[0])) else -1


def _common_rows(found: Sequence[Target]) -> Target | None:
    """The entries that all targets share for the axes before the heads.

    All results have equally many rows: one axis on which they differ follows from the others.
    """
    rows = tuple(entries[0] if len(set(entries)) == 1 else -1 for entries in zip(*found, strict=True))
    return rows if rows.count(-1) <= 1 else None
