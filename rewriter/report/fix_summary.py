"""The result of `fix` in ten to fifteen lines: error, latency, causes, what was done, what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rewriter.hazards.kinds import KINDS
from rewriter.hazards.planning.costs import ORIGIN
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.base import Stage
from rewriter.ir.english import count, figure
from rewriter.ir.plan import Plan
from rewriter.jobs.fix.result import FixResult
from rewriter.judge.verdict import GOALS, Check
from rewriter.pipeline.driver import PassResult
from rewriter.pipeline.text import own_passes
from rewriter.report.next_step import next_step
from rewriter.report.terminal import NAME, Row, first_rows, shortened
from rewriter.runtime.figures.outputs import OutputComparison

CAUSES, WARNINGS, REPAIRS = 4, 3, 3
"""Lines of each kind without `-v`."""

SHARE = "share of differing elements"
"""Unit of the error of an output that holds no floats."""

DECIDING = ("run", "emulation", "tf32")
"""Checks of the arithmetic, the one with the most to say first."""


def rows(result: FixResult, *, everything: bool) -> Iterator[Row]:
    """The lines after the verdict, each with its label; all of each kind if `everything`."""
    yield from _error(result)
    yield from _latency(result)
    causes = _causes(result) if everything else [_with_short_names(cause) for cause in _causes(result)]
    yield from first_rows("Wrong", causes, None if everything else CAUSES)
    yield from _done(result)
    yield from first_rows("Repair", result.repairs, None if everything else REPAIRS)
    yield from _checks(result)
    found = result.conclusion
    if found.limit:
        yield "Limit", found.limit
        yield "Remedy", found.remedy
    if result.data is not None:
        yield "Data", result.data.text
    warnings = [w for w in result.warnings if result.data is None or w != result.data.text]
    yield from first_rows(
        "Note", [*found.remarks, *warnings, *next_step(result).remarks], None if everything else WARNINGS
    )


def _checks_made(result: FixResult) -> Sequence[Check]:
    return result.verdict.checks if result.verdict else ()


def _error(result: FixResult) -> Iterator[Row]:
    made = {check.name: check for check in _checks_made(result) if check.outputs}
    check = next((made[name] for name in DECIDING if name in made), None)
    if check is None:
        return
    worst = _worst(check.outputs)
    how = f"run {check.place}" if check.name == "run" else "emulated"
    of = f"{worst.name}, the worst of {len(check.outputs)} outputs" if len(check.outputs) > 1 else worst.name
    unit = SHARE if worst.note.endswith(SHARE) else "relative L2"
    allowed = f"{'' if worst.passed else 'NOT '}within {figure(worst.tolerance)}"
    if worst.passed and worst.fair_text:
        allowed = f"beyond {figure(worst.tolerance)}, but fair"
    yield "Error", f"{_before(result, worst)}{_size(worst)}, {allowed} ({unit} of {of}; {how})"
    yield from (("", output.fair_text) for output in check.outputs if output.fair_text)


def _worst(outputs: Sequence[OutputComparison]) -> OutputComparison:
    return max(outputs, key=lambda o: (not o.finite, o.excess))


def _size(output: OutputComparison) -> str:
    return figure(output.relative_l2) if output.finite else "NaN or infinity"


def _before(result: FixResult, worst: OutputComparison) -> str:
    """The error had nothing been repaired: of the same output, unless another one is wrong."""
    if not result.before or result.plan is None:
        return ""
    same = next((o for o in result.before if o.name == worst.name), None)
    plain = _worst(result.before) if same is None or same.passed else same
    where = "" if plain.name == worst.name else f" ({plain.name})"
    return f"{_size(plain)} in plain {result.plan.precision.upper()}{where}, now "


def _latency(result: FixResult) -> Iterator[Row]:
    """What was measured, and shares of other latencies, with their source."""
    timed = [(c.latency, c.place) for c in _checks_made(result) if c.latency is not None][:1]
    parts = [f"{one.median_us:.1f} us (+- {one.iqr_us:.1f}) {place}" for one, place in timed]
    for measured, source in ((True, "measured"), (False, f"estimated, {ORIGIN}")):
        shares = [one for one in result.latency_shares if one.measured is measured]
        if shares:
            words = " and ".join(f"{100 * one.share:.0f} % of {one.of}'s" for one in shares)
            parts.append(f"{words} ({source})")
    if parts:
        yield "Latency", "; ".join(parts)


def _causes(result: FixResult) -> list[str]:
    if result.causes:
        return [str(cause) for cause in result.causes]
    if result.plan is None or not result.before or not result.depth:  # ranges were not measured
        return []
    low = result.plan.precision.upper()
    if all(output.passed for output in result.before):
        return [f"nothing: no hazard was found, and plain {low} is within the tolerance, too"]
    if all(output.finite for output in result.before):
        return [f"plain {low} is NOT within the tolerance, by rounding: no value is out of range"]
    return []


def _with_short_names(cause: str) -> str:
    """The sentence with long names cut at the front; two names stay two."""
    for name, short in shortened(NAME.findall(cause)).items():
        cause = cause.replace(name, short)
    return cause


def _done(result: FixResult) -> Iterator[Row]:
    """What the passes did, one line for each kind of pass."""
    stages = {name: kind.stage for name, kind in own_passes().items()}
    changed = [step for step in result.passes if step.changes]
    rewriting = [s for s in changed if stages.get(s.name) is not Stage.LOWERING]
    if rewriting:
        yield "Done", f"rewritten by {', '.join(map(_counted, rewriting))}"
    if result.plan is not None:
        yield "Done", _types(result.plan, given=not result.depth)
    elif result.repairs:
        yield "Done", "ALL of it stays in FP32: nothing of it is in reduced precision"


def _counted(step: PassResult) -> str:
    return step.name + (f" ({len(step.changes)})" if len(step.changes) > 1 else "")


def _types(plan: Plan, *, given: bool) -> str:
    """`100 nodes in FP16, 91 in FP32 (90 for hazards, 1 between these)`."""
    low, total = plan.precision.upper(), plan.float_nodes
    if not plan.decisions:
        return f"all {count(total, 'float node')} in {low}: {'as planned' if given else 'none needs FP32'}"
    fp32 = [d for d in plan.decisions if d.repair == "fp32"]
    reasons = {
        "for hazards": sum(d.rule in KINDS for d in fp32),
        "because it is free": sum(d.rule in FREE for d in fp32),
        "as asked": sum(d.rule == "user" for d in fp32),
    }
    rest = len(fp32) - sum(reasons.values())
    parts = [f"{number} {why}" for why, number in (*reasons.items(), ("between these", rest)) if number]
    bf16 = f", {len(plan.bf16)} in BF16" if plan.bf16 else ""
    if len(fp32) == total:
        return f"ALL {count(total, 'float node')} in FP32, nothing in {low} ({', '.join(parts)})"
    lowered = count(total - len(plan.decisions), "node")
    return f"{lowered} in {low}, {len(fp32)} in FP32 ({', '.join(parts)}){bf16}"


def _checks(result: FixResult) -> Iterator[Row]:
    """The checks that failed or could not be made, the goals, and the build."""
    for check in _checks_made(result):
        if check.passed is False:
            yield "Failed", f"{check.name}: {check.summary}"
            yield from (("", detail) for detail in check.details[:2])
        elif check.passed is None:
            yield "Missing", f"{check.name}: {check.summary}"
        elif check.name in GOALS:
            yield "Goal", check.summary
        elif check.name == "build":
            yield "Build", check.summary
