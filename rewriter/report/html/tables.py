"""Tables that more than one page has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.plan import Decision
from rewriter.judge.verdict import Check
from rewriter.pipeline.driver import PassResult
from rewriter.report.html.render import part
from rewriter.report.html.view import Cell, Column, State
from rewriter.report.terminal import grouped

MOST_NAMES = 500
"""Names that a cell lists; JSON has the others."""

WORDS: Mapping[bool | None, tuple[str, State]] = {
    True: ("passed", "good"),
    False: ("failed", "bad"),
    None: ("not done", "warn"),
}


def columns(
    *names: str, numbers: Sequence[str] = (), choices: Sequence[str] = (), code: Sequence[str] = ()
) -> list[Column]:
    """Columns by their names, with those of numbers, of few different values, and of names of nodes."""
    return [Column(name, name in numbers, name in choices, name in code) for name in names]


def number(value: float | None, form: str = "{:.3g}") -> Cell:
    """A cell with a number; empty for None."""
    return Cell("") if value is None else Cell(form.format(value), order=value)


def table(
    name: str,
    caption: str,
    heads: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    empty: str = "There is nothing to list.",
) -> Markup:
    """A table that sorts by every column and filters by text and by choices; empty columns are left out."""
    used = [i for i in range(len(heads)) if any(row[i].text for row in rows)]
    cells = [[row[i] for i in used] for row in rows]
    left = [heads[i] for i in used]
    return part("table.html", id=name, caption=caption, columns=left, rows=cells, empty=empty)


def listing(text: str, names: Sequence[str]) -> Cell:
    """A cell with a text, and names that it lists on demand."""
    return Cell(text, names=tuple(names[:MOST_NAMES]), rest=max(0, len(names) - MOST_NAMES))


def checks_table(checks: Sequence[Check]) -> Markup:
    """Every check with its result, worst first is left to the reader."""
    rows = []
    for check in checks:
        word, state = WORDS[check.passed]
        summary = Cell(check.summary, names=check.details, unit="lines")
        rows.append([Cell(check.name), Cell(word, state=state), summary, number(check.seconds, "{:.1f}")])
    heads = columns("Check", "Result", "Summary", "Seconds", numbers=["Seconds"])
    return table("checks", "Checks of this run", heads, rows, "Nothing was checked.")


def passes_table(passes: Sequence[PassResult]) -> Markup:
    """What the passes changed and declined, by pass and sentence."""
    rows = []
    for step, kind, what, nodes in _events(passes):
        state: State = "plain" if kind == "changed" else "warn"
        cell = listing(what, [node for node in nodes if node != "model"])
        rows.append([Cell(step), Cell(kind, state=state), number(len(nodes), "{:d}"), cell])
    heads = columns(
        "Pass",
        "Outcome",
        "Nodes",
        "What, and which nodes",
        numbers=["Nodes"],
        choices=["Pass", "Outcome"],
        code=["Pass"],
    )
    empty = "No pass changed or declined anything."
    return table("changes", "Changes and refusals of every pass", heads, rows, empty)


def _events(passes: Sequence[PassResult]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields pass, outcome, sentence and nodes; sentences that differ in names alone are one."""
    for step in passes:
        for what, changes in grouped(step.changes, lambda change: change.what):
            yield step.name, "changed", what, [change.node for change in changes]
        for why, refusals in grouped(step.refusals, lambda refusal: refusal.reason):
            yield step.name, "declined", why, [refusal.node for refusal in refusals]


def decisions_table(decisions: Sequence[Decision], graph_of: Callable[[str], str]) -> Markup:
    """The nodes that the plan keeps out of the low precision, by rule and reason.

    Args:
        graph_of: Returns the id of the graph of a node; "" if there is none.
    """

    def graph(members: Iterable[Decision]) -> str:
        return next(filter(None, (graph_of(one.node) for one in members)), "")

    groups: dict[tuple[str, str], list[Decision]] = {}
    for one in decisions:
        groups.setdefault((one.rule, one.repair), []).append(one)
    rows = [
        [
            Cell(rule),
            Cell(repair.upper() + (", at no cost" if rule in FREE else ""), link=graph(alike)),
            number(len(alike), "{:d}"),
            listing(reason, [f"{one.node} ({one.op})" for one in alike]),
            number(_largest(alike)),
        ]
        for (rule, repair), members in groups.items()
        for reason, alike in grouped(members, lambda one: one.reason)
    ]
    heads = columns(
        "Rule",
        "Type",
        "Nodes",
        "Reason, and which nodes",
        "Largest |x|",
        numbers=["Nodes", "Largest |x|"],
        choices=["Rule", "Type"],
    )
    return table("plan-table", "Nodes that do not compute in the plan's precision", heads, rows)


def _largest(decisions: Iterable[Decision]) -> float | None:
    return max((one.range.absmax for one in decisions if one.range), default=None)
