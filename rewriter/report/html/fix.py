"""The page of `fix`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rewriter.hazards.kinds import KINDS
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix.result import FixResult
from rewriter.judge.verdict import Check
from rewriter.report import fix as text
from rewriter.report import fix_summary
from rewriter.report.checks import judging_check
from rewriter.report.html.depth import LABELS, LARGEST, Nodes, beyond_limits, depth_section
from rewriter.report.html.outputs import adding_most, error_tile, output_cards, size
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import checks_table, decisions_table, passes_table
from rewriter.report.html.view import (
    Fact,
    Facts,
    Page,
    Section,
    State,
    Tile,
)
from rewriter.report.next_step import next_step
from rewriter.runtime.ranges.depth import TensorAtDepth

SUMMED = ("Wrong", "Done", "Repair")
"""Lines of the summary on the terminal that the page has, too: the others have parts of their own."""


def page(result: FixResult, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    states: dict[bool | None, State] = {None: "warn", True: "good", False: "bad"}
    source = result.model.path
    return Page(
        verb="fix",
        subject=str(source) if source else "a model in memory",
        verdict=text.verdict_line(result).plain,
        state=states[result.verified],
        tiles=list(_tiles(result)),
        warnings=[*result.warnings, *next_step(result).remarks],
        sections=list(_sections(result, command)),
        reasons=list(_reasons(result)),
    )


def _reasons(result: FixResult) -> Iterator[Fact]:
    """The cause of a failure, its nodes, and what to do."""
    if not result.conclusion.limit:
        return
    yield Fact("Cause", result.conclusion.limit)
    yield from adding_most(_checks(result))
    yield Fact("What to do", result.conclusion.remedy)


def _checks(result: FixResult) -> Sequence[Check]:
    return result.verdict.checks if result.verdict else ()


def _tiles(result: FixResult) -> Iterator[Tile]:
    check = judging_check(_checks(result))
    if check is not None:
        yield error_tile(check, failed=result.verified is False)
    plan = result.plan
    if result.before and plan is not None:
        plain = max(result.before, key=lambda o: (not o.finite, o.relative_l2))
        state: State = "plain" if plain.passed else "bad"
        yield Tile(f"In plain {plan.precision.upper()}", size(plain), "with nothing repaired", state)
    for latency in [check.latency for check in _checks(result) if check.latency][:1]:
        yield Tile("Latency", f"{latency.median_us:.1f} µs", f"± {latency.iqr_us:.1f}, on this GPU")
    if plan is not None:
        low = plan.float_nodes - len(plan.fp32) - len(plan.bf16)
        yield Tile(f"Nodes in {plan.precision.upper()}", str(low), f"of {plan.float_nodes} float nodes")
        free = sum(d.rule in FREE and d.repair == "fp32" for d in plan.decisions)
        yield Tile("Nodes in FP32", str(len(plan.fp32)), f"{free} of them at no cost" if free else "")
        if plan.bf16:
            yield Tile("Nodes in BF16", str(len(plan.bf16)))


def _sections(result: FixResult, command: str) -> Iterator[Section]:
    lines = [Fact(*row) for row in fix_summary.rows(result, everything=True) if row[0] in SUMMED]
    lead = "The causes in numbers, with what was done about each, and what the passes changed."
    yield Section("summary", "What was wrong, and what was done", lead, [Facts(lines)])
    checks = _checks(result)
    check = judging_check(checks)
    if check is not None:
        lead = f"Relative L2 error of every output against the original in FP32, by the check “{check.name}”."
        yield Section("outputs", "Outputs", lead, [output_cards(check, check.statistics, result.before)])
    yield _depth(result)
    if result.plan is not None:
        yield _plan(result.plan)
    lead = "What each pass did, and what it recognised and left unchanged, with the reason."
    yield Section("passes", "Changes and refusals", lead, [passes_table(result.passes)])
    lead = "Each step of verification; one that was not done says why."
    yield Section("verification", "Verification", lead, [checks_table(checks)])
    facts = [Fact("Pipeline", result.pipeline, code=True)]
    if result.output is not None:
        facts.insert(0, Fact("Written", str(result.output), code=True))
    yield run_section(
        command,
        facts=facts,
        target=result.target,
        data=result.data,
        seconds=result.seconds,
        following=next_step(result).commands,
    )


def _depth(result: FixResult) -> Section:
    lead = (
        "Every bar is one tensor, from its mean to its largest absolute value on the samples, measured in "
        "FP32 after the structural passes. A dot marks the tensor that is the evidence of a hazard. The "
        "strip below shows the type that each node computes in."
    )
    empty = "No ranges were measured: the plan was given, or no precision pass ran."
    return depth_section(result.depth, _nodes(result.plan), lead, empty)


def _nodes(plan: Plan | None) -> Nodes:
    decisions: dict[str, Decision] = {d.key: d for d in plan.decisions} if plan else {}
    low = plan.precision if plan else "fp32"

    def kind(tensor: TensorAtDepth) -> str:
        decision = decisions.get(tensor.key)
        if decision is not None:
            return decision.repair
        return "beyond" if low == "fp16" and not tensor.range.absmax <= LARGEST else low

    hazards = [d for d in decisions.values() if d.rule in KINDS and d.rule not in FREE]
    reasons = {d.tensor or d.key: f"{KINDS[d.rule].title}: {d.reason}" for d in hazards}
    nodes = {d.key: f"{KINDS[d.rule].title}: {d.reason}" for d in hazards}

    def mark(tensor: TensorAtDepth) -> str:
        seen = reasons.get(tensor.tensor) or reasons.get(tensor.key)
        return seen or (nodes.get(tensor.key, "") if beyond_limits(tensor.range) else "")

    return Nodes(kind, LABELS, mark, "evidence of a hazard", "Computes in")


def _plan(plan: Plan) -> Section:
    low = plan.precision.upper()
    if not plan.decisions:
        lead = f"No node needs another type: all {plan.float_nodes} float nodes compute in {low}."
        return Section("plan", "Plan", lead, [])
    count = f"{len(plan.decisions)} of {plan.float_nodes} float nodes"
    lead = f"{count} keep another type than {low}. Filter by rule, or by a part of a name."
    if plan.exponents:
        lead += f" {len(plan.exponents)} tensors are rescaled by powers of two, exactly."
    return Section("plan", "Plan", lead, [decisions_table(plan.decisions)])
