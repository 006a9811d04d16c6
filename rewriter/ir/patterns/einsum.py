"""Einsums of two operands that are one batched matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Size = int | str | None


@dataclass(frozen=True)
class Product:
    """The labels of an Einsum as those of a product [*batch, *rows, *summed] x [*batch, *summed, *columns].

    Attributes:
        left, right, output: Labels as written, one letter for each axis.
    """

    left: str
    right: str
    output: str
    batch: str
    rows: str
    columns: str
    summed: str

    @property
    def is_dense(self) -> bool:
        """True if a MatMul by a matrix does it, however many rows there are: as in a Dense layer."""
        return not self.batch and len(self.summed) == 1


def product_of(equation: str) -> Product | None:
    """The product that an Einsum's equation describes.

    None for other than two operands, ellipses, diagonals, sums over one operand alone, and outer products.
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2 or "." in equation:
        return None
    left, right = operands
    if "->" not in equation:  # ONNX: the labels that occur once, in alphabetical order
        output = "".join(sorted(label for label in set(left + right) if (left + right).count(label) == 1))
    if any(len(set(labels)) != len(labels) for labels in (left, right, output)):
        return None
    shared = [label for label in left if label in right]
    batch = "".join(label for label in output if label in shared)
    summed = "".join(label for label in shared if label not in output)
    rows = "".join(label for label in output if label not in right)
    columns = "".join(label for label in output if label not in left)
    whole = (set(left), set(right)) == (set(batch + rows + summed), set(batch + summed + columns))
    if not summed or not rows or not columns or not whole:
        return None
    return Product(left, right, output, batch, rows, columns, summed)


def merged(labels: str, sizes: dict[str, Size], batch: int, *groups: str) -> list[int] | None:
    """The target of a Reshape that merges each of `groups` into one axis, after `batch` axes that stay.

    None if more than one of them has an unknown size.
    """
    assert len(labels) == batch + sum(map(len, groups))
    return _target(batch, [_size(sizes, group) for group in groups])


def split(sizes: dict[str, Size], batch: int, labels: str) -> list[int] | None:
    """The target of a Reshape that gives each of `labels` its axis again, after `batch` axes that stay."""
    return _target(batch, [_size(sizes, label) for label in labels])


def _target(batch: int, sizes: Sequence[int | None]) -> list[int] | None:
    if sum(size is None for size in sizes) > 1:
        return None
    return [0] * batch + [-1 if size is None else size for size in sizes]


def _size(sizes: dict[str, Size], labels: str) -> int | None:
    total = 1
    for label in labels:
        size = sizes.get(label)
        if not isinstance(size, int):
            return None
        total *= size
    return total
