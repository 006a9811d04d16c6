"""How a run of `fix` ended: one verdict, and the limit and the remedy if it is not what was wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.judge import ARITHMETIC
from rewriter.judge.verdict import GOALS, ORIGINAL, Check, Verdict
from rewriter.pipeline.registry import own_passes
from rewriter.runtime.emulation.divergence import NodeError

Kind = Literal["verified", "as-fp32", "unverified", "failed", "unbuildable"]
"""`as-fp32`: verified, as the network's own FP32 engine errs as much; `unbuildable`: TensorRT does not build
the model as it came."""

TF32_OFF = "with TF32 off (--noTF32, or NVIDIA_TF32_OVERRIDE=0), which is slower"


@dataclass(frozen=True)
class Conclusion:
    """How a run ended, and why; `FixResult.ending` has the words of the first line.

    Attributes:
        lowered: False if nothing of the result is in reduced precision.
        reason: Why it is unverified; "" otherwise.
        limit: What keeps the result from passing or from being closer, in one sentence; "" if it is verified.
        remedy: What to do about it, in one sentence; "" if it is verified.
        remarks: What else is to be known of the result, such as that all of it is FP32.
    """

    kind: Kind
    limit: str = ""
    remedy: str = ""
    remarks: tuple[str, ...] = ()
    lowered: bool = True
    reason: str = ""

    @property
    def usable(self) -> bool:
        """True if the next step is to build the file."""
        return self.kind in ("verified", "as-fp32", "unverified")


UNVERIFIED = Conclusion("unverified")


@dataclass(frozen=True)
class Tried:
    """What led to the result.

    Attributes:
        job: As the user asked for it.
        planned: True if the result follows a plan; False if all of it is FP32.
        lowered: As in `Conclusion`.
        in_fp32: Error of all of it in FP32, in units of the tolerance, if that was tried in vain.
        stopped: Why not every remedy was tried; "" if all were, or none was needed.
        remarks: As in `Conclusion`.
        changed: Names of the passes that changed something.
    """

    job: FixJob
    planned: bool
    lowered: bool = True
    in_fp32: float | None = None
    stopped: str = ""
    remarks: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def conclude(done: Sequence[Check], tried: Tried) -> Conclusion:
    """Returns the conclusion of all checks of a result, its build included."""
    ended = partial(Conclusion, remarks=tried.remarks, lowered=tried.lowered)
    checked = [check for check in done if check.name not in GOALS]
    failed = [check for check in done if check.passed is False]
    if any(check.name == ORIGINAL and check.passed is False for check in done):
        limit, remedy = _unbuildable(done)
        return ended("unbuildable", limit, remedy)
    if not failed and not any(check.passed for check in checked):
        asked = tried.job.request.verify
        return ended("unverified", reason="no check could be made" if asked else "`verify=false`")
    if Verdict(tuple(done)).passed:
        if any(check.excuse == "as-fp32" for check in done):
            limit = "TF32 is as far from FP32 in this network"
            return ended("as-fp32", limit, _without_tf32(done))
        return ended("verified")
    limit, remedy = next(_reasons(failed, done, tried))
    return ended("failed", limit, remedy)


def _unbuildable(done: Sequence[Check]) -> tuple[str, str]:
    original = next(check for check in done if check.name == ORIGINAL)
    reason = next(iter(original.details), original.summary).removeprefix("builder: ")
    named = [name or op for name, op in original.refused]
    without = f", or without {named[0]}" if named else ""
    return (
        f"TensorRT does not build the model as it came, before any change: {reason}",
        f"export it anew (another opset{without}), or run it with ONNX Runtime; another "
        "release of TensorRT may build it",
    )


def _reasons(failed: Sequence[Check], done: Sequence[Check], tried: Tried) -> Iterator[tuple[str, str]]:
    """Yields limit and remedy of what failed, the gravest first; there is always one."""
    by_name = {check.name: check for check in failed}
    if "structure" in by_name:
        yield (
            f"a pass changed the result in FP32: {by_name['structure'].summary}",
            _leave_out(tried),
        )
    if "build" in by_name:
        yield _broken_build(by_name["build"], done, tried)
    deciding = next((by_name[name] for name in ARITHMETIC if name in by_name), None)
    if deciding is not None:
        worst = next((check.worst for check in done if check.worst), ())
        yield _arithmetic(deciding, worst, tried, _without_tf32(done))
    if "io" in by_name:
        yield by_name["io"].summary, "leave out `io`: the file as it is passes, with these types"
    other = failed[0] if failed else done[0]
    yield other.summary, "a larger `tolerance` or budget, if that is acceptable; or `precision=fp32`"


def _leave_out(tried: Tried) -> str:
    names, own = ", ".join(tried.changed), own_passes()
    foreign = ", ".join(name for name in tried.changed if name not in own)
    report = f"; {foreign} is not ours" if foreign else ", and report this as a defect"
    return f"leave out one of the passes that changed it ({names}) with `skip`{report}"


def _broken_build(build: Check, done: Sequence[Check], tried: Tried) -> tuple[str, str]:
    original = next((check for check in done if check.name == ORIGINAL), None)
    advice = [d for d in build.details if d.startswith("what to do: ")]
    if original is None or not original.passed:
        remedy = advice[0].removeprefix("what to do: ") if advice else "the details of the check name it"
        return f"TensorRT does not build the fixed file: {build.summary}", remedy
    return (
        "TensorRT builds the original, but not the fixed file: a pass broke it",
        _leave_out(tried),
    )


def _without_tf32(done: Sequence[Check]) -> str:
    """What to do where TF32 is the limit: this very file may be enough without it."""
    cured = any(check.tf32_off is not None and check.tf32_off <= 1.0 for check in done)
    return f"build this file {TF32_OFF}" if cured else f"take `precision=fp32`, and build it {TF32_OFF}"


def _arithmetic(check: Check, worst: Sequence[NodeError], tried: Tried, remedy: str) -> tuple[str, str]:
    job, request = tried.job, tried.job.request
    if not check.outputs:  # it did not run
        advice = [d for d in check.details if d.startswith("what to do: ")]
        return check.summary, next(iter(advice), "the log is in the details of the check").removeprefix(
            "what to do: "
        )
    size = _size(check)
    if tried.planned and worst:
        size += f", most of it from {worst[0].node} ({worst[0].op})"
    if not tried.planned and job.plan is None:
        where = f" in {worst[0].node} ({worst[0].op})" if worst else ""
        return (
            f"this network needs more than TF32{where}: all in FP32 with TF32, {size}",
            f"build it {TF32_OFF}",
        )
    if job.plan is not None:
        return f"the given plan has too few nodes in FP32: {size}", "add nodes to it, or leave out `plan`"
    if job.weak_typing:
        return f"the constrained build is not accurate enough: {size}", "build it in FP32, without --fp16"
    if not request.repair:
        return f"the rules' plan is not enough: {size}", "leave out `repair=false`"
    if tried.stopped:
        return f"repair {tried.stopped}; {size}", "give it more time: `repair-seconds`"
    fp32 = ""
    if tried.in_fp32 is not None:
        fp32 = f"; all of it in FP32 (TF32) errs {tried.in_fp32:.2g} times what is allowed"
    return f"no plan is within the tolerance: {size}{fp32}", remedy


def _size(check: Check) -> str:
    if check.value is not None:
        return f"{check.value.metric} is {check.value.value:.2g}, {check.value.allowed:.2g} is asked for"
    worst = max(check.outputs, key=lambda output: (not output.finite, output.excess))
    if not worst.finite:
        return f"{worst.name} has NaN or infinity"
    return f"{worst.name} errs by {worst.relative_l2:.2g}, {worst.tolerance:.2g} is allowed"
