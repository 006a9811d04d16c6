"""The page of `scan`."""

from __future__ import annotations

from rewriter.hazards.kinds import KINDS
from rewriter.jobs.findings import Finding, ScanResult
from rewriter.report import scan as text
from rewriter.report.html.depth import Nodes, depth_section
from rewriter.report.html.render import table_sections
from rewriter.report.html.run import run_section
from rewriter.report.html.view import Page
from rewriter.runtime.ranges.depth import TensorAtDepth


def page(result: ScanResult, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    lead = (
        "Every bar is one tensor, from its mean to its largest absolute value on the samples, measured in "
        "FP32. Its colour is that of the worst finding that its node is part of; a dot marks the tensor that "
        "is the evidence. The strip below shows where errors, warnings and notes are."
    )
    commands = [("Repairs what was found", text.next_command(result))]
    sections = [
        *depth_section(result.depth, _nodes(result), lead),
        *table_sections(text.tables(result)),
        run_section(command, commands, target=result.target, seconds=result.seconds),
    ]
    line, state = text.verdict_line(result), text.state(result)
    return Page("scan", result.path, line, state, list(text.rows(result)), sections)


def _nodes(result: ScanResult) -> Nodes:
    worst: dict[str, Finding] = {}
    for finding in reversed(result.findings):  # errors come first in the result, and win here
        worst.update(dict.fromkeys(finding.nodes, finding))

    def kind(tensor: TensorAtDepth) -> str:
        return worst[tensor.node].severity if tensor.node in worst else "sound"

    marks = {
        one.tensor: f"{KINDS[one.kind].title}: {one.reason}"
        for one in reversed(result.findings)
        if one.tensor and one.severity != "note"
    }
    labels = {"sound": "no finding", "note": "note", "warning": "warning", "error": "error"}
    return Nodes(kind, labels, marks, "Findings")
