"""The page of `locate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from rewriter.judge.locate.location import Location, Step
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import columns, number, table
from rewriter.report.html.view import Cell, Fact, Page, Section, State, Tile
from rewriter.report.locate import verdict


def page(found: Location, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    first, wrong = found.first, bool(found.wrong)
    tiles = [
        Tile("Wrong outputs", str(len(found.wrong)), f"of {len(found.outputs)}", _state(wrong)),
        Tile("Allowed", f"{found.tolerance:.2g}", "relative L2"),
    ]
    if first:
        tiles.append(Tile("First wrong tensor", first.op, f"{first.tensor} of {first.node}", "bad"))
    return Page(
        verb="locate",
        subject=str(found.other) if found.other else "a model in memory",
        verdict=verdict(found),
        state=_state(wrong),
        tiles=tiles,
        warnings=list(found.notes),
        sections=list(_sections(found, command)),
    )


def _state(wrong: bool) -> State:
    return "bad" if wrong else "good"


def _sections(found: Location, command: str) -> Iterator[Section]:
    if found.chain:
        lead = (
            "From the last correct tensors to the worst output. A tensor in red is wrong. "
            "“Own error” is what its node adds on exact inputs, where an emulation knows it."
        )
        chain = _table("chain", "Chain", [*found.right, *found.chain], found.tolerance)
        yield Section("chain-section", "From the first wrong tensor to the output", lead, [chain])
    if found.hiding:
        lead = "Marking these changes the results: they are inside the fusion that goes wrong."
        rows = _table("hiding", "Tensors that cannot be marked", found.hiding, found.tolerance)
        yield Section("hiding-section", "Between right and wrong", lead, [rows])
    outputs = _table("outputs-table", "Outputs", found.outputs, found.tolerance)
    yield Section("outputs", "Outputs", "Every output against the original in FP32.", [outputs])
    facts = [
        Fact("Original", str(found.original or "in memory"), code=True),
        Fact("Other", str(found.other or "in memory"), code=True),
        Fact("Engine", found.engine),
        Fact("Compared", f"{found.tensors} tensors that both models have"),
    ]
    if found.builds:
        discarded = f", {found.discarded} of them discarded" if found.discarded else ""
        facts.append(Fact("Builds", f"{found.builds} with marks{discarded}"))
    yield run_section(command, facts=facts, data=found.data)


def _table(name: str, caption: str, steps: Sequence[Step], tolerance: float) -> Markup:
    rows = []
    for step in steps:
        wrong = step.error is not None and not step.error <= tolerance
        error = number(step.error) if step.error is not None else Cell(step.note or "not measured")
        tensor = Cell(step.tensor, state=_state(wrong))
        rows.append([tensor, Cell(step.node), Cell(step.op), error, number(step.added), Cell(step.note)])
    heads = columns(
        "Tensor",
        "Node",
        "Operator",
        "Error",
        "Own error",
        "Note",
        numbers=["Error", "Own error"],
        choices=["Operator"],
        code=["Tensor", "Node"],
    )
    return table(name, caption, heads, rows)
