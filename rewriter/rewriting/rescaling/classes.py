"""Exponents that have to be equal, merged into classes, and the equations that are left between them."""

from __future__ import annotations

from collections.abc import Iterable

ZERO = 0
"""The class whose exponent is 0: what cannot be scaled."""


class Classes:
    """A union-find forest over exponents, with linear equations that simplify as classes merge.

    An equation with one class left says that its exponent is 0, one with two opposite
    coefficients that two exponents are equal; both merge, and what that leads to merges, too. The
    smaller class joins the larger one, so the whole costs O(n log n).
    """

    def __init__(self) -> None:
        self._parent = [ZERO]
        self._size = [1]
        self._terms: list[dict[int, int]] = []
        self._touching: list[set[int]] = [set()]
        self._queue: list[int] = []

    def add(self) -> int:
        """A new exponent; returns its number."""
        self._parent.append(len(self._parent))
        self._size.append(1)
        self._touching.append(set())
        return len(self._parent) - 1

    def root(self, number: int) -> int:
        """The class of an exponent; `ZERO` if it is 0."""
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def relate(self, terms: Iterable[tuple[int, int]]) -> None:
        """Let the sum of coefficient times exponent be 0, over pairs of exponent and coefficient."""
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
        """Let an exponent be 0."""
        self._merge(self.root(number), ZERO)
        self._settle()

    def equations(self) -> list[dict[int, int]]:
        """What is left: coefficients by class, of three classes at least or two of unlike factors."""
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
