"""Results of jobs for users: outcomes with the sentences for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rewriter.base.text import Row, Summary, count
from rewriter.jobs.fix.provenance import worse_text
from rewriter.jobs.fix.result import FixOutcome, Kind
from rewriter.jobs.verify import VerifyOutcome
from rewriter.passes.base import Stage
from rewriter.pipeline.driver import PassResult
from rewriter.pipeline.text import own_passes
from rewriter.report.causes import Cause, causes
from rewriter.report.remarks import error, place, sentence, worded
from rewriter.runtime.engines.deployment import shown
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.tolerances import USABLE
from rewriter.target.operators import REMEDY
from rewriter.verification.verdict import (
    CPU,
    ORIGINAL,
    PLUGINS,
    PROFILE,
    Check,
    GapKind,
    Verdict,
    deciding,
    gap_kinds,
)

UNBUILDABLE = "TensorRT cannot build the original model"
"""The ending of a model whose original does not build."""

NO_CHECK = "no check could be made"

EXACT = "build it with TF32 off"

NO_GAIN = 0.95
"""Share of FP32's latency above which nothing was gained: medians of two runs differ by a few percent."""

TF32_OFF = "with TF32 off (--noTF32, or NVIDIA_TF32_OVERRIDE=0), which is slower"

WITH_GPU = (
    "verify it where a GPU is: the original's FP32 engine is the reference there, "
    "and `plugin-lib` names the library of its plugins"
)


@dataclass(frozen=True)
class Gap:
    """A lack that keeps a checked result from being "Verified": words for the first line, and the reason.

    `brief` is "" where the first line says so in other words.
    """

    kind: GapKind
    brief: str
    reason: str


def _gap(kind: GapKind, checks: Sequence[Check], data: DataSource | None, worse: str, no_build: str) -> Gap:
    """A gap of checks that passed, in words; `no_build` says why no check is of a build."""
    brief = reason = ""
    match kind:
        case "data":
            assert data is not None
            brief, reason = f"on {data.doubt}, which is no proof", f"samples as in deployment: {data.text}"
        case "tf32":
            cured = next(c.excuse for c in checks if c.excuse in ("tf32", "tf32-off")) == "tf32-off"
            brief = f"as wrong as FP32 with TF32{': ' + EXACT if cured else ''}"
            reason = "TF32, the default of TensorRT, takes the original as far from FP32: "
            reason += f"{EXACT} (--noTF32)" if cured else "take `precision=fp32`, and " + EXACT
        case "plain":
            brief, reason = "less accurate than plain FP16", f"the accuracy of plain FP16 on {worse}"
        case "original":
            lost = [output for check in checks for output in check.outputs if output.unusable]
            errors = {o.name: o.allowance.measured for o in lost if o.allowance is not None}
            name = max(errors, key=errors.__getitem__)
            brief = "as inaccurate as the original"
            reason = (
                f"an accurate original: it has {errors[name]:.2g} on {name} against the model that it was "
            )
            reason += f"made from; beyond {USABLE} a result is of no use"
        case "build":
            build = next((check.summary for check in checks if check.name == "build"), no_build)
            build = build.removeprefix("not built: ") or "no library of TensorRT built it"
            brief, reason = "NOT built", f"an engine: {build}"
        case "plugins":
            brief = "up to its plugins"
            reason = next(check.summary for check in checks if check.name == PLUGINS)
        case "fp32":
            reason = "nodes in reduced precision: all of it is FP32"
    return Gap(kind, brief, reason)


def _proof(checks: Sequence[Check], samples: int, data: DataSource | None, lacks: Sequence[Gap]) -> str:
    """How a result was checked, in the words of the first line; "Verified" only if nothing is lacking.

    Args:
        samples: Number of those that judged; 0 if unknown.
    """
    brief = {gap.kind: gap.brief for gap in lacks if gap.brief}
    on = brief.pop("data", f"on {count(samples, 'sample')}" if samples else "")
    passed = {check.name: check for check in checks if check.passed}
    run, ran = passed.get("run"), passed[PROFILE].shapes if PROFILE in passed else ""
    on += f" and with {ran}" if ran else ""
    beyond = data.beyond.items() if data is not None else ()
    shapes = [
        f"{n} at {shown(seen)} of up to {shown(most)}" for n, (seen, most) in beyond if shown(most) not in ran
    ]
    on += f" ({', '.join(shapes)})" if shapes else ""
    lacking = any(gap.brief for gap in lacks)
    verb = "Checked" if lacking else "Verified"
    how = f"{verb} {place(run.device)}" if run else "Emulated" if lacking else "Verified by emulation"
    built = run is None and "build" in passed
    parts = [" ".join(filter(None, (how, on))), *["built without a GPU"] * built, *brief.values()]
    return ", ".join(parts)


