"""Where a model starts to go wrong, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

JUMP = 3.0
"""Growth of the error from one step to the next that is worth a word."""


@dataclass(frozen=True)
class Step:
    """A tensor with its error against the original in FP32.

    Attributes:
        tensor: Its name in the other model; `node`, `op`: what makes it.
        error: Relative L2, infinite for NaN and infinity; None where it could not be measured: `note`.
        added: What its node adds by itself on exact inputs, where an emulation tells it.
    """

    tensor: str
    node: str
    op: str
    error: float | None
    added: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Location:
    """Where `other` leaves `original`.

    Attributes:
        engine: What ran the other model, with its device.
        tolerance: Errors above it are wrong.
        outputs: The model's outputs with their errors.
        first: The first wrong tensor; None if no output is wrong, or the models share no float tensor that
            leads to one that is (the order of a TopK, say).
        exact: Whether all that `first` is computed from is right. If not, the fault is between `right`
            and `first`.
        right: What is right just before it.
        chain: From `first` to the worst output.
        hiding: Tensors between that could not be looked at, with the reason: marking them as outputs
            changes what is computed, so they are inside the fusion that goes wrong.
        tensors: How many tensors were compared or could have been.
        builds, discarded: Builds of the search, and how many of them changed the outputs.
        spread: Largest difference of two builds without marks, relative L2.
        moved: Largest difference that marks made in the builds that counted.
    """

    engine: str
    tolerance: float
    outputs: tuple[Step, ...]
    first: Step | None = None
    exact: bool = True
    right: tuple[Step, ...] = ()
    chain: tuple[Step, ...] = ()
    hiding: tuple[Step, ...] = ()
    tensors: int = 0
    builds: int = 0
    discarded: int = 0
    spread: float = 0.0
    moved: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Step, ...]:
        """The outputs that are further than the tolerance from the original."""
        return tuple(s for s in self.outputs if s.error is None or not s.error <= self.tolerance)

    @property
    def jump(self) -> Step | None:
        """The step of the chain after the first over which the error grows most, if it grows much."""
        measured = [(s, s.error) for s in self.chain if s.error is not None]
        grown = [
            (after / before, step)
            for (_, before), (step, after) in pairwise(measured)
            if before > 0 and math.isfinite(before)
        ]
        growth, step = max(grown, key=lambda pair: pair[0], default=(0.0, None))
        return step if growth >= JUMP else None
