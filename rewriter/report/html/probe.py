"""The page of `probe`."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.engines.probe.answers import Answers
from rewriter.engines.probe.ask import PROBES
from rewriter.engines.probe.question import UNKNOWN, Answer
from rewriter.report.html.run import run_section
from rewriter.report.html.view import Cell, Column, Fact, Page, Section, State, Table, Tile
from rewriter.report.probe import use

_LEAD = (
    "What the library does in FP16 on this GPU. Figures are relative L2 errors of small models against FP32, "
    "or microseconds where the question is about time."
)


def page(found: Answers, command: str = "") -> Page:
    """Returns the page of one library's answers; `command` is the command line that gave them."""
    known = len(found.values)
    wrong = sum(value == "wrong" for value in found.values.values())
    return Page(
        verb="probe",
        subject=found.title,
        verdict=f"{known} of {len(PROBES)} questions answered, {_origin(found)}",
        state="warn" if found.recorded or known < len(PROBES) else "good",
        tiles=[
            Tile("Answered", str(known), f"of {len(PROBES)} questions"),
            Tile("Wrong", str(wrong), "answers that fix works around", "bad" if wrong else "good"),
            Tile("Release", f"{found.library} {found.version}"),
            Tile("GPU", found.gpu, found.driver and f"driver {found.driver}"),
        ],
        warnings=[],
        sections=[
            Section("answers", "Answers", _LEAD, [_table(found)]),
            run_section(command, facts=_facts(found)),
        ],
    )


def page_of_recorded(found: Sequence[Answers], command: str = "") -> Page:
    """Returns the page of a machine that cannot measure: the answers that come with the package."""
    return Page(
        verb="probe",
        subject="Recorded answers",
        verdict="Nothing can be measured here; these answers were recorded on other machines",
        state="warn",
        tiles=[
            Tile(
                f"{a.library} {a.version}",
                f"{len(a.values)} of {len(PROBES)}",
                f"questions answered, on {a.gpu}",
            )
            for a in found
        ],
        warnings=["`rewriter probe` on the machine with the GPU measures that GPU and its release."],
        sections=[
            *(
                Section(
                    f"answers-{i}",
                    answers.title,
                    f"{_LEAD} The answers are used for {use(answers)}.",
                    [_table(answers, i)],
                )
                for i, answers in enumerate(found)
            ),
            run_section(command),
        ],
    )


def _origin(found: Answers) -> str:
    return "recorded, not measured on this machine" if found.recorded else "measured on this machine"


def _facts(found: Answers) -> list[Fact]:
    return [Fact("Used for", use(found)), Fact("Source", found.source or _origin(found))]


def _table(found: Answers, place: int = 0) -> Table:
    rows = []
    for probe in PROBES:
        answer = found.answers.get(probe.name, Answer(UNKNOWN, problem="not measured"))
        known = answer.value != UNKNOWN
        text = probe.values.get(answer.value, answer.value) if known else f"unknown: {answer.problem}"
        state: State = "bad" if answer.value == "wrong" else "plain" if known else "warn"
        figures = tuple(f"{name}: {value:.4g}" for name, value in answer.figures.items())
        rows.append(
            [
                Cell(probe.name),
                Cell(probe.question),
                Cell(answer.value, state=state),
                Cell(text, names=figures, unit="figures"),
                Cell(probe.used),
            ]
        )
    columns = [
        Column("Probe", code=True),
        Column("Question"),
        Column("Answer", choices=True),
        Column("Meaning, and figures"),
        Column("Used for"),
    ]
    return Table(f"answers-table-{place}", "Every question with its answer", columns, rows)
