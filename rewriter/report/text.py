"""Many sentences about many nodes, made short enough to read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rewriter.base import Target

NAME_WIDTH = 32
"""Two parts of a path of modules, as a rule: enough to find the node in Netron."""

_LONG_NAME = re.compile(rf"[^\s,;()'\"]{{{NAME_WIDTH + 1},}}")
_NAME = re.compile(r"[^\s,;:()'\"]*[/_][^\s,;:()'\"]*")

Item = TypeVar("Item")


def about_target(target: Target) -> str:
    """The target, and where what is known of it comes from."""
    known = target.known_from or "nothing, so that its rules assume the worst"
    return f"Target: {target}; known of it by `rewriter probe`: {known}"


def shorten(text: str) -> str:
    """The text with long names cut at the front: `/encoder/layer.0/attn/MatMul` as `.../attn/MatMul`."""
    return _LONG_NAME.sub(lambda match: _tail(match[0]), text)


def _tail(name: str) -> str:
    tail = name[-(NAME_WIDTH - 3) :]
    cut = tail.find("/")
    return "..." + (tail[cut:] if cut >= 0 and len(tail) - cut > 1 else tail)


def grouped(items: Iterable[Item], text: Callable[[Item], str]) -> list[tuple[str, list[Item]]]:
    """Items whose texts differ in names alone, the largest group first.

    A group's text has `...` for the names, unless they are the same throughout.
    """
    groups: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups[_NAME.sub("...", text(item))].append(item)
    found = []
    for pattern, members in groups.items():
        texts = {text(member) for member in members}
        found.append((texts.pop() if len(texts) == 1 else pattern, members))
    return sorted(found, key=lambda group: -len(group[1]))


def listed(names: Sequence[str], most: int | None) -> str:
    """Names with commas, the first `most` of them."""
    shown = names[:most]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f", ... and {rest} more" if rest else "")
