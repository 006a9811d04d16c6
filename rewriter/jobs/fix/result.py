"""The result of `fix`, as plain data for the terminal, JSON and callers, and its conclusion.

That is a verdict, and the limit and the remedy unless it is verified.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import onnx

from rewriter.base.text import Row, Summary, count, figure, listed
from rewriter.ir.model import Model
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.before import SideBySide
from rewriter.jobs.fix.causes import Cause
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.selection import LatencyShare, Selection
from rewriter.passes.base import Stage
from rewriter.pipeline.driver import PassResult
from rewriter.pipeline.presets import preset_named
from rewriter.pipeline.text import own_passes
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.metrics.tolerances import precision_of
from rewriter.runtime.ranges.depth import TensorAtDepth
from rewriter.target import Target
from rewriter.target.operators import REMEDY
from rewriter.verification.verdict import (
    CPU,
    GOALS,
    NO_GAIN,
    ORIGINAL,
    PROFILE,
    UNBUILDABLE,
    Check,
    Gap,
    MetricValue,
    Verdict,
    deciding,
    gain,
    gaps,
    not_lowered,
    proof,
)

Kind = Literal["verified", "as-fp32", "unverified", "failed", "unbuildable"]
"""`as-fp32`: verified, since the network's own FP32 engine is as inaccurate; `unbuildable`: TensorRT cannot
build the original model."""

TF32_OFF = "with TF32 off (--noTF32, or NVIDIA_TF32_OVERRIDE=0), which is slower"


WITH_GPU = (
    "verify it where a GPU is: the original's FP32 engine is the reference there, "
    "and `plugin-lib` names the library of its plugins"
)

LISTED = 3  # outputs that a reason names


@dataclass(frozen=True)
class Conclusion:
    """How a run ended, and why; `FixResult.ending` has the words of the first line."""

    kind: Kind
    limit: str = ""  # why the result fails or is not closer, in one sentence; "" if it is verified
    remedy: str = ""  # the action against it, in one sentence; "" if it is verified
    remarks: tuple[str, ...] = ()  # other facts about the result, such as that all of it is FP32
    lowered: bool = True  # False if nothing of the result is in reduced precision
    reason: str = ""  # why it is unverified; "" otherwise
    no_build: str = ""  # why nothing built it, where no check says so
    worse: str = ""  # the outputs on which plain FP16 is more accurate; "" if there are none
    all_fp32: bool = False  # nothing was lowered, though it has floats and FP32 was not the request


UNVERIFIED = Conclusion("unverified")


@dataclass(repr=False)
class FixResult(Summary):
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
        repairs: What failed at first, what was tried, and what helped; empty if the rules' plan passed.
        depth: Measured ranges of the model that the plan was made for, in the order of its nodes.
        causes: What was wrong with the model, in numbers, and what was done about each.
        before: Outputs of the original, emulated in the plan's precision, unrepaired; () if not verified.
            `before_value`: under a metric that judges all outputs together.
        side_by_side: With the option `page`: the worst sample before and after.
        conclusion: How it ended, with the limit and the remedy of a failure.
        judged: Number of samples that judged it.
        against: File of the model that it was judged by, if that is not the original.
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
    against: Path | None = None
    latency_shares: tuple[LatencyShare, ...] = ()

    @property
    def ending(self) -> str:
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
        lost = self.conclusion.worse or any(gap.kind == "original" for gap in self.gaps)
        exact = self.conclusion.kind == "verified" and not lost
        alike = exact and share.share <= NO_GAIN
        return f"{words}, as accurate" if alike else words

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Reasons why checks that passed are no proof; () if one failed, or none was made."""
        if not self.verified:
            return ()
        end = self.conclusion
        return gaps(self.checks, self.data, end.no_build, end.worse, all_fp32=end.all_fp32)

    @property
    def proven(self) -> bool:
        """True if results on the user's data were compared, what was to be lowered was, and nothing lacks."""
        return self.accepted and not self.gaps

    @property
    def accepted(self) -> bool:
        """True if `strict` takes it: it is proven, or lacks nothing but an engine."""
        if not self.verified or not Verdict(self.checks).compared:
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


