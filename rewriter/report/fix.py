"""Shows the result of `fix`: a summary, tables for those who ask for them, and JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.english import count
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix.result import FixResult
from rewriter.pipeline.driver import PassResult
from rewriter.report import checks, fix_summary
from rewriter.report.json import data_dict, document
from rewriter.report.next_step import next_step
from rewriter.report.terminal import about_target, grouped, new_table, print_report, time_line


def print_result(result: FixResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the result, and the next command; see `print_report`."""
    summary = fix_summary.rows(result, everything=verbosity > 0)
    following = next_step(result)
    commands = list(zip(("Next", "or"), following.commands.values(), strict=False))
    commands += [("then", following.verify)] if following.verify else []
    print_report(verdict_line(result), summary, partial(_sections, result), out, verbosity, commands)


def verdict_line(result: FixResult) -> Text:
    """One line: how it was verified, the file, and the number of nodes in FP32."""
    where = str(result.output) if result.output else "nothing written"
    if result.conclusion.kind == "unbuildable":
        return Text(f"{result.ending}: {result.model.path or 'the model'}", style="bold red")
    failed = result.verified is False
    style = "bold red" if failed else "green" if result.proven else "yellow"
    share = _share(result) if result.conclusion.lowered or failed else ""
    return Text(f"{result.ending}: {where}{share}", style=style)


def _share(result: FixResult) -> str:
    plan = result.plan
    if plan is None:
        return " (ALL of it in FP32)" if result.repairs else ""
    if plan.float_nodes and len(plan.fp32) == plan.float_nodes:
        return f" (ALL {plan.float_nodes} float nodes in FP32)"
    bf16 = f", {len(plan.bf16)} in BF16" if plan.bf16 else ""
    free = sum(d.rule in FREE and d.repair == "fp32" for d in plan.decisions)
    why = f", {free} of them because it is free" if free else ""
    return f" ({len(plan.fp32)} of {count(plan.float_nodes, 'float node')} in FP32{why}{bf16})"


def _sections(result: FixResult) -> Iterator[RenderableType]:
    yield from _passes(result.passes)
    yield from _refusals(result.passes)
    if result.plan is not None:
        yield from _decisions(result.plan)
    if result.verdict is not None:
        yield from checks.sections(result.verdict.checks)
    yield Text(about_target(result.target))
    yield time_line(result.seconds)


def _passes(passes: Sequence[PassResult]) -> Iterator[RenderableType]:
    numbers = ("changed", "declined", "s")
    table = new_table("Passes", "pass", *numbers, "what", right=numbers, whole="pass")
    for step in passes:
        if step.changes or step.refusals:
            counts = str(len(step.changes)), str(len(step.refusals))
            table.add_row(step.name, *counts, f"{step.seconds:.1f}", "\n".join(_changes(step)))
    if table.row_count:
        yield table
    idle = [step.name for step in passes if not (step.changes or step.refusals)]
    if idle:
        yield Text("No changes by: " + ", ".join(idle))
    yield ""


def _changes(step: PassResult) -> Iterator[str]:
    for what, changes in grouped(step.changes, lambda change: change.what):
        times = f"{len(changes)} x " if len(changes) > 1 else ""
        yield times + what + _names([change.node for change in changes])


def _refusals(passes: Sequence[PassResult]) -> Iterator[RenderableType]:
    table = new_table("Declined", "pass", "nodes", "reason", right=("nodes",), whole="pass")
    for step in passes:
        for reason, refusals in grouped(step.refusals, lambda refusal: refusal.reason):
            table.add_row(step.name, str(len(refusals)), reason + _names([r.node for r in refusals]))
    if table.row_count:
        yield table
        yield ""


def _decisions(plan: Plan) -> Iterator[RenderableType]:
    low = plan.precision.upper()
    if not plan.decisions:
        yield Text(f"No node needs FP32: all {count(plan.float_nodes, 'float node')} are {low}.")
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
            table.add_row(rule, str(len(members)), "\n".join(map(_decision, members)))
        yield table
    yield ""


def _decision(decision: Decision) -> str:
    text = f"{decision.node} ({decision.op}): {decision.reason}"
    if decision.range is None or str(decision.range) in text:
        return text
    place = "it is" if decision.tensor in decision.reason.split() else f"{decision.tensor} is"
    return f"{text}, {place} in {decision.range}"


def _names(nodes: Sequence[str]) -> str:
    named = [node for node in nodes if node != "model"]
    return ": " + ", ".join(named) if named else ""


def as_dict(result: FixResult) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes, in a fixed order."""
    model, following = result.model, next_step(result)
    return document(
        {
            "input": str(model.path) if model.path else None,
            "output": str(result.output) if result.output else None,
            "target": str(result.target),
            "probe": result.target.known_from or None,
            "opset": model.opset,
            "pipeline": result.pipeline,
            "passes": [asdict(step) for step in result.passes],
            "causes": [asdict(cause) for cause in result.causes],
            "plan": _plan_dict(result.plan) if result.plan else None,
            "data": data_dict(result.data) if result.data else None,
            "verified": result.verified,
            "ending": result.ending,
            "proven": result.proven,
            "conclusion": asdict(result.conclusion),
            "latency_shares": [asdict(share) for share in result.latency_shares],
            "before": [asdict(output) for output in result.before],
            "checks": [checks.check_dict(check) for check in result.verdict.checks] if result.verdict else [],
            "repairs": result.repairs,
            "constraints": str(result.constraints) if result.constraints else None,
            "warnings": result.warnings,
            "seconds": result.seconds,
            "next_command": following.first,
            "next_commands": dict(following.commands),
            "next_verify": following.verify or None,
            "next_remarks": list(following.remarks),
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
