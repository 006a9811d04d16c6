"""Shows the results of probes as a table and as JSON."""

from typing import Any

from rich.console import Console
from rich.text import Text

from rewriter.base.text import count
from rewriter.report.tables import Cell, Kind, Table
from rewriter.report.terminal import MORE, printed
from rewriter.target import Target
from rewriter.target.probes import UNKNOWN, Answer, Answers, plain_fields
from rewriter.target.quirks import every_probe


def print_result(result: Answers, out: Console, *, verbosity: int = 0) -> None:
    """Print the origin of the answers, and every question; verbosity -1: only the origin, 1: all figures."""
    origin = (
        "Recorded answers, not measured on this machine" if result.recorded else "Measured on this machine"
    )
    probes, answers = every_probe(), result.answers
    known = sum(probe.name in answers and answers[probe.name].value != UNKNOWN for probe in probes)
    total = count(len(probes), "question")
    out.print(Text(f"{origin}: {result.title} ({known} of {total} answered)"), soft_wrap=True)
    if verbosity < 0:
        return
    rows, verbose = [], verbosity > 0
    for probe in probes:
        answer = answers.get(probe.name, Answer(UNKNOWN, problem="not measured"))
        answered = answer.value != UNKNOWN
        text = probe.values.get(answer.value, answer.value) if answered else f"unknown: {answer.problem}"
        used = f" [{probe.name}] Used for: {probe.used}" if verbose and probe.used else ""
        most = len(answer.figures) if verbose else 3
        figures = [f"{name}: {value:.3g}" for name, value in answer.figures.items()]
        figures = [*figures[:most], *([f"{len(figures) - most} more"] if len(figures) > most else [])]
        cells = [probe.question + used, text, "; ".join(figures)]
        if verbose or probe.name in answers:
            rows.append([Cell(cell, state="plain" if answered else "warn") for cell in cells])
    columns: dict[str, Kind] = {"question": "text", "answer": "text", "figures": "text"}
    out.print(printed(Table(columns, rows)))
    if left := len(probes) - len(rows):
        out.print(Text(f"{left} were not measured ({MORE}); --ask asks them on a GPU"), soft_wrap=True)
    if result.source:
        out.print(Text(f"Source: {result.source}"), soft_wrap=True)
    out.print(Text(f"Used for: {use(result)}"), soft_wrap=True)


def as_dict(result: Answers) -> dict[str, Any]:
    return plain_fields(result)


def use(result: Answers) -> str:
    """The targets that use these answers."""
    if result.library == "onnxruntime":
        return "no target, since none is ONNX Runtime"
    if result.library == Target().library:
        return f"the target {result.library} (the default), with or without this release's number"
    return f"the target {result.library}, the default of `fix` where it judges"