def conclude(job: FixJob, selection: Selection) -> Conclusion:
    """Returns the conclusion of all checks of a selection, its build included."""
    attempt, checks = selection.attempt, selection.attempt.checks
    if attempt.plan is None:
        lowered = precision_of(attempt.fixed) != "fp32"
    else:
        lowered = not attempt.all_fp32 and attempt.plan.float_nodes > 0
    all_fp32 = job.lowers and not lowered and (attempt.plan is None or attempt.plan.float_nodes > 0)
    no_build = "" if job.request.build else "`build=false`"
    rows = (f"{name} ({figure(plain)}, here {figure(error)})" for name, error, plain in selection.worse)
    worse = ", ".join(islice(rows, LISTED))
    remarks = tuple(_remarks(job, selection))
    ended = partial(
        Conclusion, remarks=remarks, lowered=lowered, no_build=no_build, worse=worse, all_fp32=all_fp32
    )
    if (original := Verdict(checks).unbuildable) is not None:
        return ended("unbuildable", *_unbuildable(attempt, original))
    if not attempt.failed and not any(check.passed for check in checks if check.name not in GOALS):
        if not job.request.verify:
            return ended("unverified", reason="`verify=false`")
        lacking = "; ".join(f"{check.name} {check.summary}" for check in checks)
        return ended("unverified", lacking, WITH_GPU, reason="no check could be made")
    if Verdict(checks).passed:
        if any(gap.kind == "tf32" for gap in gaps(checks, None)):
            return ended("as-fp32", "TF32 is as far from FP32 in this network", _without_tf32(checks))
        return ended("verified")
    limit, remedy = next(_reasons(job, selection))
    return ended("failed", limit, remedy)


def _unbuildable(attempt: Attempt, original: Check) -> tuple[str, str]:
    """Limit and remedy of a model that no pass makes buildable: what the parser still refuses, and why."""
    check = next((check for check in attempt.failed if check.name == "build" and check.refused), original)
    names = [name for name, _ in check.refused]
    unnamed = tuple(f"{op}(" for name, op in check.refused if not name)
    events = [event for result in attempt.passes for event in result.refusals]
    reasons = (event.reason for event in events if event.node in names or event.node.startswith(unnamed))
    without = "".join(f", or without {name or op}" for name, op in check.refused[:1])
    anew = f"export it anew (another opset{without}), or run it with ONNX Runtime; another release of "
    why = next(reasons, "")
    remedy = f"{why}; {REMEDY}" if why else check.advice or f"{anew}TensorRT may build it"
    reason = next(iter(check.details), check.summary)
    return f"TensorRT cannot build the original model, before any change: {reason}", remedy


def _remarks(job: FixJob, selection: Selection) -> Iterator[str]:
    """Remarks on the result: why it is another attempt, or all FP32, or lacks a pass of the user's."""
    attempt = selection.attempt
    if selection.remark:
        yield selection.remark
    elif attempt.all_fp32 and job.precision.precision != "fp32":
        why = f"rules and options leave nothing in {job.precision.precision.upper()}"
        if attempt.failed:
            why = "the most accurate attempt"
        elif selection.lines:
            why = f"no plan with {job.precision.precision.upper()} passed every check"
        yield f"all of it is FP32: {why}"
    if selection.stopped and not attempt.failed:
        yield selection.stopped
    passes, preset = job.request.passes, preset_named(job.request.preset).steps
    whole = passes is not None and (isinstance(passes, str) or ... not in passes)
    lost = [s for s in job.first.steps if s.stage is not Stage.LOWERING and s not in attempt.candidate.steps]
    if names := [step.name for step in lost if whole or step not in preset]:
        yield f"left out, although requested: {', '.join(names)}; the repairs say why"


