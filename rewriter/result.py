"""What `fix` hands back: plain data that the terminal, JSON and callers read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from rewriter.base import Target
from rewriter.driver import PassResult
from rewriter.model import Model
from rewriter.plan import Plan

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


@dataclass(frozen=True)
class OutputComparison:
    """One output of the rewritten model against the original's.

    Attributes:
        relative_l2: ||a - b|| / ||b|| for floats; the share of differing elements for other types.
        max_abs: Largest absolute difference.
        finite: Whether all values are finite where the original's are.
        tolerance: What `relative_l2` is held to.
        note: How it was compared when not element by element, e.g. as a set of detections.
    """

    name: str
    relative_l2: float
    max_abs: float
    cosine: float
    finite: bool
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.finite and self.relative_l2 <= self.tolerance


LASTING = "search: "
"""How stages begin whose news is worth a line of its own where there is no bar to show it in."""

GOALS = frozenset({"tolerance", "max-latency-cost", "search"})
"""Checks that say whether a search reached what it was asked for; they verify nothing of what is written."""


@dataclass(frozen=True)
class Check:
    """One step of verification: `structure`, `emulation` or `build`; or what became of a goal of `GOALS`.

    `passed` is None when the step could not be done; `summary` then says why.
    """

    name: str
    passed: bool | None
    summary: str
    outputs: tuple[OutputComparison, ...] = ()
    details: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The checks that were made."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """At least one check was made and none failed."""
        return any(c.passed for c in self.checks) and all(c.passed is not False for c in self.checks)


@dataclass(frozen=True)
class FrontierPoint:
    """A plan that was evaluated.

    Attributes:
        latency_us: Microseconds of one inference.
        value: Of the frontier's metric, the worst over outputs and samples.
    """

    latency_us: float
    value: float
    plan: Plan


@dataclass(frozen=True)
class Frontier:
    """The plans that no other evaluated one beats in both latency and accuracy, fastest first.

    Attributes:
        metric: Name of the measure; `least`: whether more of it is better.
        origin: Where the latencies come from, e.g. "recorded on an H200, not measured here".
        tried: All plans that were evaluated, fastest first.
        chosen: The plan that was applied.
    """

    metric: str
    least: bool
    origin: str
    points: tuple[FrontierPoint, ...]
    tried: tuple[FrontierPoint, ...]
    chosen: Plan | None = None


@dataclass(frozen=True)
class TriedPlan:
    """A plan that a search built and ran.

    Attributes:
        words: What it has that the rules' plan has not, for people.
        value: Of the search's metric, the worst over outputs and samples; infinite if the plan failed.
        latency_us, spread_us: Median, and distance of the quartiles; None and 0 if it failed.
        problem: Why it failed; "" if it did not.
        applied: Whether it is the one that was taken.
        untried: Whether the time was up before it was measured.
    """

    words: str
    value: float
    latency_us: float | None
    spread_us: float
    problem: str
    plan: Plan
    applied: bool
    untried: bool = False


@dataclass(frozen=True)
class Searched:
    """What a search on an engine tried, in that order; the first is the rules' plan.

    Attributes:
        metric: Name of the measure of accuracy.
        origin: What measured, and where.
    """

    metric: str
    origin: str
    tried: tuple[TriedPlan, ...]


@dataclass
class FixResult:
    """The outcome of `fix`.

    Attributes:
        model: The rewritten model; `proto` gives it whole.
        output: The file that was written; None with `dry_run` or without an output path.
        pipeline: Text of the pipeline that ran; parsing it gives the same passes.
        passes: What each pass did and declined.
        plan: Which nodes stay in FP32 and why; None when no precision pass ran.
        data: The samples that ranges and verification used; None if none were needed.
        verdict: None with `verify=False`, unless there was a goal to search for.
        frontier: Accuracy against latency, if it was asked for.
        warnings: Sentences that the user should read.
        seconds: Wall time by stage, in order.
        searched: The plans that `search="gpu"` built and ran.
        constraints: The file of trtexec's arguments for a weakly typed build, if that was asked for.
    """

    model: Model
    output: Path | None
    pipeline: str
    target: Target
    passes: list[PassResult] = field(default_factory=list)
    plan: Plan | None = None
    data: DataSource | None = None
    verdict: Verdict | None = None
    frontier: Frontier | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    constraints: Path | None = None
    searched: Searched | None = None

    @property
    def verified(self) -> bool | None:
        """Whether the checks passed; None if nothing was checked but that a search reached its goal."""
        if self.verdict is None:
            return None
        reached = self.verdict.passed and all(check.name in GOALS for check in self.verdict.checks)
        return None if reached else self.verdict.passed

    @property
    def proto(self) -> onnx.ModelProto:
        """The rewritten model with its weights inside (up to 2 GiB)."""
        return self.model.whole()
