"""Shows the result of `scan`: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rewriter.hazards.kinds import KINDS, SEVERITIES, Severity
from rewriter.jobs.findings import Finding, ScanResult
from rewriter.report.json import data_dict, document
from rewriter.report.terminal import (
    about_target,
    closing_lines,
    first_lines,
    grouped,
    listed,
    new_table,
    print_report,
)

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": ""}


def print_result(result: ScanResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the findings, worst first; see `print_report`."""
    print_report(partial(_sections, result), verdict_line(result), out, verbosity)


def verdict_line(result: ScanResult) -> Text:
    """One line with the number of findings of each severity."""
    worst: Severity = "error" if result.count("error") else "warning" if result.count("warning") else "note"
    counts = ", ".join(_counted(result.count(s), s) for s in reversed(SEVERITIES))
    name = str(result.path) if result.path else "the model"
    return Text(
        f"{name} in {result.precision.upper()}: {counts} ({result.float_nodes} float nodes)",
        style=_STYLES[worst],
    )


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def _sections(result: ScanResult, limit: int | None) -> Iterator[RenderableType]:
    for severity in reversed(SEVERITIES):
        found = [f for f in result.findings if f.severity == severity]
        if found:
            yield _findings(severity, found, limit)
            yield ""
    yield Text(about_target(result.target))
    yield from closing_lines(result.data, result.warnings, result.seconds)


def _findings(severity: Severity, findings: Sequence[Finding], limit: int | None) -> RenderableType:
    """One row per kind and repair, with reasons and nodes."""
    columns = ("kind", "found", "reason, nodes and repair")
    rows = new_table(f"{severity.capitalize()}s", *columns, right=("found",), whole="kind")
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.repair), []).append(finding)
    for (kind, repair), members in groups.items():
        text = Text("\n".join(_lines(members, limit)))
        text.append(f"\n-> {repair}" + _link(members), style="green")
        rows.add_row(Text(kind, style=_STYLES[severity]), str(len(members)), text)
    return rows


def _lines(findings: Sequence[Finding], limit: int | None) -> list[str]:
    lines = []
    for text, members in (
        grouped(findings, lambda f: f.reason) if limit else [(f.reason, [f]) for f in findings]
    ):
        names = [name for f in members for name in (f.nodes if limit is None else f.nodes[:1])]
        where = f": {listed(names, limit and 2)}" if names else ""
        lines.append(f"{text}{_evidence(members)}{where}")
    return first_lines(lines, limit)


def _evidence(findings: Sequence[Finding]) -> str:
    """The widest range of the findings, unless their reason has it."""
    ranges = [f.range for f in findings if f.range is not None and str(f.range) not in f.reason]
    return f", range {max(ranges, key=lambda r: r.absmax)}" if ranges else ""


def _link(findings: Sequence[Finding]) -> str:
    return f" ({findings[0].link})" if findings[0].link else ""


def as_dict(result: ScanResult) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes, in a fixed order."""
    fields = {
        "input": str(result.path) if result.path else None,
        "precision": result.precision,
        "target": str(result.target),
        "probe": result.target.known_from or None,
        "data": data_dict(result.data),
        "float_nodes": result.float_nodes,
        "counts": {severity: result.count(severity) for severity in reversed(SEVERITIES)},
        "findings": [{**asdict(f), "rung": KINDS[f.kind].rung} for f in result.findings],
        "warnings": result.warnings,
        "seconds": result.seconds,
    }
    return document(fields)
