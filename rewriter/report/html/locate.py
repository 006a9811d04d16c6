"""The page of `locate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rewriter.report.html.run import run_section
from rewriter.report.html.scales import decades, linear, logarithmic, power_of_ten, round_steps
from rewriter.report.html.tables import number, without_empty
from rewriter.report.html.typed_depth import typed_depth
from rewriter.report.html.view import (
    Body,
    Cell,
    Column,
    Fact,
    Page,
    Point,
    Scatter,
    Section,
    State,
    Table,
    Tick,
    Tile,
)
from rewriter.report.locate import verdict
from rewriter.verification.locate.location import Location, Step

LEFT, RIGHT, TOP, BOTTOM = 70.0, 700.0, 20.0, 290.0
"""Edges of the plot in a drawing of 720 x 350."""


def page(found: Location, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    first = found.first
    return Page(
        verb="locate",
        subject=str(found.other) if found.other else "a model in memory",
        verdict=verdict(found),
        state="bad" if found.wrong else "good",
        tiles=[
            Tile(
                "Wrong outputs", str(len(found.wrong)), f"of {len(found.outputs)}", _state(bool(found.wrong))
            ),
            Tile("Allowed", f"{found.tolerance:.2g}", "relative L2"),
            *(
                [Tile("First wrong tensor", first.op, f"{first.tensor} of {first.node}", "bad")]
                if first
                else []
            ),
            *_builds(found),
        ],
        warnings=list(found.notes),
        sections=list(_sections(found, command)),
    )


def _builds(found: Location) -> Iterator[Tile]:
    if found.builds:
        yield Tile("Builds", str(found.builds), f"{found.discarded} discarded" if found.discarded else "")


def _state(wrong: bool) -> State:
    return "bad" if wrong else "good"


def _sections(found: Location, command: str) -> Iterator[Section]:
    steps = [*found.right, *found.chain]
    if found.chain:
        lead = (
            "From the last correct tensors to the worst output. A tensor above the line is wrong. "
            "“Own error” is what its node adds on exact inputs, where an emulation knows it."
        )
        plot = _plot(found, steps)
        bodies: list[Body] = [*([plot] if plot else []), _table("chain", "Chain", steps, found.tolerance)]
        yield Section("chain-section", "From the first wrong tensor to the output", lead, bodies)
    if found.hiding:
        lead = "Marking these changes the results: they are inside the fusion that goes wrong."
        rows = _table("hiding", "Tensors that cannot be marked", found.hiding, found.tolerance)
        yield Section("hiding-section", "Between right and wrong", lead, [rows])
    wrong = [
        s for s in (*found.chain, *found.outputs) if s.error is not None and not s.error <= found.tolerance
    ]
    marks = {step.tensor: f"wrong here: error {step.error:.2g}" for step in wrong}
    yield typed_depth(found.depth, marks)
    table = _table("outputs-table", "Outputs", found.outputs, found.tolerance)
    yield Section("outputs", "Outputs", "Every output against the original in FP32.", [table])
    facts = [
        Fact("Original", str(found.original or "in memory"), code=True),
        Fact("Other", str(found.other or "in memory"), code=True),
        Fact("Engine", found.engine),
        Fact("Compared", f"{found.tensors} tensors that both models have"),
    ]
    if found.builds:
        facts += [
            Fact("Observing tensors changed the outputs by", f"{found.moved:.2g} (relative L2)"),
            Fact("Repeated builds differ by", f"{found.spread:.2g} (relative L2)"),
        ]
    yield run_section(command, facts=facts, data=found.data)


def _table(name: str, caption: str, steps: Sequence[Step], tolerance: float) -> Table:
    rows = []
    for step in steps:
        wrong = step.error is not None and not step.error <= tolerance
        error = number(step.error) if step.error is not None else Cell(step.note or "not measured")
        rows.append(
            [
                Cell(step.tensor, state=_state(wrong)),
                Cell(step.node),
                Cell(step.op),
                error,
                number(step.added),
                Cell(step.note),
            ]
        )
    columns = [
        Column("Tensor", code=True),
        Column("Node", code=True),
        Column("Operator", choices=True),
        Column("Error", number=True),
        Column("Own error", number=True),
        Column("Note"),
    ]
    return without_empty(Table(name, caption, columns, rows))


def _summary(steps: Sequence[tuple[Step, float]], tolerance: float) -> str:
    """The plot in figures, for those who do not see it."""
    (first, start), (last, end) = steps[0], steps[-1]
    worst, most = max(steps, key=lambda pair: pair[1])
    wrong = sum(not error <= tolerance for _, error in steps)
    return (
        f"Relative L2 error of {len(steps)} tensors in the order of the network: {start:.2g} at "
        f"{first.tensor}, at most {most:.2g} at {worst.tensor}, {end:.2g} at {last.tensor}; "
        f"{wrong} of them exceed the {tolerance:.2g} that is allowed."
    )


def _plot(found: Location, steps: Sequence[Step]) -> Scatter | None:
    """The errors along the chain on a logarithmic scale; None if fewer than two are known."""
    known = [(i, step, step.error) for i, step in enumerate(steps) if step.error is not None]
    finite = [error for _, _, error in known if error and math.isfinite(error)]
    if len(finite) < 2:
        return None
    y, y_ticks = _error_axis([*finite, found.tolerance])
    x = linear(0, max(1, len(steps) - 1), LEFT + 20.0, RIGHT - 20.0)
    points = [
        Point(
            x(i),
            y(error),
            "tried" if error <= found.tolerance else "wrong",
            f"{step.tensor} of {step.node} ({step.op}): error {error:.2g}",
        )
        for i, step, error in known
    ]
    return Scatter(
        id="errors",
        summary=_summary([(step, error) for _, step, error in known], found.tolerance),
        x_label="tensors, in the order of the network",
        y_label="relative L2 error",
        x_ticks=[],
        y_ticks=y_ticks,
        points=points,
        line="M" + "L".join(f"{point.x:.1f} {point.y:.1f}" for point in points),
        legend=[("tried", "within what is allowed"), ("wrong", "wrong")],
        limit=y(found.tolerance),
        limit_label=f"allowed: {found.tolerance:.2g}",
    )


def _error_axis(errors: Sequence[float]) -> tuple[Callable[[float], float], list[Tick]]:
    """The logarithmic axis of the errors, which are above 0."""
    low, high = min(errors) / 1.5, max(errors) * 1.5
    y = logarithmic(low, high, BOTTOM, TOP)
    marks = decades(low, high, 6)
    if len(marks) < 2:
        return y, [Tick(y(value), f"{value:.3g}") for value in round_steps(low, high, 6) if value > 0.0]
    return y, [Tick(y(value), power_of_ten(value)) for value in marks]
