"""Shows the checks of a verification, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rewriter.judge.verdict import Check
from rewriter.report.terminal import new_table
from rewriter.runtime.figures.outputs import OutputComparison

_RESULTS = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("not done", "yellow")}

JUDGING = ("run", "emulation", "tf32", "structure")
"""Checks that compare outputs, the most telling first."""


def judging_check(checks: Sequence[Check]) -> Check | None:
    """The check whose outputs decide: the run on an engine, or else its emulation."""
    made = {check.name: check for check in checks if check.outputs}
    return next((made[name] for name in JUDGING if name in made), None)


def check_dict(check: Check) -> dict[str, Any]:
    """A check with the verdict on each output."""
    outputs = [{**asdict(output), "passed": output.passed} for output in check.outputs]
    fields = asdict(replace(check, pictures=()))
    del fields["pictures"]
    return {**fields, "outputs": outputs}


def sections(checks: Sequence[Check]) -> Iterator[RenderableType]:
    """A table of the checks, and one of each output's error."""
    table = new_table("Verification", "check", "result", "s", "summary", right=("s",))
    for check in checks:
        word, style = _RESULTS[check.passed]
        lines = "\n".join([check.summary, *check.details])
        table.add_row(check.name, Text(word, style=style), f"{check.seconds:.1f}", lines)
    yield table
    yield ""
    outputs = [(check, output) for check in checks for output in check.outputs]
    if outputs:
        yield _outputs(outputs)
        yield ""


def _outputs(rows: Sequence[tuple[Check, OutputComparison]]) -> RenderableType:
    numbers = ("rel. L2", "allowed", "max abs", "cosine")
    table = new_table("Outputs against the original in FP32", "check", "output", *numbers, "", right=numbers)
    worst_first = sorted(rows, key=lambda row: (row[1].passed, row[0].name))
    for check, output in worst_first:
        table.add_row(
            check.name,
            output.name,
            f"{output.relative_l2:.2g}",
            f"{output.tolerance:.2g}",
            f"{output.max_abs:.2g}",
            f"{output.cosine:.6f}",
            _note(output),
        )
    return table


def _note(output: OutputComparison) -> str:
    notes = ("" if output.passed else "FAILED", "" if output.finite else "NaN or infinity", output.note)
    return ", ".join(filter(None, notes))
