"""The page of `fix`."""

from __future__ import annotations

from dataclasses import replace

from rewriter.hazards.kinds import KINDS
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.plan import Decision
from rewriter.jobs.fix.result import FixResult
from rewriter.report import fix as text
from rewriter.report.checks import judging_check
from rewriter.report.html.depth import LABELS, LARGEST, Nodes, depth_section
from rewriter.report.html.graphs import cause_graphs
from rewriter.report.html.outputs import pictures_section
from rewriter.report.html.render import Fact, Page, Section, part, run_section, table_sections
from rewriter.report.next_step import next_step
from rewriter.runtime.ranges.depth import TensorAtDepth


def page(result: FixResult, command: str = "") -> Page:
    """Returns the page of a result; `command` is the command line that gave it."""
    nodes = nodes_of(result)
    graphs = cause_graphs(result, nodes)
    of_node = {node: graph.id for graph in reversed(graphs) for node in graph.nodes}
    nodes = replace(nodes, graph=lambda node: of_node.get(node, ""))
    judging = judging_check(result.checks)
    tables = table_sections(text.tables(result, nodes.graph))
    sections = list[Section]()
    if judging:
        sections.append(tables.pop(0))  # its outputs
        sections += pictures_section(judging, result.side_by_side)
    sections += depth_section(result.depth, nodes, _lead(result))
    if graphs:
        used = {kind for graph in graphs for *_, kind, _ in graph.boxes}
        legend = [entry for entry in (*LABELS.items(), ("other", "no floats")) if entry[0] in used]
        drawn = part("graphs.html", graphs=graphs, legend=legend)
        lead = "The nodes next to the one that goes wrong, each tensor with its largest value."
        sections.append(Section("causes", "Around each cause", lead, [drawn]))
    following = next_step(result)
    commands = [("Builds the engine", following.build)]
    commands.append(("Runs it on a GPU, and compares", following.verify))
    facts = [Fact("Pipeline", result.pipeline, code=True)]
    run = run_section(command, commands, facts=facts, target=result.target, seconds=result.seconds)
    line, rows = text.verdict_line(result), list(text.rows(result, everything=True))
    links = {graph.title: graph.id for graph in graphs}
    return Page("fix", result.model.path, line, text.state(result), rows, [*sections, *tables, run], links)


def _lead(result: FixResult) -> str:
    lead = (
        "Every bar is one tensor, from its mean to its largest absolute value on the samples, measured in "
        "FP32 after the structural passes. A dot marks the tensor that shows a hazard. The "
        "strip below shows the type that each node computes in."
    )
    if result.side_by_side is not None:
        lead += " The curves are the error of each tensor in the worst sample, emulated, relative to FP32."
    return lead


def nodes_of(result: FixResult) -> Nodes:
    """The plan's types and hazards of the nodes, for the drawings."""
    plan, side = result.plan, result.side_by_side
    decisions: dict[str, Decision] = {d.key: d for d in result.decisions}
    low = plan.precision if plan else "fp32"

    def kind(tensor: TensorAtDepth) -> str:
        decision = decisions.get(tensor.key)
        if decision is not None:
            return "free" if decision.rule in FREE else decision.repair
        return "beyond" if low == "fp16" and not tensor.range.absmax <= LARGEST else low

    hazards = [d for d in result.decisions if d.rule in KINDS and d.rule not in FREE]
    marks = {d.tensor or d.key: f"{KINDS[d.rule].title}: {d.reason}" for d in hazards}
    errors = [(plan.name, plan.errors) for plan in (side.plain, side.fixed)] if side is not None else []
    return Nodes(kind, marks, errors=errors)
