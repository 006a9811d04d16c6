"""Shows the result of `scan`: a summary, tables for those who ask for them, and JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rewriter.base.errors import SEVERITIES, RewriterError, Severity
from rewriter.base.text import Row, command_line, count
from rewriter.jobs.scan import Finding, ScanResult
from rewriter.report.checks import check_dict, decisive, furthest, relation, size
from rewriter.report.json import attributes, data_dict, document
from rewriter.report.results import UNBUILDABLE
from rewriter.report.tables import Cell, Kind, State, Table, grouped, number, table
from rewriter.report.terminal import MORE, data_words, facts, last_rows, listed, print_report

STATES: Mapping[Severity, State] = {"error": "bad", "warning": "warn", "note": "plain"}

SHOWN: dict[Severity, int] = {"error": 5, "warning": 4, "note": 3}
"""Kinds of hazard that a summary lists."""

OUTPUTS = 4  # outputs whose errors a summary has
NAMED = 2  # nodes that a line of the summary names


def print_result(result: ScanResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the findings, worst first; see `print_report`."""
    commands = [("Next", next_command(result))]
    last = facts(result.target, result.seconds)
    line, all_tables = verdict_line(result), tables(result)
    print_report(line, state(result), rows(result), all_tables, out, verbosity, commands, last)


def next_command(result: ScanResult) -> str:
    """The command that repairs what was found; "" if nothing needs it, or if the model has no file."""
    if not result.path or not result.reaches("warning"):
        return ""
    path = Path(str(result.path))
    options = [] if result.precision == "fp16" else ["--preset", f"trt-{result.precision}"]
    words = ["rewriter", "fix", path, "-o", Path(f"{path.stem}.fixed.onnx"), *options]
    return command_line([*words, *data_words(result.data)])


def state(result: ScanResult) -> State:
    return "bad" if result.count("error") else "warn" if result.count("warning") else "good"


def verdict_line(result: ScanResult) -> str:
    counts = ", ".join(count(result.count(s), s) for s in reversed(SEVERITIES))
    nodes = count(result.float_nodes, "float node")
    line = f"{result.path or 'the model'} in {result.precision.upper()}: {counts} ({nodes})"
    if any(f.kind == "refused-operator" and f.severity == "error" for f in result.findings):
        return f"{line}; {UNBUILDABLE}"
    if result.plain is None or result.plain.passed is None:
        return line
    outcome = "passes" if result.plain.passed else "FAILS"
    doubt = f" on {result.data.doubt}" if result.data.doubt else ""
    return f"{line}; plain {result.precision.upper()} {outcome}{doubt}"


def _by_repair(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups findings of one kind, severity and repair, the worst kind first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind, finding.repair), []).append(finding)
    return list(groups.values())


def rows(result: ScanResult) -> Iterator[Row]:
    """The lines after the verdict: the error of each output, kinds of findings with their repairs."""
    if (plain := result.plain) is not None:
        low, whole = result.precision.upper(), (output for output in plain.outputs if not output.of)
        worst = sorted((decisive(o, plain.outputs) for o in whole), key=furthest, reverse=True)
        for output in worst[:OUTPUTS]:
            yield (
                "Error",
                f"{size(output)} in plain {low}, {relation(output)} ({output.unit} of {output.name})",
            )
    for severity in reversed(SEVERITIES):
        groups = _by_repair(f for f in result.findings if f.severity == severity)
        label = f"{severity.capitalize()}s"
        for members in groups[: SHOWN[severity]]:
            yield label, _summarised(members) + (_link(members[0]) if severity == "note" else "")
            if severity != "note":
                yield label, f"-> {members[0].repair}{_link(members[0])}"
        if len(groups) > SHOWN[severity]:
            yield label, f"... and {count(len(groups) - SHOWN[severity], 'kind')} more: {MORE}"
    yield from last_rows(result.data, result.warnings, result.seconds)


def _summarised(findings: Sequence[Finding]) -> str:
    """`unfused-norm, 10 times: the worst reason [range]: nodes`."""
    worst = max(findings, key=lambda f: f.range.absmax if f.range else 0.0)
    nodes = [name for f in findings for name in f.nodes[:1]]
    times = f", {len(findings)} times" if len(findings) > 1 else ""
    worst_of = "at worst " if len(findings) > 1 and worst.range is not None else ""
    evidence = f", range {worst.range}" if worst.range and str(worst.range) not in worst.reason else ""
    where = f": {listed(nodes, NAMED)}" if nodes else ""
    return f"{worst.kind}{times}: {worst_of}{worst.reason}{evidence}{where}"


def tables(result: ScanResult) -> Iterator[Table]:
    columns: dict[str, Kind] = {"Severity": "choice", "Kind": "choice"}
    columns |= {"Largest |x|": "number", "Reason, nodes and repair": "text"}
    rows = []
    for members in _by_repair(result.findings):
        first = members[0]
        for reason, alike in grouped(members, lambda finding: finding.reason):
            row = [
                Cell(first.severity, order=-SEVERITIES.index(first.severity), state=STATES[first.severity]),
                Cell(first.kind),
                number(max((f.range.absmax for f in alike if f.range), default=None)),
                Cell(
                    f"{reason}; {first.repair}{_link(first)}",
                    names=tuple(name for finding in alike for name in finding.nodes),
                ),
            ]
            rows.append(row)
    yield table("findings", "Findings", "Nodes that would go wrong, and their repair.", columns, rows)


def _link(finding: Finding) -> str:
    return f" ({finding.link})" if finding.link else ""


def as_dict(result: ScanResult) -> dict[str, Any]:
    own = {
        "input": result.path,
        "target": str(result.target),
        "probe": result.target.known_from or None,
        "data": data_dict(result.data),
        "counts": {severity: result.count(severity) for severity in reversed(SEVERITIES)},
    }
    own["plain"] = None if result.plain is None else check_dict(result.plain)
    names = ("precision", "float_nodes", "findings", "warnings", "seconds")
    return document({**own, **attributes(result, *names)})


def all_as_dict(results: Sequence[ScanResult], unread: Sequence[RewriterError]) -> dict[str, Any]:
    """Several results as one object, with the errors of models that could not be scanned."""
    counts = {severity: sum(r.count(severity) for r in results) for severity in reversed(SEVERITIES)}
    errors = [{"where": error.place or None, "what": error.what, "hint": error.hint} for error in unread]
    return document({"models": [as_dict(result) for result in results], "counts": counts, "unread": errors})
