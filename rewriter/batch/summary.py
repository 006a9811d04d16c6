"""The progress of a batch and its summary: lines on the terminal, JSON, JUnit, and a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from rewriter.batch.models import Entry
from rewriter.batch.state import Outcome, Record
from rewriter.ir.english import count, printable
from rewriter.ir.model import write_text
from rewriter.report.html.render import html
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import number, table
from rewriter.report.html.view import Cell, Column, Fact, Page, Section, State, Tile
from rewriter.report.json import document
from rewriter.report.signals import listening
from rewriter.report.terminal import console, new_table

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bars:
    """A line on stderr for each model that ended; on a terminal also a bar, and a line for each that runs."""

    def __init__(self, bars: Progress, total: int, check: Callable[[], None], *, shown: bool = True) -> None:
        self.bars, self.total, self.tick, self.shown = bars, total, check, shown
        self.done = 0
        self.whole = bars.add_task("all models", total=total)
        self.running: dict[tuple[str, str], TaskID] = {}

    def started(self, entry: Entry, gpu: str = "") -> None:
        """Adds the line of a model."""
        on = f" on {gpu}" if gpu else ""
        self.running[entry.name, gpu] = self.bars.add_task(f"{entry.name}{on}", total=None)

    def ended(self, record: Record, gpu: str = "") -> None:
        """Prints the line of a model that ended, and moves the bar."""
        self.done += not gpu
        name = f"{record.entry.name} on {gpu}" if gpu else record.entry.name
        outcome = record.outcomes[name]
        when = "earlier" if record.skipped else f"{outcome.seconds:.1f} s"
        if (record.entry.name, gpu) in self.running:
            self.bars.remove_task(self.running.pop((record.entry.name, gpu)))
        if self.shown:
            text = f"[{self.done}/{self.total}] {name}: {outcome.ending}, {when}"
            self.bars.console.print(text, soft_wrap=True)
        self.bars.update(self.whole, completed=self.done)


@contextmanager
def display(total: int, *, shown: bool) -> Iterator[Bars]:
    """Shows the progress of `total` models on stderr; Ctrl-C and requests to end come out of `tick`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    stderr = console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    hidden = not (shown and stderr.is_terminal)
    progress = Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True, disable=hidden)
    with listening() as signals, progress as bars:
        yield Bars(bars, total, signals.check, shown=shown)


@dataclass(frozen=True)
class Summary:
    """All models of a batch.

    Attributes:
        where: What ran them, such as `2 jobs on this machine`.
        seconds: Wall time of the whole batch.
    """

    records: Sequence[Record]
    gpus: Sequence[str]
    where: str
    seconds: float

    @property
    def passed(self) -> bool:
        """True if every model passed."""
        return all(record.passed for record in self.records)

    @property
    def verdict(self) -> str:
        """One sentence."""
        passed = sum(record.passed for record in self.records)
        skipped = sum(record.skipped for record in self.records)
        earlier = f"; {skipped} finished in an earlier run" if skipped else ""
        return f"{passed} of {count(len(self.records), 'model')} passed{earlier}"

    @property
    def endings(self) -> Mapping[str, int]:
        """How many models ended in which way."""
        return Counter(record.outcome.ending for record in self.records)


def _share(outcome: Outcome) -> str:
    """`6 of 44`: nodes in FP32, of all float nodes; `all` where a repair left nothing in FP16."""
    if outcome.all_fp32:
        return "all"
    return "" if outcome.fp32_nodes is None else f"{outcome.fp32_nodes} of {outcome.float_nodes}"


def _error(outcome: Outcome) -> str:
    return "" if outcome.error is None else f"{outcome.error:.3g}"


def _verdicts(record: Record, gpus: Sequence[str]) -> Iterator[tuple[str, State | None]]:
    """The verdict on each type of GPU in a cell."""
    for gpu in gpus:
        outcome = record.verdicts.get(gpu)
        text = f"{outcome.ending} {_error(outcome)}".strip() if outcome else ""
        yield text, _state(outcome) if outcome else None


def _state(outcome: Outcome) -> State:
    return "warn" if outcome.ending == "unchecked" else "good" if outcome.passed else "bad"


# -- on the terminal ----------------------------------------------------------------------------

STYLES: Mapping[State | None, str] = {"good": "green", "warn": "yellow", "bad": "bold red", None: ""}


