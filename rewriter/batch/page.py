"""The summary of a batch as a page."""

from __future__ import annotations

from pathlib import Path

from rewriter.batch.entry import Outcome, Record
from rewriter.batch.summary import Summary, error, share, verdict_on
from rewriter.english import count
from rewriter.model import write_text
from rewriter.report.html.render import html
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import number, without_empty
from rewriter.report.html.view import Cell, Column, Fact, Page, Section, State, Table, Tile


def write(summary: Summary, path: Path, command: str) -> None:
    """Write the page; `command` is the command line that made it.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text(html(page(summary, command)), path)


def page(summary: Summary, command: str = "") -> Page:
    """Returns the page of a batch."""
    facts = [Fact("Ran on", summary.where), Fact("Wall time", f"{summary.seconds:.1f} s")]
    lead = "One line for each model. A click on a heading sorts."
    return Page(
        verb="batch",
        subject=count(len(summary.records), "model"),
        verdict=summary.verdict,
        state="good" if summary.passed else "bad",
        tiles=[Tile(ending.capitalize(), str(number)) for ending, number in sorted(summary.endings.items())],
        warnings=[],
        sections=[
            Section("models", "Models", lead, [_table(summary)]),
            run_section(command, facts=facts),
        ],
    )


def _table(summary: Summary) -> Table:
    columns = [
        Column("Model", code=True),
        Column("Verdict", choices=True),
        Column("FP32 nodes"),
        Column("Relative L2", number=True),
        *(Column(gpu, choices=True) for gpu in summary.gpus),
        Column("Seconds", number=True),
        Column("Memory, GiB", number=True),
        Column("Summary"),
    ]
    rows = [_row(record, summary) for record in summary.records]
    return without_empty(Table("models-table", "Models of this batch", columns, rows))


def _row(record: Record, summary: Summary) -> list[Cell]:
    outcome = record.outcome
    verdicts = [record.verdicts.get(gpu) for gpu in summary.gpus]
    return [
        Cell(record.entry.name),
        Cell(outcome.ending, state=_state(outcome)),
        Cell(share(outcome)),
        Cell(error(outcome), order=outcome.error),
        *(Cell(verdict_on(one), state=_state(one)) if one else Cell("") for one in verdicts),
        number(outcome.seconds, "{:.1f}"),
        number(outcome.peak_bytes / 2**30 or None, "{:.1f}"),
        Cell(outcome.text + ("; finished in an earlier run" if record.skipped else "")),
    ]


def _state(outcome: Outcome) -> State:
    return "warn" if outcome.ending == "unchecked" else "good" if outcome.passed else "bad"
