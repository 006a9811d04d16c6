"""Shows the result of `fix`: ASCII tables for 80 columns or more, without colour in a pipe, and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rewriter.jobs.fix.result import FixResult
from rewriter.pipeline.driver import PassResult
from rewriter.plan import Decision, Plan
from rewriter.planning.free_fp32 import FREE
from rewriter.report import checks, frontier, searched
from rewriter.report.json import data_dict, document
from rewriter.report.next_step import next_command, remark
from rewriter.report.terminal import (
    MORE,
    about_target,
    closing_lines,
    first_lines,
    fitting,
    grouped,
    listed,
    new_table,
    print_report,
)
from rewriter.verification.verdict import Check


def print_result(result: FixResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the result, and the next command; see `print_report`."""
    print_report(partial(_sections, result), verdict_line(result), out, verbosity)
    if verbosity >= 0:
        _print_next(result, out)


def verdict_line(result: FixResult) -> Text:
    """One line: verified or not, the file, and the number of nodes in FP32."""
    where = str(result.output) if result.output else "nothing written"
    if result.conclusion.ending == "unbuildable":
        return Text(f"Does not build as it came: {where}", style="bold red")
    if result.verified is None:
        text, style = f"Fixed, NOT verified (--no-verify): {where}", "yellow"
    elif result.conclusion.ending == "as-fp32":
        text, style = f"Fixed, as accurate as FP32 here: {where}", "green"
    elif result.verified:
        text, style = f"Fixed and verified: {where}", "green"
    else:
        made = result.verdict.checks if result.verdict else ()
        text, style = f"VERIFICATION FAILED ({_failed(made)}): {where}", "bold red"
    return Text(text + _share(result.plan), style=style)


def _failed(made: Sequence[Check]) -> str:
    return ", ".join(c.name for c in made if c.passed is False) or "no check could be made"


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
    if result.repairs:
        yield Text("Repair")
        yield from (Text(f"  {line}") for line in result.repairs)
        yield ""
    if result.verdict is not None:
        yield from checks.sections(result.verdict.checks, limit)
    if result.searched is not None:
        yield from searched.sections(result.searched, limit)
    if result.frontier is not None:
        yield from frontier.sections(result.frontier)
    yield from _conclusion(result)
    yield Text(about_target(result.target))
    yield from closing_lines(result.data, result.warnings, result.seconds)


def _conclusion(result: FixResult) -> Iterator[Text]:
    """The limit and the remedy of a failure, and remarks on the result."""
    found = result.conclusion
    yield from (Text(f"Note: {text}") for text in found.remarks)
    if found.limit:
        yield Text(f"Limit: {found.limit}")
        yield Text(f"Remedy: {found.remedy}")


def _passes(passes: Sequence[PassResult], limit: int | None) -> Iterator[RenderableType]:
    numbers = ("changed", "declined", "s")
    table = new_table("Passes", "pass", *numbers, "what", right=numbers, whole="pass")
    for step in passes:
        if step.changes or step.refusals or limit is None:
            counts = str(len(step.changes)), str(len(step.refusals))
            table.add_row(step.name, *counts, f"{step.seconds:.1f}", "\n".join(_changes(step, limit)))
    if table.row_count:
        yield table
    idle = [step.name for step in passes if not (step.changes or step.refusals)]
    if idle:
        yield Text("No changes by: " + ", ".join(idle))
    yield ""


def _changes(step: PassResult, limit: int | None) -> list[str]:
    lines = []
    for what, changes in grouped(step.changes, lambda change: change.what):
        times = f"{len(changes)} x " if len(changes) > 1 else ""
        lines.append(times + what + _names([change.node for change in changes], limit))
    return first_lines(lines, limit)


def _refusals(passes: Sequence[PassResult], limit: int | None) -> Iterator[RenderableType]:
    table = new_table("Declined", "pass", "nodes", "reason", right=("nodes",), whole="pass")
    for step in passes:
        groups = grouped(step.refusals, lambda refusal: refusal.reason)
        for reason, refusals in groups[:limit]:
            text = reason + _names([refusal.node for refusal in refusals], limit)
            table.add_row(step.name, str(len(refusals)), fitting(text, limit))
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
        for decision in sorted(plan.decisions, key=lambda d: d.rule in FREE):  # those at no cost come last
            rules[decision.rule].append(decision)
        for rule, members in rules.items():
            lines = [_decision(m) for m in members] if limit is None else _worst_by_reason(members)
            table.add_row(rule, str(len(members)), "\n".join(first_lines(lines, limit)))
        yield table
    yield ""


def _worst_by_reason(decisions: Sequence[Decision]) -> list[str]:
    """One line per reason, with the node whose range is the widest."""
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


def _print_next(result: FixResult, out: Console) -> None:
    command = next_command(result)
    if command is not None:
        note = remark(result)
        out.print(Text("Next" + (f" ({note})" if note else "") + ":"))
        out.print(Text(f"  {command}"), soft_wrap=True)  # one line, to be copied


def _names(nodes: Sequence[str], limit: int | None) -> str:
    """Returns `: a, b, ... and 3 more`, or all nodes if everything is shown."""
    named = [node for node in nodes if node != "model"]
    return ": " + listed(named, None if limit is None else 2) if named else ""


def as_dict(result: FixResult) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes, in a fixed order."""
    model = result.model
    return document(
        {
            "input": str(model.path) if model.path else None,
            "output": str(result.output) if result.output else None,
            "target": str(result.target),
            "probe": result.target.known_from or None,
            "opset": model.opset,
            "pipeline": result.pipeline,
            "passes": [asdict(step) for step in result.passes],
            "plan": _plan_dict(result.plan) if result.plan else None,
            "data": data_dict(result.data) if result.data else None,
            "verified": result.verified,
            "conclusion": asdict(result.conclusion),
            "checks": [checks.check_dict(check) for check in result.verdict.checks] if result.verdict else [],
            "frontier": frontier.frontier_dict(result.frontier) if result.frontier else None,
            "searched": searched.searched_dict(result.searched) if result.searched else None,
            "warnings": result.warnings,
            "seconds": result.seconds,
            "next_command": next_command(result),
        }
    )


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return {
        "precision": plan.precision,
        "io": plan.io,
        "float_nodes": plan.float_nodes,
        "fp32": [_decision_dict(decision) for decision in plan.decisions if decision.repair == "fp32"],
        "bf16": [_decision_dict(decision) for decision in plan.decisions if decision.repair == "bf16"],
    }


def _decision_dict(decision: Decision) -> dict[str, Any]:
    return {name: value for name, value in asdict(decision).items() if name not in ("key", "repair")}
