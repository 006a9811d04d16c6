"""The result of a closed loop, as plain data for the terminal, JSON, the page and callers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LoopEnding = Literal["as-original", "within-limit", "failed", "refused"]
"""`within-limit`: something differs, but by no more than FP32 with TF32 differs, twice, or FP16 may."""

RefusedBecause = Literal["", "no-command", "failed-again", "random", "other-calls", "no-time", "not-run"]
"""Reasons why a loop says nothing: Python recorded itself, the original fails, two runs of it differ, it
calls other files now, the limit ends it before its first call, or a file cannot be emulated."""

Step = Literal["states", "search", "fp32"]
"""A repair of a file: its states in FP32, a search for a smaller error, all of it in FP32."""


@dataclass(frozen=True)
class OutputError:
    """The error of one output over all compared calls: relative L2, and the largest difference."""

    file: str
    output: str
    relative_l2: float
    largest: float
    state: bool = False


@dataclass(frozen=True)
class OtherWord:
    """The first call after which the script went on differently."""

    call: int  # from 0, among all calls of the script
    file: str
    output: str = ""  # the output whose best entry is another one; "" if none is
    margin: float | None = None  # distance of its two best entries in the original
    usual_margin: float | None = None  # the median of all calls


@dataclass(frozen=True)
class Stream:
    """One run of the script, compared with the original up to the first other word."""

    calls: int
    errors: tuple[float, ...]  # largest of each call, but of outputs that a model reads again; NaN: none
    outputs: tuple[OutputError, ...]
    other: OtherWord | None = None  # None if all calls have the original's words
    printed: int = 0  # words on standard output
    other_printed: int = 0  # how many of them differ

    @property
    def error(self) -> float:
        """Largest relative L2 error of an output, over all compared calls, states apart."""
        return max((output.relative_l2 for output in self.outputs if not output.state), default=0.0)

    @property
    def same(self) -> bool:
        return self.other is None and not self.other_printed


@dataclass(frozen=True)
class Repair:
    """A repair that was tried: the loop's error after it, and whether it ended the search for one."""

    file: str
    step: Step
    error: float
    helped: bool


@dataclass(frozen=True)
class LoopResult:
    """The outcome of a closed loop."""

    ending: LoopEnding
    refusal: RefusedBecause = ""
    detail: str = ""  # for a refusal: the exit code, or the first call that differs
    calls: int = 0  # of the original
    stopped: bool = False  # the time limit or the recording ended a run early
    engine: str | None = None  # the engine that ran the fixed files; None where they were emulated
    limit: float = 0.0  # the largest error that is allowed: twice TF32's own, or FP16's tolerance
    plain: Stream | None = None  # everything in FP16 without a plan
    fixed: Stream | None = None  # the fixed files
    tf32: Stream | None = None  # FP32 with TF32 products
    culprit: str = ""  # if it failed: the file with the largest error by itself
    state: str = ""  # its worst state
    single: Mapping[str, float] = field(default_factory=dict)  # the error of each file by itself
    repairs: tuple[Repair, ...] = ()
    seconds: float = 0.0

    @property
    def error(self) -> float:
        """The error of the fixed files in the loop; infinite if they did not run."""
        return math.inf if self.fixed is None else self.fixed.error

    @property
    def passed(self) -> bool | None:
        """None if the loop says nothing."""
        return None if self.ending == "refused" else self.ending != "failed"
