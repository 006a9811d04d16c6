"""Shows the result of `scan`: a summary, tables for those who ask for them, and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rewriter.hazards.kinds import KINDS, SEVERITIES, Severity
from rewriter.ir.english import count
from rewriter.ir.errors import RewriterError
from rewriter.jobs.findings import Finding, ScanResult
from rewriter.report.json import data_dict, document
from rewriter.report.terminal import (
    MORE,
    Row,
    about_target,
    data_rows,
    listed,
    new_table,
    print_report,
    time_line,
)

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": ""}


SHOWN: dict[Severity, int] = {"error": 5, "warning": 4, "note": 3}
"""Kinds of hazard that a summary lists."""

NAMED = 2
"""Nodes that a line of the summary names."""


def print_result(result: ScanResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the findings, worst first; see `print_report`."""
    commands = [("Next", command)] if (command := next_command(result)) else []
    details = partial(_sections, result)
    print_report(verdict_line(result), _rows(result), details, out, verbosity, commands)


def next_command(result: ScanResult) -> str:
    """The command that repairs what was found; "" if nothing needs it, or if the model has no file."""
    if not result.path or not result.reaches("warning"):
        return ""
    path = Path(str(result.path))
    options = [] if result.precision == "fp16" else ["--preset", f"trt-{result.precision}"]
    words = ["rewriter", "fix", str(path), "-o", f"{path.stem}.fixed.onnx", *options]
    words += ["--inputs", result.data.path or "YOUR_DATA.npz"]
    words += ["--image-preprocess", result.data.preprocess] if result.data.preprocess else []
    return shlex.join(words)


def verdict_line(result: ScanResult) -> Text:
    """One line with the number of findings of each severity."""
    worst: Severity = "error" if result.count("error") else "warning" if result.count("warning") else "note"
    counts = ", ".join(count(result.count(s), s) for s in reversed(SEVERITIES))
    name = str(result.path) if result.path else "the model"
    return Text(
        f"{name} in {result.precision.upper()}: {counts} ({count(result.float_nodes, 'float node')})",
        style=_STYLES[worst],
    )


def _by_repair(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups findings of one kind that one repair mends, the worst kind first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.repair), []).append(finding)
    return list(groups.values())


def _rows(result: ScanResult) -> Iterator[Row]:
    for severity in reversed(SEVERITIES):
        groups = _by_repair(f for f in result.findings if f.severity == severity)
        label = f"{severity.capitalize()}s"
        for members in groups[: SHOWN[severity]]:
            yield label, _summarised(members) + (_link(members) if severity == "note" else "")
            if severity != "note":
                yield label, f"-> {members[0].repair}{_link(members)}"
        if len(groups) > SHOWN[severity]:
            yield label, f"... and {count(len(groups) - SHOWN[severity], 'kind')} more: {MORE}"
    yield from data_rows(result.data, result.warnings)


def _summarised(findings: Sequence[Finding]) -> str:
    """`unfused-norm, 10 times: the worst reason [range]: nodes`."""
    worst = max(findings, key=lambda f: f.range.absmax if f.range else 0.0)
    nodes = [name for f in findings for name in f.nodes[:1]]
    times = f", {len(findings)} times" if len(findings) > 1 else ""
    worst_of = "at worst " if len(findings) > 1 and worst.range is not None else ""
    where = f": {listed(nodes, NAMED)}" if nodes else ""
    return f"{worst.kind}{times}: {worst_of}{worst.reason}{_evidence([worst])}{where}"


def _sections(result: ScanResult) -> Iterator[RenderableType]:
    for severity in reversed(SEVERITIES):
        found = [f for f in result.findings if f.severity == severity]
        if found:
            yield _findings(severity, found)
            yield ""
    yield Text(about_target(result.target))
    yield time_line(result.seconds)


def _findings(severity: Severity, findings: Sequence[Finding]) -> RenderableType:
    """One row per kind and repair, with every reason and node."""
    columns = ("kind", "found", "reason, nodes and repair")
    rows = new_table(f"{severity.capitalize()}s", *columns, right=("found",), whole="kind")
    for members in _by_repair(findings):
        text = Text("\n".join(f"{f.reason}{_evidence([f])}: {listed(f.nodes)}".rstrip(": ") for f in members))
        text.append(f"\n-> {members[0].repair}" + _link(members), style="green")
        rows.add_row(Text(members[0].kind, style=_STYLES[severity]), str(len(members)), text)
    return rows


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


def all_as_dict(results: Sequence[ScanResult], unread: Sequence[RewriterError]) -> dict[str, Any]:
    """Several results as one object, with the errors of models that could not be scanned."""
    counts = {severity: sum(r.count(severity) for r in results) for severity in reversed(SEVERITIES)}
    errors = [{"where": error.where, "what": error.what, "hint": error.hint} for error in unread]
    return document({"models": [as_dict(result) for result in results], "counts": counts, "unread": errors})
