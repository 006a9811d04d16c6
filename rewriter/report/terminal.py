"""The result of `fix` as tables for people: plain ASCII, 80 columns or more, no colour when piped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rewriter.driver import PassResult
from rewriter.plan import Decision, Plan
from rewriter.report.next_step import next_command, remark
from rewriter.result import Check, FixResult, OutputComparison

SHOWN = 5
"""Nodes, reasons and outputs listed of each kind without `-v`."""

MORE = "-v shows all"

_WORDS = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("not done", "yellow")}


def console(stream: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console that prints names as they are: brackets in them are no markup, numbers no links.

    Names may hold characters that the terminal's encoding lacks; they come out as `?`.
    """
    made = Console(file=stream, stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False)
    reconfigure = getattr(made.file, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return made


def print_result(result: FixResult, out: Console, *, verbosity: int = 0) -> None:
    """Print what happened: -1 the verdict line alone, 0 the highlights, 1 everything."""
    if verbosity >= 0:
        limit = None if verbosity > 0 else SHOWN
        for part in _sections(result, limit):
            out.print(part)
    out.print(verdict_line(result))
    if verbosity >= 0:
        _print_next(result, out)


def verdict_line(result: FixResult) -> Text:
    """One line: fixed and verified, not verified, or failed; where the result is; what stays FP32."""
    where = str(result.output) if result.output else "nothing written"
    if result.verdict is None:
        text, style = f"Fixed, NOT verified (--no-verify): {where}", "yellow"
    elif result.verdict.passed:
        text, style = f"Fixed and verified: {where}", "green"
    else:
        text, style = f"VERIFICATION FAILED ({_failed(result.verdict.checks)}): {where}", "bold red"
    return Text(text + _share(result.plan), style=style)


def _failed(checks: Sequence[Check]) -> str:
    return ", ".join(c.name for c in checks if c.passed is False) or "no check could be made"


def _share(plan: Plan | None) -> str:
    if plan is None:
        return ""
    return f" ({len(plan.decisions)} of {plan.float_nodes} float nodes in FP32)"


def _sections(result: FixResult, limit: int | None) -> Iterator[RenderableType]:
    yield from _passes(result.passes, limit)
    yield from _refusals(result.passes, limit)
    if result.plan is not None:
        yield from _decisions(result.plan, limit)
    if result.verdict is not None:
        yield from _checks(result.verdict.checks, limit)
    yield from _data_and_warnings(result)
    yield Text("Time: " + ", ".join(f"{stage} {s:.1f} s" for stage, s in result.seconds.items()))


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1)
    )
    for name in columns:
        numeric = name in right
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def _passes(passes: Sequence[PassResult], limit: int | None) -> Iterator[RenderableType]:
    table = _table("Passes", "pass", "changed", "declined", "s", "what", right=("changed", "declined", "s"))
    table.columns[0].no_wrap = True
    for step in passes:
        if step.changes or step.refusals or limit is None:
            lines = [f"{_times(nodes)}{what}: {_listed(nodes, limit)}" for what, nodes in _by_what(step)]
            counts = str(len(step.changes)), str(len(step.refusals))
            table.add_row(step.name, *counts, f"{step.seconds:.1f}", "\n".join(_cut(lines, limit)))
    if table.row_count:
        yield table
    idle = [step.name for step in passes if not (step.changes or step.refusals)]
    if idle:
        yield Text("Nothing to do for: " + ", ".join(idle))
    yield ""


def _by_what(step: PassResult) -> list[tuple[str, list[str]]]:
    return _grouped((change.what, change.node) for change in step.changes)


def _refusals(passes: Sequence[PassResult], limit: int | None) -> Iterator[RenderableType]:
    table = _table("Declined", "pass", "nodes", "reason", right=("nodes",))
    table.columns[0].no_wrap = True
    for step in passes:
        groups = _grouped((refusal.reason, refusal.node) for refusal in step.refusals)
        for reason, nodes in groups[:limit]:
            table.add_row(step.name, str(len(nodes)), f"{reason}: {_listed(nodes, limit)}")
        if limit is not None and len(groups) > limit:
            table.add_row(step.name, "", f"... and {len(groups) - limit} more reasons: {MORE}")
    if table.row_count:
        yield table
        yield ""


