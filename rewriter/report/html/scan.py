"""The page of `scan`."""

from __future__ import annotations

from markupsafe import Markup

from rewriter.hazards.kinds import KINDS, SEVERITIES, Severity
from rewriter.jobs.findings import Finding, ScanResult
from rewriter.report import scan as text
from rewriter.report.html.depth import Nodes, beyond_limits, depth_section
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import columns, listing, number, table
from rewriter.report.html.view import Cell, Page, Section, State, Tile
from rewriter.runtime.ranges.depth import TensorAtDepth

STATES: dict[Severity, State] = {"error": "bad", "warning": "warn", "note": "plain"}


def page(result: ScanResult, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    state: State = "bad" if result.count("error") else "warn" if result.count("warning") else "good"
    return Page(
        verb="scan",
        subject=str(result.path) if result.path else "a model in memory",
        verdict=text.verdict_line(result).plain,
        state=state,
        tiles=[_tile(result, severity) for severity in reversed(SEVERITIES)]
        + [Tile("Float nodes", str(result.float_nodes), f"that would compute in {result.precision.upper()}")],
        warnings=list(result.warnings),
        sections=[
            _depth(result),
            Section("findings", "Findings", "What would go wrong, and what repairs it.", [_table(result)]),
            run_section(
                command,
                target=result.target,
                data=result.data,
                seconds=result.seconds,
                repair=text.next_command(result),
            ),
        ],
    )


def _tile(result: ScanResult, severity: Severity) -> Tile:
    found = [f for f in result.findings if f.severity == severity]
    kinds = sorted({f.kind for f in found})
    state = STATES[severity] if found else "plain"
    return Tile(f"{severity.capitalize()}s", str(len(found)), ", ".join(kinds), state)


def _depth(result: ScanResult) -> Section:
    lead = (
        "Every bar is one tensor, from its mean to its largest absolute value on the samples, measured in "
        "FP32. Its colour is that of the worst finding that its node is part of; a dot marks the tensor that "
        "is the evidence. The strip below shows where errors, warnings and notes are."
    )
    return depth_section(result.depth, _nodes(result), lead, "No tensor could be measured.")


def _nodes(result: ScanResult) -> Nodes:
    worst: dict[str, Finding] = {}
    for finding in reversed(result.findings):  # errors come first in the result, and win here
        worst.update(dict.fromkeys(finding.nodes, finding))

    def kind(tensor: TensorAtDepth) -> str:
        return worst[tensor.node].severity if tensor.node in worst else "sound"

    serious = [finding for finding in reversed(result.findings) if finding.severity != "note"]
    evidence = {finding.tensor: finding for finding in serious if finding.tensor}

    def mark(tensor: TensorAtDepth) -> str:
        found = evidence.get(tensor.tensor) or worst.get(tensor.node)
        if found is None or found.severity == "note":
            return ""
        near = tensor.tensor if tensor.constant else None
        shown = found.tensor in (near, tensor.tensor) or beyond_limits(tensor.range)
        return f"{KINDS[found.kind].title}: {found.reason}" if shown else ""

    labels = {"sound": "no finding", "note": "note", "warning": "warning", "error": "error"}
    return Nodes(kind, labels, mark, "evidence", "Findings")


def _table(result: ScanResult) -> Markup:
    rows = []
    for finding in result.findings:
        severity = finding.severity
        rows.append(
            [
                Cell(severity, order=-SEVERITIES.index(severity), state=STATES[severity]),
                Cell(finding.kind, names=(KINDS[finding.kind].title,)),
                listing(finding.reason, finding.nodes),
                number(finding.range.absmax if finding.range else None),
                Cell(finding.repair + (f" ({finding.link})" if finding.link else "")),
            ]
        )
    heads = columns(
        "Severity",
        "Kind",
        "Reason, and which nodes",
        "Largest |x|",
        "Repair",
        numbers=["Largest |x|"],
        choices=["Severity", "Kind"],
    )
    return table("findings-table", "Findings, errors first", heads, rows, "Nothing was found.")
