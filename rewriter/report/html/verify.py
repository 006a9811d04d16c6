"""The page of `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rewriter.report import verify as text
from rewriter.report.checks import judging_check
from rewriter.report.html.outputs import output_cards
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import checks_table, number
from rewriter.report.html.typed_depth import typed_depth
from rewriter.report.html.view import Cell, Column, Fact, Page, Section, State, Table, Tile
from rewriter.verification.verify_result import VerifyResult


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
    )


def _tiles(result: VerifyResult) -> Iterator[Tile]:
    check = judging_check(result.checks)
    if check is not None:
        worst = max(check.outputs, key=lambda o: (not o.passed, o.relative_l2))
        state: State = "good" if worst.passed else "bad"
        value = f"{worst.relative_l2:.2g}" if worst.finite else "NaN or infinity"
        yield Tile("Largest error", value, f"of {worst.tolerance:.2g} allowed, at {worst.name}", state)
    yield Tile("Engine", result.engine, f"on {result.device}")
    if len(result.builds) > 1:
        failed = sum(build.error is None for build in result.builds)
        yield Tile("Builds", str(len(result.builds)), f"{failed} did not run" if failed else "all ran")
    if result.latency is not None:
        base = result.reference_latency
        note = f"± {result.latency.iqr_us:.1f}"
        if base is not None and base.median_us:
            note += f"; the original in FP32: {base.median_us:.1f} µs"
        yield Tile("Latency", f"{result.latency.median_us:.1f} µs", note)


def _sections(result: VerifyResult, command: str) -> Iterator[Section]:
    check = judging_check(result.checks)
    if check is not None:
        lead = (
            "Each output in its worst sample and build, element by element against the original in FP32. "
            "The histogram counts elements by their absolute error over the output's RMS."
        )
        yield Section("outputs", "Outputs", lead, [output_cards(check, result.outputs)])
    yield typed_depth(result.depth, {})
    if len(result.builds) > 1:
        yield Section(
            "builds", "Builds", "Builds of one model differ; the worst is judged.", [_builds(result)]
        )
    yield Section(
        "verification",
        "Checks",
        "Each step; one that was not done says why.",
        [checks_table([replace(check, pictures=()) for check in result.checks])],
    )
    facts = [
        Fact("Original", str(result.original or "in memory"), code=True),
        Fact("Fixed", str(result.fixed or "in memory"), code=True),
        Fact("Allowed", f"{result.tolerance.metric} {result.tolerance.value:.3g}: {result.tolerance.source}"),
    ]
    yield run_section(command, facts=facts, data=result.data, seconds=result.seconds)


def _builds(result: VerifyResult) -> Table:
    rows = []
    for run in result.builds:
        latency = run.latency
        rows.append(
            [
                number(run.number, "{:d}"),
                Cell(run.problem or run.status, state="warn" if run.problem else "good"),
                number(run.error),
                number(latency.median_us if latency else None, "{:.1f}"),
                number(latency.iqr_us if latency else None, "{:.1f}"),
            ]
        )
    columns = [
        Column("Build", number=True),
        Column("Result"),
        Column(result.tolerance.metric, number=True),
        Column("µs", number=True),
        Column("± µs", number=True),
    ]
    return Table("builds-table", "Builds of the fixed model", columns, rows)