def _ending(result: FixResult | VerifyResult, samples: int, *, lowered: bool, floats: bool) -> str:
    """The first line of a result that passed; `floats` is False if no node has any."""
    how = _proof(result.checks, samples, result.data, result.gaps)
    if lowered:
        return ", ".join(filter(None, (how, result.gain)))
    what = "all of it is FP32" if floats else "no node has floats"
    return f"Nothing was lowered: {what} ({how[0].lower()}{how[1:]})"


def _failed(checks: Iterable[Check], otherwise: str) -> str:
    failed = ", ".join(check.name for check in checks if check.passed is False)
    return f"VERIFICATION FAILED ({failed or otherwise})"


def _gain(share: float, of: str, source: str = "") -> str:
    """`2.2 times as fast as FP32`, or that nothing was gained, in the words of the first line.

    Args:
        share: Of the latency of `of`. `source`: its origin, unless it was measured.
    """
    if share <= NO_GAIN:
        return f"{1.0 / share:.2g} times as fast as {of}{source}"
    alike = "as slow as" if of == "FP32" else "as fast as"
    return f"{'slower than' if share > 1.0 / NO_GAIN else alike} {of}: {100 * share:.0f} %{source}"


@dataclass(frozen=True)
class Conclusion:
    """How a run ended, and why; `FixResult.ending` has the words of the first line."""

    kind: Kind
    limit: str = ""  # why the result fails or is not closer, in one sentence; "" if it is verified
    remedy: str = ""  # the action against it, in one sentence; "" if it is verified
    remarks: tuple[str, ...] = ()  # other facts about the result, such as that all of it is FP32
    lowered: bool = True  # False if nothing of the result is in reduced precision
    reason: str = ""  # why it is unverified; "" otherwise


class FixResult(FixOutcome, Summary):
    __doc__ = f"""{str(FixOutcome.__doc__).rstrip()}
        ending: How it ended, in the words of the report's first line; `conclusion`: the limit and the remedy.
        gain: Its speed and accuracy beside FP32, or beside plain FP16 if only that was measured, in the
            same words; "" if its latency is unknown.
        gaps: Reasons why checks that passed are no proof; () if one failed, or none was made.
    """

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """Everything that was wrong with the model, in numbers, and what was done about each."""
        return causes(self.plan, self.passes, self.repair_facts)

    @classmethod
    def of(cls, outcome: FixOutcome) -> FixResult:
        result = cls(**vars(outcome))
        result.verdict = outcome.verdict and Verdict(tuple(map(worded, outcome.checks)))
        result.warnings = [*_remarks(outcome), *_unproven(outcome.data), *outcome.warnings]
        return result

    @cached_property
    def repairs(self) -> list[str]:
        """The failures at first, and all that was tried; empty if the rules' plan passed."""
        return list(map(sentence, self.tried))

    @property
    def conclusion(self) -> Conclusion:
        end, remarks = self.end, tuple(_remarks(self))
        reason = (NO_CHECK if self.request.verify else "`verify=false`") * (end.kind == "unverified")
        return Conclusion(end.kind, *_limit(self), remarks, end.lowered, reason)

    @property
    def ending(self) -> str:
        if self.end.kind == "unbuildable":
            return UNBUILDABLE
        if self.verified is None:
            return "Fixed, NOT verified" + (f" ({self.conclusion.reason})" if self.conclusion.reason else "")
        if not self.verified:
            return _failed(self.checks, NO_CHECK)
        if not (self.verdict and self.verdict.compared):
            return "Fixed, and builds, but no result could be compared"
        floats = self.plan is None or self.plan.float_nodes > 0
        return _ending(self, self.judged, lowered=self.end.lowered, floats=floats)

    @property
    def gain(self) -> str:
        shares = sorted(self.latency_shares, key=lambda share: (not share.measured, share.of != "FP32"))
        other = (share for share in shares if share.of == "FP32" or (share.measured and share.share != 1.0))
        share = next(other, None)  # a result that is plain FP16 has a share of 1 of it
        if share is None or any(check.device == CPU for check in self.checks):
            return ""
        words = _gain(share.share, share.of, "" if share.measured else " (estimated)")
        lost = self.end.worse or {"original", "data"}.intersection(self.gap_kinds)
        exact = self.end.kind == "verified" and not lost
        alike = exact and share.share <= NO_GAIN
        return f"{words}, as accurate" if alike else words

    @property
    def gaps(self) -> tuple[Gap, ...]:
        worse, no_build = worse_text(self.end.worse), "" if self.request.build else "`build=false`"
        return tuple(_gap(kind, self.checks, self.data, worse, no_build) for kind in self.gap_kinds)

    def summary(self) -> Iterator[Row]:
        from rewriter.report import fix

        yield "Verdict", fix.verdict_line(self)
        yield from fix.rows(self, everything=False)


