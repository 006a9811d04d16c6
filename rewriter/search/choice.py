"""How a plan differs from the rules' one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """Nodes by their keys, each at most in one of the three.

    Attributes:
        added: In FP32, too.
        released: Not in FP32 any more.
        bf16: In BF16 instead of FP32.
    """

    added: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()
    bf16: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Group:
    """Nodes that are moved together: what a search on an engine tries as one.

    Attributes:
        words: For people, e.g. `Resize in FP32`.
    """

    words: str
    choice: Choice


def added(keys: Iterable[str]) -> Choice:
    return Choice(frozenset(keys))


def united(groups: Sequence[Group]) -> Choice | None:
    """All groups together; None if one would put into FP32 what another takes out of it."""
    choices = [group.choice for group in groups]
    whole = Choice(
        frozenset().union(*(c.added for c in choices)),
        frozenset().union(*(c.released for c in choices)),
        frozenset().union(*(c.bf16 for c in choices)),
    )
    return None if whole.released & (whole.added | whole.bf16) else whole