def _reasons(job: FixJob, selection: Selection) -> Iterator[tuple[str, str]]:
    """Yields limit and remedy of what failed, the gravest first; there is always one."""
    attempt, done = selection.attempt, selection.attempt.checks
    by_name = {check.name: check for check in attempt.failed}
    if "structure" in by_name:
        yield f"a pass changed the result in FP32: {by_name['structure'].summary}", _leave_out(attempt)
    if "build" in by_name:
        if any(check.name == ORIGINAL and check.passed for check in done):
            yield "TensorRT builds the original, but not the fixed file: a pass broke it", _leave_out(attempt)
        remedy = by_name["build"].advice or "the details of the check name it"
        yield f"TensorRT does not build the fixed file: {by_name['build'].summary}", remedy
    check = deciding(attempt.failed)
    if check is not None:
        yield _arithmetic(check, job, selection)
    if PROFILE in by_name:
        yield by_name[PROFILE].summary, by_name[PROFILE].advice
    if "io" in by_name:
        yield by_name["io"].summary, "leave out `io`: with the original types the file passes"
    other = attempt.failed[0] if attempt.failed else done[0]
    yield other.summary, "a larger `tolerance` or budget, if that is acceptable; or `precision=fp32`"


def _leave_out(attempt: Attempt) -> str:
    changed, own = [step.name for step in attempt.passes if step.changes], own_passes()
    foreign = ", ".join(name for name in changed if name not in own)
    report = f"; {foreign} is not ours" if foreign else ", and report this as a defect"
    return f"leave out one of the passes that changed it ({', '.join(changed)}) with `skip`{report}"


def _without_tf32(done: Sequence[Check]) -> str:
    """The remedy if TF32 limits the accuracy: this very file may be accurate enough without it."""
    cured = any(check.tf32_off is not None and check.tf32_off <= 1.0 for check in done)
    return f"build this file {TF32_OFF}" if cured else f"take `precision=fp32`, and build it {TF32_OFF}"


def _arithmetic(check: Check, job: FixJob, selection: Selection) -> tuple[str, str]:
    attempt, request = selection.attempt, job.request
    if check.advice or not check.outputs:  # it did not run, or nothing of TensorRT's is enough
        return check.summary, check.advice or "the log is in the details of the check"
    worst = next((check.worst for check in attempt.checks if check.worst), ())
    where, size = f"{worst[0].node} ({worst[0].op})" if worst else "", _size(check)
    if attempt.plan is not None and worst:
        size += f", most of it from {where}"
    if attempt.plan is None and job.plan is None:
        limit = f"this network needs more than TF32{f' in {where}' if worst else ''}"
        return f"{limit}: all in FP32 with TF32, {size}", f"build it {TF32_OFF}"
    if job.plan is not None:
        return f"your plan has too few nodes in FP32: {size}", "add nodes to it, or leave out `plan`"
    if not request.repair:
        return f"the rules' plan is not enough: {size}", "leave out `repair=false`"
    if selection.stopped:
        return f"repair {selection.stopped}; {size}", "give it more time: `repair-seconds`"
    fp32 = ""
    if selection.in_fp32 is not None:
        fp32 = f"; all of it in FP32 (TF32) has {selection.in_fp32.error:.2g} times the allowed error"
    return f"no plan is within the tolerance: {size}{fp32}", _without_tf32(attempt.checks)


def _size(check: Check) -> str:
    if check.value is not None:
        return f"{check.value.metric} is {check.value.value:.2g}, {check.value.allowed:.2g} is asked for"
    worst = max(check.outputs, key=lambda output: (not output.finite, output.excess))
    if not worst.finite:
        return f"{worst.name} has NaN or infinity"
    return f"{worst.name} has an error of {worst.relative_l2:.2g}, {worst.tolerance:.2g} is allowed"
