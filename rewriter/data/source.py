"""Where samples came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DataSource:
    """Where the samples came from. `real` is False for generated inputs; `text` says it in one line.

    `spans` holds the smallest, first and largest shape of each input, as far as they are known; a
    build with dynamic shapes wants them.
    """

    text: str
    samples: int
    real: bool
    spans: Mapping[str, tuple[Shape, Shape, Shape]] = field(default_factory=dict)
