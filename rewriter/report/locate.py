"""Shows where a model starts to go wrong: tables for people, JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rewriter.report.json import document
from rewriter.report.terminal import new_table, shorten
from rewriter.verification.locate.location import Location, Step


def print_result(found: Location, out: Console) -> None:
    """Print the verdict, the chain from the first wrong tensor to the output, and how it was found."""
    for part in _sections(found):
        out.print(part, soft_wrap=True)


def _sections(found: Location) -> Iterator[RenderableType]:
    yield _table("Outputs", found.outputs, found.tolerance)
    yield Text(verdict(found), style="bold red" if found.wrong else "green")
    if found.first is not None:
        yield from _chain(found)
    yield _how(found)


def verdict(found: Location) -> str:
    """One sentence: the first wrong tensor, or that there is none."""
    if found.first is not None:
        return _where(found, found.first)
    if found.wrong:
        names = ", ".join(step.tensor for step in found.wrong)
        return f"{names} is wrong, but is no float tensor that both models have."
    return f"All outputs are within {found.tolerance:.2g} of the original."


def _chain(found: Location) -> Iterator[RenderableType]:
    """The correct tensors before the first wrong one, and the way to the output."""
    if found.right:
        names = ", ".join(f"{s.tensor} ({_error(s)})" for s in found.right)
        yield Text(f"Last correct tensors: {names}")
    else:
        yield Text("Last correct tensors: the model's inputs")
    if found.hiding:
        yield Text("Between them are tensors that cannot be marked:", style="yellow")
        for step in found.hiding:
            yield Text(f"  {step.tensor} of {step.node} ({step.op}): {step.note}", style="yellow")
    yield _table("From there to the output", found.chain, found.tolerance)
    if found.jump is not None:
        jump = found.jump
        yield Text(f"The error grows most at {jump.tensor} of {jump.node} ({jump.op}).")


def _where(found: Location, first: Step) -> str:
    where = f"{first.tensor} of node {first.node} ({first.op}), error {_error(first)}"
    if found.exact:
        return f"The first wrong tensor is {where}: its operands are correct."
    if found.hiding:
        return (
            f"The first wrong tensor is {where}, or one shortly before it: marking those changes the "
            "results, so the fusion of these nodes is probably wrong."
        )
    return f"The first wrong tensor is {where}, or one before it: the search ended early."


def _table(title: str, steps: Sequence[Step], tolerance: float) -> RenderableType:
    added = any(step.added is not None for step in steps)
    columns = ["tensor", "node", "operator", "error", *(["own error"] if added else [])]
    rows = new_table(title, *columns, right=("error", "own error") if added else ("error",))
    for step in steps:
        wrong = step.error is not None and not step.error <= tolerance
        cells = [shorten(step.tensor), shorten(step.node), step.op, _error(step)]
        if added:
            cells.append("" if step.added is None else _number(step.added))
        rows.add_row(*(Text(cell, style="red" if wrong else "") for cell in cells))
    return rows


def _error(step: Step) -> str:
    return step.note or "not measured" if step.error is None else _number(step.error)


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "NaN or infinity"


def _how(found: Location) -> Text:
    text = f"{found.tensors} common tensors, {found.builds} builds with marks"
    if found.discarded:
        text += f", {found.discarded} of them discarded because marks changed the outputs"
    if found.builds:
        text += f"; marks change the outputs by {found.moved:.2g}, repeated builds by {found.spread:.2g}"
    notes = "".join(f"\nNote: {note}" for note in found.notes)
    return Text(f"{text} (relative L2, {found.engine}){notes}")


def as_dict(found: Location) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes."""
    return document(asdict(found))
