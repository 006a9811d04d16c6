"""The summary of a batch: lines on the terminal, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rewriter.batch.entry import Ending, Outcome, Record
from rewriter.english import count
from rewriter.report.json import document
from rewriter.report.terminal import new_table

STYLES: Mapping[Ending, str] = {
    "verified": "green",
    "unchecked": "yellow",
    "failed": "bold red",
    "unbuildable": "bold red",
    "refused": "bold red",
    "crashed": "bold red",
    "timed out": "bold red",
    "not run": "bold red",
}


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


def share(outcome: Outcome) -> str:
    """`6 of 44`: nodes in FP32, of all float nodes; `all` where a repair left nothing in FP16."""
    if outcome.all_fp32:
        return "all"
    return "" if outcome.fp32_nodes is None else f"{outcome.fp32_nodes} of {outcome.float_nodes}"


def error(outcome: Outcome) -> str:
    """The error with three digits; "" if there is none."""
    return "" if outcome.error is None else f"{outcome.error:.3g}"


def verdict_on(outcome: Outcome) -> str:
    """A verdict on one type of GPU in a cell."""
    return " ".join(filter(None, (outcome.ending, error(outcome))))


def print_summary(summary: Summary, out: Console, *, quiet: bool = False) -> None:
    """Print a table of the models, what to know about those that did not pass, and the verdict."""
    if not quiet:
        out.print(_table(summary))
        out.print()
        for record in summary.records:
            for gpu, outcome in (("", record.outcome), *record.verdicts.items()):
                if not outcome.passed:
                    on = f" on {gpu}" if gpu else ""
                    out.print(Text(f"{record.entry.name}{on}: {outcome.text}"), soft_wrap=True)
    style = "bold green" if summary.passed else "bold red"
    text = f"{summary.verdict} ({summary.seconds:.1f} s, {summary.where})"
    out.print(Text(text, style=style), soft_wrap=True)


def _table(summary: Summary) -> Table:
    columns = ("model", "verdict", "FP32 nodes", "rel. L2", *summary.gpus, "s", "GiB")
    # names are folded where the terminal is narrow: a number that is cut is another number
    table = new_table("", *columns, right=("FP32 nodes", "rel. L2", "s", "GiB"))
    for record in summary.records:
        outcome = record.outcome
        verdicts = [_verdict(record.verdicts.get(gpu)) for gpu in summary.gpus]
        seconds = "earlier" if record.skipped else f"{outcome.seconds:.1f}"
        memory = f"{outcome.peak_bytes / 2**30:.1f}" if outcome.peak_bytes else ""
        ending = Text(outcome.ending, style=STYLES[outcome.ending])
        row: list[RenderableType] = [share(outcome), error(outcome), *verdicts, seconds, memory]
        table.add_row(record.entry.name, ending, *row)
    return table


def _verdict(outcome: Outcome | None) -> Text:
    return Text("") if outcome is None else Text(verdict_on(outcome), style=STYLES[outcome.ending])


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
