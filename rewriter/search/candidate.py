"""Candidates: the differences of a plan from the rules' plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """Nodes whose type differs from the rules' plan, by their keys; no node is in two of the sets.

    Attributes:
        added: Nodes moved to FP32.
        released: Nodes taken out of FP32.
        bf16: Nodes moved from FP32 to BF16.
    """

    added: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()
    bf16: frozenset[str] = frozenset()


def added(keys: Iterable[str]) -> Candidate:
    return Candidate(frozenset(keys))
