"""Shows where a model starts to go wrong: tables for people, JSON for programs."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from rewriter.base.text import Row, count, figure
from rewriter.report.json import data_dict, document
from rewriter.report.tables import Cell, Kind, State, Table, table
from rewriter.report.terminal import first_rows, print_report
from rewriter.verification.locate.location import Location, Step

FUSED = 8  # nodes of a kernel that the summary names
NAMED = 3  # tensors of each kind that the summary names


def print_result(result: Location, out: Console, *, verbosity: int = 0) -> None:
    """Print the first wrong tensor, what is right before it, and how it was found; see `print_report`."""
    print_report(verdict_line(result), state(result), rows(result), tables(result), out, verbosity)


def state(result: Location) -> State:
    return "bad" if result.wrong else "good"


def rows(result: Location) -> Iterator[Row]:
    shown = result.wrong or result.outputs
    lines = [f"{step.tensor}: {_error(step)}, allowed {figure(result.tolerance)}" for step in shown]
    yield from first_rows("Outputs", lines, NAMED)
    if result.first is not None:
        names = ", ".join(f"{s.tensor} ({_error(s)})" for s in result.right[:NAMED])
        yield "Before", f"last correct: {names or 'the inputs of the model'}"
        hidden = [f"{step.tensor} of {step.node} ({step.op}): {step.note}" for step in result.hiding]
        yield from first_rows("Hidden", hidden, NAMED)
        if len(result.kernel) > 1:
            more = ", ..." if len(result.kernel) > FUSED else ""
            yield "Kernel", f"one kernel computes {', '.join(result.kernel[:FUSED])}{more}"
    how = f"compared {result.compared} of {count(result.tensors, 'tensor')} that both models have"
    if result.given:
        how += f", {count(result.given, 'tensor')} between kernels"
    if result.builds:
        how += f", {count(result.builds, 'build')} with marks"
    if result.discarded:
        how += f", {result.discarded} of them discarded because marks changed the outputs"
    yield "How", f"{how} (relative L2, {result.engine})"
    yield from (("Note", note) for note in result.notes)


def tables(result: Location) -> Iterator[Table]:
    """The way from the last correct tensors to the worst output, and all outputs."""
    lead = (
        "From the last correct tensors to the worst output, and the nodes that its fusion hides. A tensor in "
        "red is wrong. “Own error” is the error that its node adds on exact inputs, if it was emulated."
    )
    chain = [*result.right, *result.hiding, *result.chain] if result.first is not None else []
    yield _table("chain", "From the first wrong tensor to the output", lead, chain, result.tolerance)
    lead = "Every output against the original in FP32."
    yield _table("outputs", "Outputs", lead, result.outputs, result.tolerance)


def _table(name: str, title: str, lead: str, steps: Sequence[Step], tolerance: float) -> Table:
    columns: dict[str, Kind] = {"Tensor": "code", "Node": "code", "Operator": "choice", "Error": "number"}
    columns |= {"Own error": "number"}
    rows = []
    for step in steps:
        wrong = step.error is not None and not step.error <= tolerance
        added = Cell("") if step.added is None else Cell(_number(step.added), order=step.added)
        cells = Cell(step.node), Cell(step.op), Cell(_error(step), order=step.error), added
        rows.append([Cell(step.tensor, state="bad" if wrong else "plain"), *cells])
    return table(name, title, lead, columns, rows)


def verdict_line(result: Location) -> str:
    if result.first is not None:
        return _where(result, result.first)
    if result.wrong:
        names = ", ".join(step.tensor for step in result.wrong)
        return f"{names} is wrong, but is no float tensor that both models have."
    return f"All outputs are within {figure(result.tolerance)} of the original."


def _where(result: Location, first: Step) -> str:
    where = f"{first.tensor} of node {first.node} ({first.op}), error {_error(first)}"
    if result.exact:
        return f"The first wrong tensor is {where}: shared tensors before it are correct."
    if result.hiding:
        return (
            f"The first wrong tensor is {where}, or one shortly before it that cannot be measured: the "
            "kernel of these nodes is probably wrong."
        )
    return f"The first wrong tensor is {where}, or one before it that was not measured."


def _error(step: Step) -> str:
    return step.note or "not measured" if step.error is None else _number(step.error)


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "NaN or infinity"


def as_dict(result: Location) -> dict[str, Any]:
    return document({**vars(result), "data": data_dict(result.data)})