def _unproven(data: DataSource | None) -> Iterator[str]:
    """A remark on outputs by which no error shows, if there are others."""
    if data is not None and not data.unshown.all_outputs:
        names = [f"{name} (empty)" for name in data.unshown.empty]
        names += [f"{name} (0 throughout)" for name in data.unshown.zeros]
        if names:
            yield f"no proof on these samples: {', '.join(names)}"


def _remarks(result: FixOutcome) -> Iterator[str]:
    """Remarks on the result: why it is another attempt, or all FP32, or lacks a pass of the user's."""
    end, low = result.end, result.precision.upper()
    if end.preferred:
        yield sentence(end.preferred[0])
    elif end.in_fp32:
        why = f"rules and options leave nothing in {low}"
        if result.failed:
            why = "the most accurate attempt"
        elif result.tried:
            why = f"no plan with {low} passed every check"
        yield f"all of it is FP32: {why}"
    if end.stopped and not result.failed:
        yield end.stopped
    if end.left_out:
        yield f"left out, although requested: {', '.join(end.left_out)}; the repairs say why"


def _limit(result: FixOutcome) -> tuple[str, str]:
    """Limit and remedy; "" and "" for a result that passed, or was not to be verified."""
    match result.end.kind:
        case "unbuildable":
            return _unbuildable(result)
        case "unverified" if result.request.verify:
            checks = (check for check in result.checks if check.name != PLUGINS)
            return "; ".join(f"{check.name} {check.summary}" for check in checks), WITH_GPU
        case "as-fp32":
            return "TF32 is as far from FP32 in this network", _without_tf32(result.checks)
        case "failed":
            return next(_reasons(result))
    return "", ""


def _unbuildable(result: FixOutcome) -> tuple[str, str]:
    """Limit and remedy of a model that no pass makes buildable: what the parser still refuses, and why."""
    original = Verdict(result.checks).unbuildable
    check = next((check for check in result.failed if check.name == "build" and check.refused), original)
    assert check is not None
    names = [name for name, _ in check.refused]
    unnamed = tuple(f"{op}(" for name, op in check.refused if not name)
    structural = {name for name, kind in own_passes().items() if kind.stage is Stage.STRUCTURE}
    events = [event for step in result.passes if step.name in structural for event in step.refusals]
    reasons = (event.reason for event in events if event.node in names or event.node.startswith(unnamed))
    without = "".join(f", or without {name or op}" for name, op in check.refused[:1])
    anew = f"export it anew (another opset{without}), or run it with ONNX Runtime; another release of "
    why = next(reasons, "")
    if original is not None and original.switch is not None:
        name, owner = original.switch
        anew = f"the input {name} selects a branch of {owner}: make it a constant, and "
    remedy = f"{why}; {REMEDY}" if why else check.advice or f"{anew}TensorRT may build it"
    reason = next((line for line in check.details if not line.startswith("log: ")), check.summary)
    return f"TensorRT cannot build the original model, before any change: {reason}", remedy


