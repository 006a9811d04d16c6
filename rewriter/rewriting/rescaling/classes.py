"""Equivalence classes of tensors that scale together, and the linear equations between these classes."""

from __future__ import annotations

from collections.abc import Iterable

ZERO = 0
"""Class of all that cannot be scaled: its exponent is 0."""


class Classes:
    """Union-find forest over exponents, with linear equations that shrink as classes merge.

    An equation in one class makes its exponent 0. An equation in two classes with opposite coefficients
    makes them equal. Both merge classes, and merging may reduce further equations to these forms. The
    smaller class joins the larger one, so the whole costs O(n log n).
    """

    def __init__(self) -> None:
        self._parent = [ZERO]
        self._size = [1]
        self._terms: list[dict[int, int]] = []
        self._touching: list[set[int]] = [set()]
        self._queue: list[int] = []

    def add(self) -> int:
        """Returns the number of a new exponent."""
        self._parent.append(len(self._parent))
        self._size.append(1)
        self._touching.append(set())
        return len(self._parent) - 1

    def root(self, number: int) -> int:
        """Returns the class of an exponent; `ZERO` if it is fixed at 0."""
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def relate(self, terms: Iterable[tuple[int, int]]) -> None:
        """Add an equation over pairs (exponent, coefficient): the sum of their products is 0."""
        found: dict[int, int] = {}
        for number, coefficient in terms:
            root = self.root(number)
            if root != ZERO:
                found[root] = found.get(root, 0) + coefficient
        index = len(self._terms)
        self._terms.append({root: c for root, c in found.items() if c})
        for root in self._terms[index]:
            self._touching[root].add(index)
        self._queue.append(index)
        self._settle()

    def pin(self, number: int) -> None:
        """Fix an exponent at 0."""
        self._merge(self.root(number), ZERO)
        self._settle()

    def equations(self) -> list[dict[int, int]]:
        """The remaining equations, as coefficients by class: those that merge no classes."""
        return [terms for terms in self._terms if terms]

    def _settle(self) -> None:
        while self._queue:
            terms = self._terms[self._queue.pop()]
            if len(terms) == 1:
                self._merge(next(iter(terms)), ZERO)
            elif len(terms) == 2 and sum(terms.values()) == 0:
                self._merge(*terms)

    def _merge(self, a: int, b: int) -> None:
        if a == b:
            return
        keeps_b = b == ZERO or (a != ZERO and self._size[a] <= self._size[b])
        small, large = (a, b) if keeps_b else (b, a)
        self._parent[small] = large
        self._size[large] += self._size[small]
        for index in self._touching[small]:
            terms = self._terms[index]
            coefficient = terms.pop(small)
            if large != ZERO:
                terms[large] = terms.get(large, 0) + coefficient
                self._touching[large].add(index)
                if not terms[large]:
                    del terms[large]
                    self._touching[large].discard(index)
            self._queue.append(index)
        self._touching[small] = set()
