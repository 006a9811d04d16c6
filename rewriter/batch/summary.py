"""The summary of a batch, and the closed loop of its recording: a table on the terminal, JSON and JUnit."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os.path import commonpath, relpath
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.console import Console
from rich.text import Text

from rewriter.api import fix
from rewriter.base.stopwatch import Progress
from rewriter.base.text import count, one_line
from rewriter.batch.machine import outcome_of
from rewriter.batch.models import Entry, Outcome, page_of
from rewriter.jobs.closed_loop.job import loop_of
from rewriter.jobs.closed_loop.result import LoopResult
from rewriter.pipeline.options import FixOptions
from rewriter.report.html.pipeline import page
from rewriter.report.html.render import html
from rewriter.report.json import document
from rewriter.report.pipeline import FileLine, files_table, latency, rows, verdict_line
from rewriter.report.pipeline import as_dict as loop_dict
from rewriter.report.tables import State
from rewriter.report.terminal import print_rows, printed
from rewriter.runtime.recording.record import Recording


@dataclass(frozen=True)
class Summary:
    """All models of a batch."""

    records: Sequence[tuple[Entry, Outcome]]
    where: str  # what ran them, such as `2 jobs on this machine`
    seconds: float = 0.0
    recording: Recording | None = None  # of a pipeline, as is the loop
    loop: LoopResult | None = None

    @property
    def passed(self) -> bool:
        looped = self.loop is None or self.loop.passed is not False
        return looped and all(outcome.passed for _, outcome in self.records)

    @property
    def verdict(self) -> str:
        passed = sum(outcome.passed for _, outcome in self.records)
        skipped = sum(outcome.skipped for _, outcome in self.records)
        earlier = f"; {skipped} finished in an earlier run" if skipped else ""
        models = f"{passed} of {count(len(self.records), 'model')} passed{earlier}"
        return models if self.loop is None else f"{verdict_line(self.loop)}; {models}"


def closed_loop(folder: Path, summary: Summary, limit_s: float, progress: Progress) -> Summary:
    """Runs the script of a recording with the files that were written, for `limit_s` seconds at most.

    Returns the summary, whose models are the files of `folder`, with the loop and its repairs.
    """
    recording, records = Recording.read(folder), summary.records
    named = dict(zip((file.name for file in recording.files), (entry for entry, _ in records), strict=True))
    outcomes = {entry.name: outcome for entry, outcome in records}
    fixed = {name: entry.output for name, entry in named.items() if outcomes[entry.name].files}
    summary = replace(summary, recording=recording)
    if not limit_s or not fixed:
        return summary

    def fixing(name: str, model: str, output: Path, options: FixOptions) -> None:
        entry, result = named[name], fix(model, output, options)
        outcomes[entry.name] = replace(outcome_of(entry, result), seconds=outcomes[entry.name].seconds)

    options = FixOptions(**{name: value for name, value in records[0][0].options.items() if name != "inputs"})
    loop = loop_of(folder, fixed, options, limit_s, progress, fixing)
    return replace(summary, loop=loop, records=[(entry, outcomes[entry.name]) for entry, _ in records])


def print_summary(summary: Summary, out: Console, *, quiet: bool = False) -> None:
    """Print a table of the models, what to know about those that did not pass, and the verdict."""
    if not quiet:
        table = files_table(_line(*record)._replace(latency="") for record in summary.records)
        out.print(printed(replace(table, title="")))
        out.print()
        for entry, outcome in summary.records:
            if not outcome.passed:
                out.print(Text(f"{entry.name}: {outcome.text}"), soft_wrap=True)
        if summary.loop is not None and summary.loop.fixed is not None:
            print_rows(rows(summary.loop), out)
    text = f"{summary.verdict} ({summary.seconds:.1f} s, {summary.where})"
    out.print(Text(text, style="bold green" if summary.passed else "bold red"), soft_wrap=True)


def _line(entry: Entry, outcome: Outcome, page: str = "") -> FileLine:
    state: State = "good" if outcome.ending == "verified" else "warn" if outcome.passed else "bad"
    share = "" if outcome.fp32_nodes is None else f"{outcome.fp32_nodes} of {outcome.float_nodes}"
    seconds = "earlier" if outcome.skipped else f"{outcome.seconds:.1f}"
    shares = latency(outcome.latency_shares)
    return FileLine(entry.name, outcome.ending, state, share, outcome.error, shares, seconds, page)


def as_page(summary: Summary, path: Path, command: str = "") -> str:
    """The text of a page with all models, each with a link to its own page, for a file at `path`."""
    lines = []
    for entry, outcome in summary.records:
        own = page_of(entry.output)
        there = quote(Path(relpath(own, path.parent)).as_posix()) if own.name in outcome.files else ""
        lines.append(_line(entry, outcome, there))
    facts = [("Failed", f"{entry.name}: {o.text}") for entry, o in summary.records if not o.passed]
    facts += [] if summary.loop is None else rows(summary.loop)
    facts += [("Run", f"{summary.where}, {summary.seconds:.0f} s")]
    state: State = "good" if summary.passed else "bad"
    verdict, recording, loop = summary.verdict, summary.recording, summary.loop
    folder = commonpath([entry.output.parent for entry, _ in summary.records])
    return html(page(folder, verdict, state, facts, lines, command, recording, loop))


def as_dict(summary: Summary) -> dict[str, Any]:
    return document(
        {
            "passed": summary.passed,
            "verdict": summary.verdict,
            "endings": dict(Counter(outcome.ending for _, outcome in summary.records)),
            "where": summary.where,
            "seconds": summary.seconds,
            "loop": loop_dict(summary.loop),
            "models": [
                {
                    "name": entry.name,
                    "input": str(entry.model),
                    "output": str(entry.output) if outcome.files else None,
                    "passed": outcome.passed,
                    **asdict(outcome),
                }
                for entry, outcome in summary.records
            ],
        }
    )


FAILURES = ("failed", "unbuildable")
"""Endings that are a verdict on the model; the others are errors of the run."""


def as_junit(summary: Summary) -> str:
    """The text of an XML file as Jenkins, GitLab and GitHub read it: a test case for each model."""
    cases = list[tuple[str, float, str, str, str]]()  # name, seconds, "" or kind of failure, type, text
    for entry, outcome in summary.records:
        kind = "" if outcome.passed else "failure" if outcome.ending in FAILURES else "error"
        cases.append((entry.name, outcome.seconds, kind, outcome.ending, outcome.text))
    if summary.loop is not None:
        kind = "failure" if summary.loop.passed is False else ""
        cases.append(("closed loop", summary.loop.seconds, kind, "failed", verdict_line(summary.loop)))
    counts = {f"{kind}s": str(sum(case[2] == kind for case in cases)) for kind in ("failure", "error")}
    counts = {"tests": str(len(cases)), **counts}
    suites = Element("testsuites", counts)
    suite = SubElement(suites, "testsuite", {**counts, "name": "rewriter batch"})
    suite.set("time", f"{summary.seconds:.3f}")
    for name, seconds, kind, ending, text in cases:
        case = SubElement(suite, "testcase", name=_xml(name), classname="rewriter.batch")
        case.set("time", f"{seconds:.3f}")
        more = {"type": ending, "message": _xml(text)} if kind else {}
        SubElement(case, kind or "system-out", more).text = _xml(f"{name}: {text}" if kind else text)
    indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return one_line(text).encode(errors="replace").decode()