def _reasons(result: FixOutcome) -> Iterator[tuple[str, str]]:
    """Yields limit and remedy of what failed, the gravest first; there is always one."""
    by_name = {check.name: check for check in result.failed}
    if "structure" in by_name:
        yield f"a pass changed the result in FP32: {by_name['structure'].summary}", _leave_out(result.passes)
    if "build" in by_name:
        if any(check.name == ORIGINAL and check.passed for check in result.checks):
            words = "TensorRT builds the original, but not the fixed file: a pass broke it"
            yield words, _leave_out(result.passes)
        remedy = by_name["build"].advice or "the details of the check name it"
        yield f"TensorRT does not build the fixed file: {by_name['build'].summary}", remedy
    check = deciding(result.failed)
    if check is not None:
        yield _arithmetic(check, result)
    if PROFILE in by_name:
        yield by_name[PROFILE].summary, by_name[PROFILE].advice
    if "io" in by_name:
        yield by_name["io"].summary, "leave out `io`: with the original types the file passes"
    other = (*result.failed, *result.checks)[0]
    yield other.summary, "a larger `tolerance` or budget, if that is acceptable; or `precision=fp32`"


def _leave_out(passes: Iterable[PassResult]) -> str:
    changed, own = [step.name for step in passes if step.changes], own_passes()
    foreign = ", ".join(name for name in changed if name not in own)
    report = f"; {foreign} is not ours" if foreign else ", and report this as a defect"
    return f"leave out one of the passes that changed it ({', '.join(changed)}) with `skip`{report}"


def _without_tf32(checks: Iterable[Check]) -> str:
    """The remedy if TF32 limits the accuracy: this very file may be accurate enough without it."""
    cured = any(check.tf32_off is not None and check.tf32_off <= 1.0 for check in checks)
    return f"build this file {TF32_OFF}" if cured else f"take `precision=fp32`, and build it {TF32_OFF}"


def _arithmetic(check: Check, result: FixOutcome) -> tuple[str, str]:
    if check.advice or not check.outputs:  # it did not run, or nothing of TensorRT's is enough
        return check.summary, check.advice or "the log is in the details of the check"
    worst = next((check.worst for check in result.checks if check.worst), ())
    where, size = f"{worst[0].node} ({worst[0].op})" if worst else "", error(check)
    if result.plan is not None and worst:
        size += f", most of it from {where}"
    if result.plan is None and result.request.plan is None:
        limit = f"this network needs more than TF32{f' in {where}' if worst else ''}"
        return f"{limit}: all in FP32 with TF32, {size}", f"build it {TF32_OFF}"
    if result.request.plan is not None:
        return f"your plan has too few nodes in FP32: {size}", "add nodes to it, or leave out `plan`"
    if not result.request.repair:
        return f"the rules' plan is not enough: {size}", "leave out `repair=false`"
    if result.end.stopped:
        return f"repair {result.end.stopped}; {size}", "give it more time: `repair-seconds`"
    fp32 = ""
    if result.end.fp32_error is not None:
        fp32 = f"; all of it in FP32 (TF32) has {result.end.fp32_error:.2g} times the allowed error"
    return f"no plan is within the tolerance: {size}{fp32}", _without_tf32(result.checks)


class VerifyResult(VerifyOutcome, Summary):
    __doc__ = f"""{str(VerifyOutcome.__doc__).rstrip()}
        ending, gain, gaps: As of `FixResult`.
    """

    @classmethod
    def of(cls, outcome: VerifyOutcome) -> VerifyResult:
        verdict = Verdict(tuple(map(worded, outcome.checks)))
        warnings = (*outcome.warnings, *_unproven(outcome.data))
        return cls(**dict[str, Any](vars(outcome), verdict=verdict, warnings=warnings))

    @property
    def ending(self) -> str:
        if self.verdict.unbuildable is not None:
            return UNBUILDABLE
        if not self.passed:
            return _failed(self.checks, "nothing ran")
        return _ending(self, self.data.samples, lowered=self.lowered, floats=self.floats)

    @property
    def gain(self) -> str:
        if self.latency is None or self.reference_latency is None:
            return ""
        return _gain(self.latency.median_us / self.reference_latency.median_us, "FP32 without TF32")

    @property
    def gaps(self) -> tuple[Gap, ...]:
        kinds = gap_kinds(self.checks, self.data, worse=bool(self.worse), all_fp32=self.all_fp32)
        gaps = (_gap(kind, self.checks, self.data, self.worse, "`build=false`") for kind in kinds)
        return tuple(gaps) if self.passed else ()

    @property
    def proven(self) -> bool:
        """True if the checks passed, and lack nothing."""
        return self.passed and not self.gaps

    def summary(self) -> Iterator[Row]:
        from rewriter.report import verify

        yield "Verdict", verify.verdict_line(self)
        yield from verify.rows(self)
