"""The page that compares two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rewriter.report.html.run import run_section
from rewriter.report.html.tables import MOST_ROWS, number
from rewriter.report.html.view import Cell, Column, Fact, Page, Section, State, Table, Tile
from rewriter.report.runs import NOTICED, Compared, change, error_of, plain_number


def page(found: Compared, command: str = "") -> Page:
    """Returns the page; `command` is the command line that made it."""
    states: dict[bool | None, State] = {None: "warn", True: "good", False: "bad"}
    return Page(
        verb="report",
        subject=f"{found.before.path.name} and {found.after.path.name}",
        verdict=found.verdict,
        state=states[found.after.passed],
        tiles=[
            Tile(
                name[:1].upper() + name[1:],
                f"{plain_number(old) or 'none'} → {plain_number(new) or 'none'}",
                change(old, new),
            )
            for name, old, new in found.figures
        ],
        warnings=[],
        sections=[*_sections(found), run_section(command, facts=_reports(found))],
    )


def _reports(found: Compared) -> list[Fact]:
    return [
        Fact("First report", str(found.before.path), code=True),
        Fact("Second report", str(found.after.path), code=True),
    ]


def _sections(found: Compared) -> Iterator[Section]:
    if found.outputs:
        lead = f"Relative L2 errors by the check that decides. Ratios below {NOTICED:g} are no difference."
        yield Section("outputs", "Outputs", lead, [_outputs(found)])
    if found.passes:
        rows = [[Cell(n), number(old, "{:d}"), number(new, "{:d}")] for n, old, new in found.passes]
        table = Table("passes-table", "Changes by pass", _columns(found, Column("Pass", code=True)), rows)
        yield Section("passes", "Changes by pass", "Passes whose number of changes differs.", [table])
    what = "with findings" if found.before.verb == "scan" else "in FP32 or BF16"
    for place, which, nodes in ((1, "first", found.gone), (2, "second", found.new)):
        if nodes:
            title = f"Nodes {what} in the {which} run only"
            yield Section(f"nodes-{place}", title, f"{len(nodes)} nodes.", [_nodes(place, title, nodes)])
    if found.facts:
        rows = [[Cell(name), Cell(old), Cell(new)] for name, old, new in found.facts]
        columns = [Column("What"), Column("First"), Column("Second")]
        table = Table("facts-table", "What they ran on and with", columns, rows)
        yield Section("facts", "Conditions", "What differs in what they ran on and with.", [table])


def _columns(found: Compared, first: Column) -> list[Column]:
    names = found.before.path.name, found.after.path.name
    return [first, *(Column(name, number=True) for name in names)]


def _outputs(found: Compared) -> Table:
    rows = []
    for name, old, new in found.outputs:
        ratio = new.error / old.error if old and new and old.error else None
        state: State = "plain"
        if ratio is not None and not 1 / NOTICED <= ratio <= NOTICED:
            state = "bad" if ratio > 1 else "good"
        before, after = error_of(old), error_of(new)
        allowed = [number(one.allowed if one else None) for one in (old, new)]
        shown = Cell(change(before, after), order=ratio, state=state)
        rows.append([Cell(name), number(before), number(after), shown, *allowed])
    columns = [
        *_columns(found, Column("Output", code=True)),
        Column("Change", number=True),
        Column("Allowed, first", number=True),
        Column("Allowed, second", number=True),
    ]
    return Table("outputs-table", "Errors of both runs", columns, rows)


def _nodes(place: int, caption: str, nodes: Mapping[str, str]) -> Table:
    rows = [[Cell(node), Cell(why)] for node, why in list(nodes.items())[:MOST_ROWS]]
    columns = [Column("Node", code=True), Column("Reason")]
    return Table(f"nodes-table-{place}", caption, columns, rows)
