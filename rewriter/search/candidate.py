"""Candidates: the differences of a plan from the rules' plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True)
class Group:
    """Nodes that a search on an engine moves together.

    Attributes:
        words: For people, e.g. `Resize in FP32`.
    """

    words: str
    candidate: Candidate


def added(keys: Iterable[str]) -> Candidate:
    return Candidate(frozenset(keys))


def united(groups: Sequence[Group]) -> Candidate | None:
    """Returns the union of the groups; None if one puts into FP32 what another takes out of it."""
    candidates = [group.candidate for group in groups]
    whole = Candidate(
        frozenset().union(*(c.added for c in candidates)),
        frozenset().union(*(c.released for c in candidates)),
        frozenset().union(*(c.bf16 for c in candidates)),
    )
    return None if whole.released & (whole.added | whole.bf16) else whole