def print_summary(summary: Summary, out: Console, *, quiet: bool = False) -> None:
    """Print a table of the models, what to know about those that did not pass, and the verdict."""
    if not quiet:
        columns = ("model", "verdict", "FP32 nodes", "rel. L2", *summary.gpus, "s", "GiB")
        # names are folded where the terminal is narrow: a number that is cut is another number
        table = new_table("", *columns, right=("FP32 nodes", "rel. L2", "s", "GiB"))
        for record in summary.records:
            outcome = record.outcome
            verdicts = [Text(text, style=STYLES[state]) for text, state in _verdicts(record, summary.gpus)]
            seconds = "earlier" if record.skipped else f"{outcome.seconds:.1f}"
            memory = f"{outcome.peak_bytes / 2**30:.1f}" if outcome.peak_bytes else ""
            ending = Text(outcome.ending, style=STYLES[_state(outcome)])
            shown = ending, _share(outcome), _error(outcome)
            table.add_row(record.entry.name, *shown, *verdicts, seconds, memory)
        out.print(table)
        out.print()
        for name, outcome in _outcomes(summary):
            if not outcome.passed:
                out.print(Text(f"{name}: {outcome.text}"), soft_wrap=True)
    text = f"{summary.verdict} ({summary.seconds:.1f} s, {summary.where})"
    out.print(Text(text, style="bold green" if summary.passed else "bold red"), soft_wrap=True)


def _outcomes(summary: Summary) -> Iterator[tuple[str, Outcome]]:
    return (pair for record in summary.records for pair in record.outcomes.items())


# -- JSON ---------------------------------------------------------------------------------------


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as objects that `json.dumps` takes."""
    return document(
        {
            "passed": summary.passed,
            "verdict": summary.verdict,
            "endings": dict(summary.endings),
            "where": summary.where,
            "seconds": summary.seconds,
            "models": [_record(record) for record in summary.records],
        }
    )


def _record(record: Record) -> dict[str, Any]:
    return {
        "name": record.entry.name,
        "input": str(record.entry.model),
        "output": str(record.entry.output) if record.outcome.files else None,
        "passed": record.passed,
        "skipped": record.skipped,
        **asdict(record.outcome),
        "verified_on": {gpu: asdict(verdict) for gpu, verdict in record.verdicts.items()},
    }


# -- JUnit: no standard, but what Jenkins, GitLab and GitHub's reporters read -------------------

FAILURES = ("failed", "unbuildable")
"""Endings that are a verdict on the model; the others are errors of the run."""

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 (section 2.2) does not allow."""


def as_junit(summary: Summary) -> str:
    """The text of an XML file: a test case for each model, and for each GPU that it was verified on."""
    outcomes = [outcome for _, outcome in _outcomes(summary)]
    failures = sum(outcome.ending in FAILURES for outcome in outcomes)
    errors = sum(not outcome.passed for outcome in outcomes) - failures
    counts = {"tests": str(len(outcomes)), "failures": str(failures), "errors": str(errors)}
    suites = Element("testsuites", counts)
    suite = SubElement(suites, "testsuite", {**counts, "name": "rewriter batch"})
    suite.set("time", f"{summary.seconds:.3f}")
    for name, outcome in _outcomes(summary):
        case = SubElement(suite, "testcase", name=_xml(name), classname="rewriter.batch")
        case.set("time", f"{outcome.seconds:.3f}")
        if not outcome.passed:
            kind = "failure" if outcome.ending in FAILURES else "error"
            part = SubElement(case, kind, type=outcome.ending, message=_xml(outcome.text))
            part.text = _xml(f"{name}: {outcome.text}")
    indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("?", printable(text))


# -- a page -------------------------------------------------------------------------------------


def write_page(summary: Summary, path: Path, command: str) -> None:
    """Write the page; `command` is the command line that made it.

    Raises:
        OutputError: the file cannot be written.
    """
    facts = [Fact("Ran on", summary.where), Fact("Wall time", f"{summary.seconds:.1f} s")]
    lead = "One line for each model. A click on a heading sorts."
    page = Page(
        verb="batch",
        subject=count(len(summary.records), "model"),
        verdict=summary.verdict,
        state="good" if summary.passed else "bad",
        tiles=[Tile(ending.capitalize(), str(models)) for ending, models in sorted(summary.endings.items())],
        warnings=[],
        sections=[
            Section("models", "Models", lead, [_table(summary)]),
            run_section(command, facts=facts),
        ],
    )
    write_text(html(page), path)


def _table(summary: Summary) -> Markup:
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
    return table("models-table", "Models of this batch", columns, rows)


def _row(record: Record, summary: Summary) -> list[Cell]:
    outcome = record.outcome
    verdicts = _verdicts(record, summary.gpus)
    return [
        Cell(record.entry.name),
        Cell(outcome.ending, state=_state(outcome)),
        Cell(_share(outcome)),
        Cell(_error(outcome), order=outcome.error),
        *(Cell(text, state=state) if state else Cell(text) for text, state in verdicts),
        number(outcome.seconds, "{:.1f}"),
        number(outcome.peak_bytes / 2**30 or None, "{:.1f}"),
        Cell(outcome.text + ("; finished in an earlier run" if record.skipped else "")),
    ]
