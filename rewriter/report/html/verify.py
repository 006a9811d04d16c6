"""The page of `verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rewriter.judge.verdict import Check
from rewriter.judge.verify_result import VerifyResult
from rewriter.report import verify as text
from rewriter.report.checks import judging_check
from rewriter.report.html.outputs import adding_most, error_tile, output_cards
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import checks_table
from rewriter.report.html.view import Fact, Page, Section, Tile


def page(result: VerifyResult, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    return Page(
        verb="verify",
        subject=str(result.fixed) if result.fixed else "a model in memory",
        verdict=text.verdict_line(result).plain,
        state="good" if result.passed else "bad",
        tiles=list(_tiles(result)),
        warnings=list(result.warnings),
        sections=list(_sections(result, command)),
        reasons=list(_reasons(result, [check for check in result.checks if check.passed is False])),
    )


def _reasons(result: VerifyResult, failed: Sequence[Check]) -> Iterator[Fact]:
    """The causes of a failure, its nodes, and what to do."""
    yield from (Fact("Cause", f"{check.name}: {check.summary}") for check in failed)
    yield from adding_most(failed)
    if failed and result.original and result.fixed:
        command = f"rewriter locate {result.original} {result.fixed}"
        yield Fact("What to do", f"`{command}` names the first tensor that goes wrong")


def _tiles(result: VerifyResult) -> Iterator[Tile]:
    check = judging_check(result.checks)
    if check is not None:
        yield error_tile(check, failed=not result.passed)
    yield Tile("Engine", result.engine, f"on {result.device}")
    if len(result.builds) > 1:
        failed = sum(build.error is None for build in result.builds)
        note = f"{failed} did not run" if failed else "all ran; the worst is judged"
        yield Tile("Builds", str(len(result.builds)), note)
    if result.latency is not None:
        base = result.reference_latency
        note = f"± {result.latency.iqr_us:.1f}"
        if base is not None and base.median_us:
            note += f"; the original in FP32: {base.median_us:.1f} µs"
        yield Tile("Latency", f"{result.latency.median_us:.1f} µs", note)


def _sections(result: VerifyResult, command: str) -> Iterator[Section]:
    check = judging_check(result.checks)
    if check is not None:
        lead = "Each output in its worst sample and build, element by element against the original in FP32."
        yield Section("outputs", "Outputs", lead, [output_cards(check, result.outputs, result.data)])
    lead = "Each step; one that was not done says why."
    yield Section("verification", "Checks", lead, [checks_table(result.checks)])
    facts = [
        Fact("Original", str(result.original or "in memory"), code=True),
        Fact("Fixed", str(result.fixed or "in memory"), code=True),
        Fact("Allowed", f"{result.tolerance.metric} {result.tolerance.value:.3g}: {result.tolerance.source}"),
    ]
    yield run_section(command, facts=facts, data=result.data, seconds=result.seconds)
