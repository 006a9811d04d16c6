"""Tables that more than one page has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from rewriter.pipeline.driver import PassResult
from rewriter.plan import Decision
from rewriter.report.html.view import Cell, Column, State, Table
from rewriter.report.terminal import grouped
from rewriter.verification.verdict import Check

MOST_NAMES = 2500
"""Names that all cells of a table list together; JSON has the others."""

MOST_ROWS = 1500
"""Rows of a table with one row a node: beyond it, nodes with one reason share a row."""

MOST_SENTENCES = 300
"""Different sentences of one pass: beyond it, those that differ in names alone share a row."""

WORDS: Mapping[bool | None, tuple[str, State]] = {
    True: ("passed", "good"),
    False: ("failed", "bad"),
    None: ("not done", "warn"),
}


def number(value: float | None, form: str = "{:.3g}") -> Cell:
    """A cell with a number; empty for None."""
    return Cell("") if value is None else Cell(form.format(value), order=value)


def without_empty(table: Table) -> Table:
    """The table without columns in which every cell is empty."""
    used = [i for i in range(len(table.columns)) if any(row[i].text for row in table.rows)]
    columns, rows = [table.columns[i] for i in used], [[row[i] for i in used] for row in table.rows]
    return replace(table, columns=columns, rows=rows)


def checks_table(checks: Sequence[Check]) -> Table:
    """Every check with its result, worst first is left to the reader."""
    rows = []
    for check in checks:
        word, state = WORDS[check.passed]
        rows.append(
            [
                Cell(check.name),
                Cell(word, state=state),
                Cell(check.summary, names=check.details, unit="lines"),
                number(check.seconds, "{:.1f}"),
            ]
        )
    columns = [Column("Check"), Column("Result"), Column("Summary"), Column("Seconds", number=True)]
    return Table("checks", "Checks of this run", columns, rows, "Nothing was checked.")


def passes_table(passes: Sequence[PassResult]) -> Table:
    """What the passes changed and declined, grouped by pass and sentence."""
    left = MOST_NAMES
    rows = []
    for (step, kind, what), nodes in _events(passes).items():
        names = [node for node in nodes if node != "model"]
        state: State = "plain" if kind == "changed" else "warn"
        cell = Cell(what, names=tuple(names[:left]), rest=len(names) - len(names[:left]))
        left -= len(cell.names)
        rows.append([Cell(step), Cell(kind, state=state), number(len(nodes), "{:d}"), cell])
    columns = [
        Column("Pass", choices=True, code=True),
        Column("Outcome", choices=True),
        Column("Nodes", number=True),
        Column("What, and which nodes"),
    ]
    empty = "No pass changed or declined anything."
    return Table("changes", "Changes and refusals of every pass", columns, rows, empty)


def _events(passes: Sequence[PassResult]) -> dict[tuple[str, str, str], list[str]]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for step in passes:
        changed = [(change.what, change.node) for change in step.changes]
        declined = [(refusal.reason, refusal.node) for refusal in step.refusals]
        for kind, events in (("changed", changed), ("declined", declined)):
            if len({what for what, _ in events}) > MOST_SENTENCES:
                events = [(what, node) for what, alike in grouped(events, itemgetter(0)) for _, node in alike]
            for what, node in events:
                groups.setdefault((step.name, kind, what), []).append(node)
    return groups


def decisions_table(decisions: Sequence[Decision]) -> Table:
    """The nodes that the plan keeps out of the low precision, with reason and range."""
    if len(decisions) > MOST_ROWS:
        return _grouped_decisions(decisions)
    rows = [
        [
            Cell(one.node),
            Cell(one.op),
            Cell(one.repair.upper()),
            Cell(one.rule),
            Cell(one.reason),
            number(one.range.absmax if one.range else None),
        ]
        for one in decisions
    ]
    columns = [
        Column("Node", code=True),
        Column("Operator", choices=True),
        Column("Type", choices=True),
        Column("Rule", choices=True),
        Column("Reason"),
        Column("Largest |x|", number=True),
    ]
    return Table("plan-table", "Nodes that do not compute in the plan's precision", columns, rows)


def _grouped_decisions(decisions: Sequence[Decision]) -> Table:
    groups: dict[tuple[str, str], list[Decision]] = {}
    for one in decisions:
        groups.setdefault((one.rule, one.repair), []).append(one)
    rows = [[*row] for row in _group_rows(groups)]
    columns = [
        Column("Rule", choices=True),
        Column("Type", choices=True),
        Column("Nodes", number=True),
        Column("One of the reasons, and which nodes"),
        Column("Largest |x|", number=True),
    ]
    return Table("plan-table", "Nodes that do not compute in the plan's precision", columns, rows)


def _group_rows(groups: Mapping[tuple[str, str], Sequence[Decision]]) -> Iterator[Iterable[Cell]]:
    left = MOST_NAMES
    for (rule, repair), members in groups.items():
        worst = max(members, key=lambda one: one.range.absmax if one.range else 0.0)
        names = tuple(one.node for one in members[:left])
        left -= len(names)
        yield (
            Cell(rule),
            Cell(repair.upper()),
            number(len(members), "{:d}"),
            Cell(worst.reason, names=names, rest=len(members) - len(names)),
            number(worst.range.absmax if worst.range else None),
        )
