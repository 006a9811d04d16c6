"""One model of a batch, and what became of it: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Ending = Literal[
    "verified", "unchecked", "failed", "unbuildable", "refused", "crashed", "timed out", "not run"
]

"""`unchecked`: no check was asked for. `not run`: of a GPU on which no engine ran."""

PASSED: tuple[Ending, ...] = ("verified", "unchecked")
FINISHED: tuple[Ending, ...] = (*PASSED, "failed", "unbuildable")
"""Endings that another run would repeat; the others may have had causes outside the model."""


@dataclass(frozen=True)
class Entry:
    """One model to fix.

    Attributes:
        name: Its path relative to the folder that was named, with `/`; it is unique in a batch.
        output: Where the fixed model goes.
        options: Arguments of `rewriter.fix` that the user set for it.
    """

    name: str
    model: Path
    output: Path
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a child process reported, or what its end says.

    Attributes:
        text: One sentence for people.
        fp32_nodes: Nodes that stay in FP32; `float_nodes`: all that could be in FP16; None without a plan.
        all_fp32: True if a repair left all of it in FP32.
        error: Relative L2 error of the worst output in the check that decides.
        seconds: Wall time of the process.
        peak_bytes: Its largest resident memory; 0 where the system does not report it.
        files: Names of the files that it made, relative to its folder.
    """

    ending: Ending
    text: str
    fp32_nodes: int | None = None
    float_nodes: int | None = None
    all_fp32: bool = False
    error: float | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    files: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every check that was asked for passed."""
        return self.ending in PASSED


@dataclass(frozen=True)
class Record:
    """The outcome of a model in this run or in an earlier one.

    Attributes:
        skipped: True if an earlier run finished it.
        verdicts: The verification on each type of GPU.
    """

    entry: Entry
    outcome: Outcome
    skipped: bool = False
    verdicts: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if the model passed, on every type of GPU that was asked for."""
        return self.outcome.passed and all(verdict.passed for verdict in self.verdicts.values())
