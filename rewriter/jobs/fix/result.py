"""The outcome of `fix`, as plain data, and how it ended; `report/` has the sentences."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx

from rewriter.ir.model import Model
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix.before import SideBySide
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.repair_facts import RepairFacts
from rewriter.jobs.fix.selection import LatencyShare, Selection
from rewriter.passes.base import Stage
from rewriter.pipeline.driver import PassResult
from rewriter.pipeline.options import FixOptions
from rewriter.pipeline.presets import preset_named
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.metrics.tolerances import precision_of
from rewriter.runtime.ranges import TensorAtDepth
from rewriter.target import Target
from rewriter.verification.verdict import GOALS, Check, GapKind, MetricValue, Remark, Verdict, gap_kinds

Kind = Literal["verified", "as-fp32", "unverified", "failed", "unbuildable"]
"""`as-fp32`: verified, since the network's own FP32 engine is as inaccurate; `unbuildable`: TensorRT cannot
build the original model."""


@dataclass(frozen=True)
class End:
    """How a run ended, as values."""

    kind: Kind = "unverified"
    lowered: bool = True  # False if nothing of the result is in reduced precision
    all_fp32: bool = False  # nothing was lowered, though it has floats and FP32 was not the request
    in_fp32: bool = False  # the attempt puts all nodes in FP32, though that was not the request
    preferred: tuple[Remark, ...] = ()  # why it is not the first attempt that passed; () if it is
    stopped: str = ""  # why not every candidate was tried; "" if all were
    fp32_error: float | None = None  # of all of it in FP32, in units of what is allowed, if that failed
    worse: tuple[tuple[str, float, float], ...] = ()  # as `Selection.worse`
    left_out: tuple[str, ...] = ()  # passes that the user requested


@dataclass(repr=False)
class FixOutcome:
    """The outcome of `fix`.

    Attributes:
        model: The rewritten model; `proto` gives it whole.
        output: The file that was written; None with `dry_run` or without an output path.
        pipeline: Text of the pipeline that ran; parsing it gives the same passes.
        plan: Which nodes stay in FP32 and why; None when no precision pass ran.
        data: The samples that ranges and verification used; None if none were needed.
        verdict: None with `verify=False`, unless there was a goal to search for.
        warnings: Sentences that the user should read.
        script: The file that builds the result, with `deploy`.
        tried: What failed at first, what was tried, and what helped; empty if the rules' plan passed.
        depth: Measured ranges of the model that the plan was made for, in the order of its nodes.
        repair_facts: Facts about what was wrong that the plan does not hold.
        before: Outputs of the original, emulated in the plan's precision, unrepaired; () if not verified.
            `before_value`: under a metric that judges all outputs together.
        side_by_side: With the option `page`: the worst sample before and after.
        end: How it ended.
        judged: Number of samples that judged it.
        against: File of the model that it was judged by, if that is not the original.
        latency_shares: Its latency as a share of FP32's and of plain FP16's.
        request: The options.
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
    script: Path | None = None
    tried: tuple[Remark, ...] = ()
    depth: tuple[TensorAtDepth, ...] = ()
    repair_facts: RepairFacts = field(default_factory=RepairFacts)
    precision: str = "fp16"
    before: tuple[OutputComparison, ...] = ()
    before_value: MetricValue | None = None
    end: End = End()
    side_by_side: SideBySide | None = None
    judged: int = 0
    against: Path | None = None
    latency_shares: tuple[LatencyShare, ...] = ()
    request: FixOptions = field(default_factory=FixOptions)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of the verification, with their figures; () without one."""
        return self.verdict.checks if self.verdict else ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The nodes that stay in FP32 or BF16, with reasons; () where nothing was planned."""
        return self.plan.decisions if self.plan is not None else ()

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def gap_kinds(self) -> tuple[GapKind, ...]:
        """Reasons why checks that passed are no proof; () if one failed, or none was made."""
        if not self.verified:
            return ()
        return gap_kinds(self.checks, self.data, worse=bool(self.end.worse), all_fp32=self.end.all_fp32)

    @property
    def proven(self) -> bool:
        """True if results on the user's data were compared, what was to be lowered was, and nothing lacks."""
        return self.accepted and not self.gap_kinds

    @property
    def accepted(self) -> bool:
        """True if `strict` takes it: it is proven, or lacks nothing but an engine."""
        if not self.verified or not Verdict(self.checks).compared:
            return False
        return all(gap == "build" for gap in self.gap_kinds)

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


def end_of(job: FixJob, selection: Selection) -> End:
    """Returns how a run ended, by all checks of a selection, its build included."""
    attempt = selection.attempt
    floats = attempt.plan is None or attempt.plan.float_nodes > 0
    if attempt.plan is None:
        lowered = precision_of(attempt.fixed) != "fp32"
    else:
        lowered = not attempt.all_fp32 and floats
    passes, preset = job.request.passes, preset_named(job.request.preset).steps
    whole = passes is not None and (isinstance(passes, str) or ... not in passes)
    lost = [s for s in job.first.steps if s.stage is not Stage.LOWERING and s not in attempt.candidate.steps]
    return End(
        _kind(attempt.checks),
        lowered,
        all_fp32=job.lowers and not lowered and floats,
        in_fp32=attempt.all_fp32 and job.precision.precision != "fp32",
        preferred=selection.preferred,
        stopped=selection.stopped,
        fp32_error=None if selection.in_fp32 is None else selection.in_fp32.error,
        worse=selection.worse,
        left_out=tuple(step.name for step in lost if whole or step not in preset),
    )


def _kind(checks: tuple[Check, ...]) -> Kind:
    verdict = Verdict(checks)
    if verdict.unbuildable is not None:
        return "unbuildable"
    if not any(check.passed is False or (check.passed and check.name not in GOALS) for check in checks):
        return "unverified"
    if not verdict.passed:
        return "failed"
    return "as-fp32" if "tf32" in gap_kinds(checks, None) else "verified"