def _decisions(plan: Plan, limit: int | None) -> Iterator[RenderableType]:
    low = plan.precision.upper()
    if not plan.decisions:
        yield Text(f"No node needs FP32: all {plan.float_nodes} float nodes are {low}.")
    else:
        table = _table(
            f"In FP32, the rest in {low}", "rule", "nodes", "node: reason [measured range]", right=("nodes",)
        )
        groups: dict[str, list[Decision]] = defaultdict(list)
        for decision in plan.decisions:
            groups[decision.rule].append(decision)
        for rule, members in groups.items():
            lines = [_decision(decision) for decision in members]
            table.add_row(rule, str(len(members)), "\n".join(_cut(lines, limit)))
        yield table
    yield ""


def _decision(decision: Decision) -> str:
    text = f"{decision.node} ({decision.op}): {decision.reason}"
    measured = str(decision.range) if decision.range else ""
    return text if measured in text else f"{text}, {decision.tensor or 'measured'} in {measured}"


def _checks(checks: Sequence[Check], limit: int | None) -> Iterator[RenderableType]:
    table = _table("Verification", "check", "result", "s", "summary", right=("s",))
    for check in checks:
        word, style = _WORDS[check.passed]
        lines = [check.summary, *_cut(list(check.details), limit)]
        table.add_row(check.name, Text(word, style=style), f"{check.seconds:.1f}", "\n".join(lines))
    yield table
    yield ""
    outputs = [(check, output) for check in checks for output in check.outputs]
    if outputs:
        yield _outputs(outputs, limit)
        yield ""


def _outputs(rows: Sequence[tuple[Check, OutputComparison]], limit: int | None) -> Table:
    numbers = ("rel. L2", "allowed", "max abs", "cosine")
    table = _table("Outputs against the original in FP32", "check", "output", *numbers, "", right=numbers)
    worst_first = sorted(rows, key=lambda row: (row[1].passed, row[0].name))
    for check, output in worst_first[: limit and 2 * limit]:
        table.add_row(
            check.name,
            output.name,
            f"{output.relative_l2:.2g}",
            f"{output.tolerance:.2g}",
            f"{output.max_abs:.2g}",
            f"{output.cosine:.6f}",
            _output_note(output),
        )
    if limit is not None and len(rows) > 2 * limit:
        table.add_row("", f"... and {len(rows) - 2 * limit} more: {MORE}")
    return table


def _output_note(output: OutputComparison) -> str:
    parts = [] if output.passed else ["FAILED"]
    parts += [] if output.finite else ["NaN or infinity"]
    return ", ".join([*parts, *([output.note] if output.note else [])])


def _data_and_warnings(result: FixResult) -> Iterator[RenderableType]:
    if result.data is not None:
        yield Text(f"Data: {result.data.text}", style="" if result.data.real else "yellow")
    for warning in result.warnings:
        yield Text(f"Warning: {warning}", style="yellow")


def _print_next(result: FixResult, out: Console) -> None:
    command = next_command(result)
    if command is not None:
        note = remark(result.target)
        out.print(Text("Next" + (f" ({note})" if note else "") + ":"))
        out.print(Text(f"  {command}"), soft_wrap=True)  # one line, however long: it is there to be copied


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Nodes by their text, the largest group first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for text, node in pairs:
        groups[text].append(node)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _times(nodes: Sequence[str]) -> str:
    return f"{len(nodes)} x " if len(nodes) > 1 else ""


def _listed(nodes: Sequence[str], limit: int | None) -> str:
    """Names, the first two of many: a list of nodes is an example, `-v` is the record."""
    shown = nodes if limit is None else nodes[:2]
    rest = len(nodes) - len(shown)
    return ", ".join(shown) + (f", ... and {rest} more" if rest else "")


def _cut(lines: list[str], limit: int | None) -> list[str]:
    if limit is None or len(lines) <= limit:
        return lines
    return [*lines[:limit], f"... and {len(lines) - limit} more: {MORE}"]
