"""Where samples came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class DataSource:
    """Where samples came from.

    Attributes:
        text: The origin in one line.
        samples: Their number.
        real: False for generated samples.
        path: The file or folder that the user named; "" for objects in memory and generated samples.
        preprocess: How photographs became samples, as `image_preprocess`; "" for other data.
        names: Where the samples came from, file by file, in the order in which results are judged by them.
        spans: Smallest, first and largest shape by input, where known: builds with dynamic shapes use them.
    """

    text: str
    samples: int
    real: bool
    path: str = ""
    preprocess: str = ""
    spans: Mapping[str, tuple[Shape, Shape, Shape]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
