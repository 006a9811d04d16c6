"""The page of `fix`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rewriter.hazards.kinds import KINDS
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.plan import Decision, Plan
from rewriter.jobs.fix.result import FixResult
from rewriter.judge.verdict import Check
from rewriter.report import fix as text
from rewriter.report import fix_summary
from rewriter.report.checks import judging_check
from rewriter.report.html.depth import LABELS, LARGEST, Nodes, beyond_limits, depth_section
from rewriter.report.html.graphs import Graph, cause_graphs
from rewriter.report.html.outputs import adding_most, error_tile, output_cards, size
from rewriter.report.html.render import part
from rewriter.report.html.run import run_section
from rewriter.report.html.tables import checks_table, decisions_table, passes_table
from rewriter.report.html.view import Fact, Page, Section, State, Tile
from rewriter.report.next_step import next_step
from rewriter.runtime.ranges.depth import TensorAtDepth

SUMMED = ("Wrong", "Done", "Repair")
"""Lines of the summary on the terminal that the page has, too: the others have parts of their own."""

STATES: Mapping[str, State] = {"green": "good", "yellow": "warn", "bold red": "bad"}
"""States of the page by the style of the verdict on the terminal."""


def page(result: FixResult, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    verdict, source = text.verdict_line(result), result.model.path
    return Page(
        verb="fix",
        subject=str(source) if source else "a model in memory",
        verdict=verdict.plain,
        state=STATES[str(verdict.style)],
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
        yield error_tile(check, failed=STATES[str(text.verdict_line(result).style)] != "good")
    plan = result.plan
    if result.before and plan is not None:
        plain = max(result.before, key=lambda o: (not o.finite, o.relative_l2))
        state: State = "plain" if plain.passed else "bad"
        yield Tile(f"In plain {plan.precision.upper()}", size(plain), "with nothing repaired", state)
    for timed in [check for check in _checks(result) if check.latency][:1]:
        latency = timed.latency
        assert latency is not None
        yield Tile("Latency", f"{latency.median_us:.1f} µs", f"± {latency.iqr_us:.1f}, {timed.place}")
    if plan is not None:
        low = plan.float_nodes - len(plan.fp32) - len(plan.bf16)
        yield Tile(f"Nodes in {plan.precision.upper()}", str(low), f"of {plan.float_nodes} float nodes")
        free = sum(d.rule in FREE and d.repair == "fp32" for d in plan.decisions)
        yield Tile("Nodes in FP32", str(len(plan.fp32)), f"{free} of them at no cost" if free else "")
        if plan.bf16:
            yield Tile("Nodes in BF16", str(len(plan.bf16)))


def _sections(result: FixResult, command: str) -> Iterator[Section]:
    nodes = _nodes(result)
    graphs = cause_graphs(result, nodes)
    of_node = {node: graph.id for graph in reversed(graphs) for node in graph.nodes}
    nodes = replace(nodes, graph=lambda node: of_node.get(node, ""))
    links = {graph.title: graph.id for graph in graphs}
    rows = [row for row in fix_summary.rows(result, everything=True) if row[0] in SUMMED]
    lines = [Fact(*row, link=links.get(row[1], "")) for row in rows]
    lead = "The causes in numbers, with what was done about each, and what the passes changed."
    yield Section("summary", "What was wrong, and what was done", lead, [part("facts.html", rows=lines)])
    checks = _checks(result)
    check = judging_check(checks)
    if check is not None:
        lead = f"Relative L2 error of every output against the original in FP32, by the check “{check.name}”."
        cards = output_cards(check, check.statistics, result.data, result.before, result.side_by_side)
        yield Section("outputs", "Outputs", lead, [cards])
    yield _depth(result, nodes)
    if graphs:
        drawn = part("graphs.html", graphs=graphs, legend=_legend(graphs))
        lead = "The nodes next to the widest one of each cause. At each tensor stands its largest value."
        yield Section("causes", "Round each cause", lead, [drawn])
    if result.plan is not None:
        yield _plan(result.plan, nodes.graph)
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
        verify=next_step(result).verify,
    )


def _legend(graphs: Sequence[Graph]) -> list[tuple[str, str]]:
    used = {kind for graph in graphs for *_, kind, _ in graph.boxes}
    return [(kind, label) for kind, label in {**LABELS, "other": "no floats"}.items() if kind in used]


def _depth(result: FixResult, nodes: Nodes) -> Section:
    lead = (
        "Every bar is one tensor, from its mean to its largest absolute value on the samples, measured in "
        "FP32 after the structural passes. A dot marks the tensor that is the evidence of a hazard. The "
        "strip below shows the type that each node computes in."
    )
    if result.side_by_side is not None:
        lead += " The curves are the error of each tensor in the worst sample, emulated, relative to FP32."
    empty = "No ranges were measured: the plan was given, or no precision pass ran."
    return depth_section(result.depth, nodes, lead, empty)


def _nodes(result: FixResult) -> Nodes:
    plan, side = result.plan, result.side_by_side
    decisions: dict[str, Decision] = {d.key: d for d in plan.decisions} if plan else {}
    low = plan.precision if plan else "fp32"

    def kind(tensor: TensorAtDepth) -> str:
        decision = decisions.get(tensor.key)
        if decision is not None:
            return "free" if decision.rule in FREE else decision.repair
        return "beyond" if low == "fp16" and not tensor.range.absmax <= LARGEST else low

    hazards = [d for d in decisions.values() if d.rule in KINDS and d.rule not in FREE]
    reasons = {d.tensor or d.key: f"{KINDS[d.rule].title}: {d.reason}" for d in hazards}
    nodes = {d.key: f"{KINDS[d.rule].title}: {d.reason}" for d in hazards}

    masks = {node: str(cause) for cause in result.causes if cause.kind == "mask" for node in cause.nodes}

    def mark(tensor: TensorAtDepth) -> str:
        near = masks.get(tensor.node) if tensor.constant else reasons.get(tensor.key)
        seen = reasons.get(tensor.tensor) or near
        return seen or (nodes.get(tensor.key, "") if beyond_limits(tensor.range) else "")

    errors = [(one.name, one.errors) for one in (side.plain, side.fixed)] if side is not None else []
    return Nodes(kind, LABELS, mark, "evidence of a hazard", "Computes in", errors=errors)


def _plan(plan: Plan, graph_of: Callable[[str], str]) -> Section:
    low = plan.precision.upper()
    if not plan.decisions:
        lead = f"No node needs another type: all {plan.float_nodes} float nodes compute in {low}."
        return Section("plan", "Plan", lead, [])
    count = f"{len(plan.decisions)} of {plan.float_nodes} float nodes"
    lead = f"{count} keep another type than {low}. Filter by rule, or by a part of a name."
    if plan.exponents:
        lead += f" {len(plan.exponents)} tensors are rescaled by powers of two, exactly."
    return Section("plan", "Plan", lead, [decisions_table(plan.decisions, graph_of)])
