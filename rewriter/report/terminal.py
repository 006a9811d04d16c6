"""The result of `fix` as tables for people: plain ASCII, 80 columns or more, no colour when piped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rewriter.figures.compare import OutputComparison
from rewriter.jobs.fix.result import FixResult
from rewriter.pipeline.driver import PassResult
from rewriter.plan import Decision, Plan
from rewriter.planning.free_fp32 import FREE
from rewriter.report.frontier import sections as frontier_sections
from rewriter.report.next_step import next_command, remark
from rewriter.report.searched import sections as searched_sections
from rewriter.report.tables import new_table
from rewriter.report.text import about_target, grouped, listed, shorten
from rewriter.verification.verdict import Check

SHOWN = 5
"""Nodes, reasons and outputs listed of each kind without `-v`."""

MORE = "-v shows all"

_WORDS = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("not done", "yellow")}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to the caller: rich would exit with 1, which here means a failed verification."""
        raise BrokenPipeError


def console(stream: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console that prints names as they are: brackets in them are no markup, numbers no links.

    Names may hold characters that the terminal's encoding lacks; they come out as `?`.
    """
    made = _Console(file=stream, stderr=stderr, markup=False, highlight=False, emoji=False)
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
    out.print(verdict_line(result), soft_wrap=True)  # one line, for grep
    if verbosity >= 0:
        _print_next(result, out)


def verdict_line(result: FixResult) -> Text:
    """One line: fixed and verified, not verified, or failed; where the result is; what stays FP32."""
    where = str(result.output) if result.output else "nothing written"
    if result.verified is None:
        text, style = f"Fixed, NOT verified (--no-verify): {where}", "yellow"
    elif result.verified:
        text, style = f"Fixed and verified: {where}", "green"
    else:
        checks = result.verdict.checks if result.verdict else ()
        text, style = f"VERIFICATION FAILED ({_failed(checks)}): {where}", "bold red"
    return Text(text + _share(result.plan), style=style)


def _failed(checks: Sequence[Check]) -> str:
    return ", ".join(c.name for c in checks if c.passed is False) or "no check could be made"


def _share(plan: Plan | None) -> str:
    if plan is None:
        return ""
    bf16 = f", {len(plan.bf16)} in BF16" if plan.bf16 else ""
    free = sum(d.rule in FREE and d.repair == "fp32" for d in plan.decisions)
    why = f", {free} of them because it is free" if free else ""
    return f" ({len(plan.fp32)} of {plan.float_nodes} float nodes in FP32{why}{bf16})"


def _sections(result: FixResult, limit: int | None) -> Iterator[RenderableType]:
    yield from _passes(result.passes, limit)
    yield from _refusals(result.passes, limit)
    if result.plan is not None:
        yield from _decisions(result.plan, limit)
    if result.verdict is not None:
        yield from checks_tables(result.verdict.checks, limit)
    if result.searched is not None:
        yield from searched_sections(result.searched, limit)
    if result.frontier is not None:
        yield from frontier_sections(result.frontier)
    yield from _data_and_warnings(result)
    yield Text("Time: " + ", ".join(f"{stage} {s:.1f} s" for stage, s in result.seconds.items()))


def _passes(passes: Sequence[PassResult], limit: int | None) -> Iterator[RenderableType]:
    table = new_table(
        "Passes", "pass", "changed", "declined", "s", "what", right=("changed", "declined", "s")
    )
    table.columns[0].no_wrap = True
    for step in passes:
        if step.changes or step.refusals or limit is None:
            counts = str(len(step.changes)), str(len(step.refusals))
            table.add_row(step.name, *counts, f"{step.seconds:.1f}", "\n".join(_changes(step, limit)))
    if table.row_count:
        yield table
    idle = [step.name for step in passes if not (step.changes or step.refusals)]
    if idle:
        yield Text("Nothing to do for: " + ", ".join(idle))
    yield ""


def _changes(step: PassResult, limit: int | None) -> list[str]:
    lines = []
    for what, changes in grouped(step.changes, lambda change: change.what):
        times = f"{len(changes)} x " if len(changes) > 1 else ""
        lines.append(times + what + _names([change.node for change in changes], limit))
    return _cut(lines, limit)


def _refusals(passes: Sequence[PassResult], limit: int | None) -> Iterator[RenderableType]:
    table = new_table("Declined", "pass", "nodes", "reason", right=("nodes",))
    table.columns[0].no_wrap = True
    for step in passes:
        groups = grouped(step.refusals, lambda refusal: refusal.reason)
        for reason, refusals in groups[:limit]:
            text = reason + _names([refusal.node for refusal in refusals], limit)
            table.add_row(step.name, str(len(refusals)), _fitting(text, limit))
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
        table = new_table(
            f"In FP32{' or BF16' if plan.bf16 else ''}, the rest in {low}",
            "rule",
            "nodes",
            "reason [measured range]",
            right=("nodes",),
        )
        rules: dict[str, list[Decision]] = defaultdict(list)
        for decision in sorted(plan.decisions, key=lambda d: d.rule in FREE):  # what is free comes last
            rules[decision.rule].append(decision)
        for rule, members in rules.items():
            lines = [_decision(m) for m in members] if limit is None else _worst_by_reason(members)
            table.add_row(rule, str(len(members)), "\n".join(_cut(lines, limit)))
        yield table
    yield ""


def _worst_by_reason(decisions: Sequence[Decision]) -> list[str]:
    """A line for each reason, with the node whose range is the widest."""
    lines = []
    for reason, members in grouped(decisions, lambda decision: decision.reason):
        worst = max(members, key=lambda m: m.range.absmax if m.range else 0.0)
        times = f"{len(members)} x " if len(members) < len(decisions) else ""
        lines.append(_decision(worst) if len(members) == 1 else f"{times}{reason}; {_widest(worst)}")
    return lines


def _widest(decision: Decision) -> str:
    node = f"{decision.node} ({decision.op})"
    return f"widest at {node}: {decision.range}" if decision.range else f"such as {node}"


def _decision(decision: Decision) -> str:
    text = f"{decision.node} ({decision.op}): {decision.reason}"
    if decision.range is None or str(decision.range) in text:
        return text
    place = "it is" if decision.tensor in decision.reason.split() else f"{decision.tensor} is"
    return f"{text}, {place} in {decision.range}"


def checks_tables(checks: Sequence[Check], limit: int | None) -> Iterator[RenderableType]:
    """The checks with their outcome, and below them each output's error."""
    table = new_table("Verification", "check", "result", "s", "summary", right=("s",))
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
    table = new_table("Outputs against the original in FP32", "check", "output", *numbers, "", right=numbers)
    worst_first = sorted(rows, key=lambda row: (row[1].passed, row[0].name))
    for check, output in worst_first[: limit and 2 * limit]:
        table.add_row(
            check.name,
            _fitting(output.name, limit),
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
    yield Text(about_target(result.target))
    if result.data is not None:
        yield Text(f"Data: {result.data.text}", style="" if result.data.real else "yellow")
    told = result.data.text if result.data is not None else None
    for warning in (text for text in result.warnings if text != told):
        yield Text(f"Warning: {warning}", style="yellow")


def _print_next(result: FixResult, out: Console) -> None:
    command = next_command(result)
    if command is not None:
        note = remark(result)
        out.print(Text("Next" + (f" ({note})" if note else "") + ":"))
        out.print(Text(f"  {command}"), soft_wrap=True)  # one line, however long: it is there to be copied


def _names(nodes: Sequence[str], limit: int | None) -> str:
    """`: a, b, ... and 3 more`: a list of nodes is an example, `-v` is the record."""
    named = [node for node in nodes if node != "model"]
    return ": " + listed(named, None if limit is None else 2) if named else ""


def _fitting(text: str, limit: int | None) -> str:
    return text if limit is None else shorten(text)


def _cut(lines: list[str], limit: int | None) -> list[str]:
    if limit is None or len(lines) <= limit:
        return [_fitting(line, limit) for line in lines]
    return [*map(shorten, lines[:limit]), f"... and {len(lines) - limit} more: {MORE}"]
