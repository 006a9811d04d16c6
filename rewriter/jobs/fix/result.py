"""The result of `fix`, as plain data for the terminal, JSON and callers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from rewriter.base.summary import Row, Summary, listed
from rewriter.base.text import count
from rewriter.ir.model import Model
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix.before import SideBySide
from rewriter.jobs.fix.causes import Cause
from rewriter.jobs.fix.conclusion import UNVERIFIED, Conclusion
from rewriter.jobs.fix.selection import LatencyShare
from rewriter.pipeline.driver import PassResult
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.ranges.depth import TensorAtDepth
from rewriter.target import Target
from rewriter.verification.verdict import (
    CPU,
    GOALS,
    NO_GAIN,
    UNBUILDABLE,
    Check,
    Gap,
    MetricValue,
    Verdict,
    gain,
    gaps,
    not_lowered,
    proof,
)


@dataclass(repr=False)
class FixResult(Summary):
    """The outcome of `fix`.

    Attributes:
        model: The rewritten model; `proto` gives it whole.
        output: The file that was written; None with `dry_run` or without an output path.
        pipeline: Text of the pipeline that ran; parsing it gives the same passes.
        passes: What each pass did and declined.
        plan: Which nodes stay in FP32 and why; None when no precision pass ran.
        data: The samples that ranges and verification used; None if none were needed.
        verdict: None with `verify=False`, unless there was a goal to search for.
        warnings: Sentences that the user should read.
        seconds: Wall time by stage, in order.
        constraints: The file of trtexec's arguments, with `weak_typing`.
        script: The file that builds the result, with `deploy`.
        repairs: What failed at first, what was tried, and what helped; empty if the rules' plan passed.
        depth: Measured ranges of the model that the plan was made for, in the order of its nodes.
        causes: What was wrong with the model, in numbers, and what was done about each.
        precision: The reduced precision that was asked for.
        before: Outputs of the original, emulated in the plan's precision, unrepaired; () if not verified.
            `before_value`: under a metric that judges all outputs together.
        side_by_side: With the option `page`: the worst sample before and after.
        conclusion: How it ended, with the limit and the remedy of a failure.
        judged: Number of samples that judged it.
        latency_shares: Its latency as a share of FP32's and of plain FP16's.
    """

    model: Model
    output: Path | None
    pipeline: str
    target: Target
    passes: list[PassResult] = field(default_factory=list)
    plan: Plan | None = None
    data: DataSource | None = None
    verdict: Verdict | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    constraints: Path | None = None
    script: Path | None = None
    repairs: list[str] = field(default_factory=list)
    depth: tuple[TensorAtDepth, ...] = ()
    causes: tuple[Cause, ...] = ()
    precision: str = "fp16"
    before: tuple[OutputComparison, ...] = ()
    before_value: MetricValue | None = None
    conclusion: Conclusion = UNVERIFIED
    side_by_side: SideBySide | None = None
    judged: int = 0
    latency_shares: tuple[LatencyShare, ...] = ()

    @property
    def ending(self) -> str:
        """How it ended, in the words of the report's first line."""
        if self.conclusion.kind == "unbuildable":
            return UNBUILDABLE
        if self.verified is None:
            return "Fixed, NOT verified" + (f" ({self.conclusion.reason})" if self.conclusion.reason else "")
        if not self.verified:
            failed = ", ".join(check.name for check in self.checks if check.passed is False)
            return f"VERIFICATION FAILED ({failed or 'no check could be made'})"
        if not (self.verdict and self.verdict.compared):
            return "Fixed, and builds, but no result could be compared"
        how = proof(self.checks, self.judged, self.data, self.gaps)
        if self.conclusion.lowered:
            return ", ".join(filter(None, (how, self.gain)))
        return not_lowered(how, floats=self.plan is None or self.plan.float_nodes > 0)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of the verification, with their figures; () without one."""
        return self.verdict.checks if self.verdict else ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The nodes that stay in FP32 or BF16, with reasons; () where nothing was planned."""
        return self.plan.decisions if self.plan is not None else ()

    @property
    def gain(self) -> str:
        """Its speed and accuracy beside FP32, in the first line's words; "" if its latency is unknown."""
        share = next((share for share in self.latency_shares if share.of == "FP32"), None)
        if share is None or any(check.device == CPU for check in self.checks):
            return ""
        words = gain(share.share, "FP32", "" if share.measured else " (estimated)")
        exact = self.conclusion.kind == "verified" and not self.conclusion.worse
        alike = exact and share.share <= NO_GAIN
        return f"{words}, as accurate" if alike else words

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Reasons why checks that passed are no proof; () if one failed, or none was made."""
        conclusion = self.conclusion
        return gaps(self.checks, self.data, conclusion.no_build, conclusion.worse) if self.verified else ()

    @property
    def proven(self) -> bool:
        """True if results on the user's data were compared, what was to be lowered was, and nothing lacks."""
        return self.accepted and not self.gaps

    @property
    def accepted(self) -> bool:
        """True if `strict` takes it: it is proven, or lacks nothing but an engine."""
        if not self.verified or not Verdict(self.checks).compared:
            return False
        if not self.conclusion.lowered and (self.repairs or (self.plan and self.plan.float_nodes)):
            return False
        return all(gap.kind == "build" for gap in self.gaps)

    @property
    def verified(self) -> bool | None:
        """True if the checks passed; None if nothing was checked except that a search reached its goal."""
        if self.verdict is None:
            return None
        reached = self.verdict.passed and all(check.name in GOALS for check in self.verdict.checks)
        return None if reached else self.verdict.passed

    @property
    def proto(self) -> onnx.ModelProto:
        """The rewritten model with its weights inside (up to 2 GiB)."""
        return self.model.whole()

    def summary(self) -> Iterator[Row]:
        yield "verdict", self.ending
        if self.conclusion.limit:
            yield "limit", self.conclusion.limit
            yield "remedy", self.conclusion.remedy
        yield from self.verdict.rows() if self.verdict else ()
        yield from (("remark", remark) for remark in self.conclusion.remarks)
        yield from listed("causes", map(str, self.causes), 3)
        if self.plan is not None:
            yield "plan", f"{len(self.plan.fp32)} of {count(self.plan.float_nodes, 'float node')} in FP32"
        if self.data is not None:
            yield "data", self.data.text
        yield "written", str(self.output) if self.output else "nothing: rewriter.save(result.model, path)"
