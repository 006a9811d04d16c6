"""The page of `probe`."""

from __future__ import annotations

from markupsafe import Markup

from rewriter.hazards.quirks import every_probe
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import columns, table
from rewriter.report.html.view import Cell, Fact, Page, Section, State, Tile
from rewriter.report.probe import use
from rewriter.runtime.engines.probe.answers import Answers
from rewriter.runtime.engines.probe.question import UNKNOWN, Answer

_LEAD = (
    "What the library does in FP16 on this GPU. Figures are relative L2 errors of small models against FP32, "
    "or microseconds where the question is about time. The answers are used for "
)


def page(found: Answers, command: str = "") -> Page:
    """Returns the page of one library's answers; `command` is the command line that gave them."""
    wrong = sum(value == "wrong" for value in found.values.values())
    origin = "recorded, not measured on this machine" if found.recorded else "measured on this machine"
    return Page(
        verb="probe",
        subject=found.title,
        verdict=f"{len(found.values)} of {len(every_probe())} questions answered, {origin}",
        state="warn" if found.recorded or len(found.values) < len(every_probe()) else "good",
        tiles=[Tile("Wrong", str(wrong), "answers that fix works around", "bad" if wrong else "good")],
        warnings=[],
        sections=[_section(found), run_section(command, facts=[Fact("Source", found.source or origin)])],
    )


def _section(found: Answers) -> Section:
    return Section("answers", found.title, f"{_LEAD}{use(found)}.", [_table(found)])


def _table(found: Answers) -> Markup:
    rows = []
    for probe in every_probe():
        answer = found.answers.get(probe.name, Answer(UNKNOWN, problem="not measured"))
        known = answer.value != UNKNOWN
        text = probe.values.get(answer.value, answer.value) if known else f"unknown: {answer.problem}"
        state: State = "bad" if answer.value == "wrong" else "plain" if known else "warn"
        figures = tuple(f"{name}: {value:.4g}" for name, value in answer.figures.items())
        meaning = Cell(text, names=figures, unit="figures")
        value = Cell(answer.value, state=state)
        rows.append([Cell(probe.name), Cell(probe.question), value, meaning, Cell(probe.used)])
    names = ("Probe", "Question", "Answer", "Meaning, and figures", "Used for")
    heads = columns(*names, choices=["Answer"], code=["Probe"])
    return table("answers-table", f"Questions and answers of {found.title}", heads, rows)
