"""Results as one self-contained HTML page: the terminal's report, with drawings, and tables that sort.

`write` takes the result of any command, and `render` turns a page into HTML with the templates beside it.
"""

from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from rewriter.base.errors import UsageError
from rewriter.base.text import article
from rewriter.hazards.analysis import KINDS
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.ir.model import write_text
from rewriter.ir.plan import Decision
from rewriter.ir.reading import read_json
from rewriter.jobs.scan import ScanResult
from rewriter.report import fix, locate, scan, verify
from rewriter.report.checks import judging_check
from rewriter.report.fix import next_step
from rewriter.report.html.depth import LABELS, LARGEST, Nodes, depth_section
from rewriter.report.html.graphs import cause_graphs
from rewriter.report.html.outputs import pictures_section
from rewriter.report.html.render import Fact, Page, Section, html, part, run_section, table_sections
from rewriter.report.json import plain
from rewriter.report.results import FixResult, VerifyResult
from rewriter.runtime.ranges import TensorAtDepth
from rewriter.verification.locate.location import Location

HINT = "give a file that fix, scan, verify or locate wrote with --json, for one model"


def as_html(result: Any, command: str = "") -> str:
    """Returns the page of a result of `fix`, `scan`, `verify` or `locate`; `command` repeats the run."""
    return html(_page(result, command))


def write(result: Any, path: Path, command: str = "") -> None:
    """Write the page of a result; raises OutputError if the file cannot be written."""
    write_text(as_html(result, command), path)


def saved_page(result: Any, command: str = "") -> dict[str, Any]:
    """Returns the key of a JSON report that `rewriter report` draws; no key if a result has no page."""
    drawn = _page.dispatch(type(result)) is not _page.dispatch(object)
    return {"page": plain(_page(result, command))} if drawn else {}


@dataclass(frozen=True)
class Saved:
    """The keys of a JSON report that a page needs."""

    schema_version: Literal[1]
    page: Page


def html_of_saved(path: Path) -> str:
    """Returns the page of a saved report; a UsageError names the file and the key."""
    saved: Saved = read_json(path, Saved, HINT, extra="ignore")
    try:
        return html(saved.page)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise UsageError("it has a page that cannot be drawn", where=str(path), hint=HINT) from error


@singledispatch
def _page(result: Any, command: str) -> Page:
    hint = "give what fix, scan, verify or locate returned"
    raise UsageError(f"there is no page of {article(type(result).__name__)}", where="result=", hint=hint)


@_page.register
def _(result: ScanResult, command: str) -> Page:
    commands = [("Repairs what was found", scan.next_command(result))]
    run = run_section(command, commands, target=result.target, seconds=result.seconds)
    line, state, rows = scan.verdict_line(result), scan.state(result), list(scan.rows(result))
    return Page("scan", result.path, line, state, rows, [*table_sections(scan.tables(result)), run])


@_page.register
def _(result: VerifyResult, command: str) -> Page:
    judging = judging_check(result.checks)
    commands = [("Finds the tensor that goes wrong first", verify.next_command(result))]
    allowed = f"{result.tolerance.metric} {result.tolerance.value:.3g}: {result.tolerance.source}"
    facts = [Fact("Original", str(result.original or "in memory"), code=True), Fact("Allowed", allowed)]
    sections = [
        *(pictures_section(judging) if judging else ()),
        *table_sections(verify.tables(result)),
        run_section(command, commands, facts=facts, seconds=result.seconds),
    ]
    line, state = verify.verdict_line(result), verify.state(result)
    return Page("verify", result.fixed, line, state, list(verify.rows(result)), sections)


@_page.register
def _(found: Location, command: str) -> Page:
    facts = [Fact("Original", str(found.original or "in memory"), code=True)]
    sections = [*table_sections(locate.tables(found)), run_section(command, facts=facts)]
    line, state = locate.verdict_line(found), locate.state(found)
    return Page("locate", found.other, line, state, list(locate.rows(found)), sections)


@_page.register
def _(result: FixResult, command: str) -> Page:
    nodes = nodes_of(result)
    graphs = cause_graphs(result, nodes)
    of_node = {node: graph.id for graph in reversed(graphs) for node in graph.nodes}
    nodes = replace(nodes, graph=lambda node: of_node.get(node, ""))
    judging = judging_check(result.checks)
    tables = table_sections(fix.tables(result, nodes.graph))
    sections = list[Section]()
    if judging:
        sections.append(tables.pop(0))  # its outputs
        sections += pictures_section(judging, result.side_by_side)
    sections += depth_section(result.depth, nodes, DEPTH + CURVES * (result.side_by_side is not None))
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
    line, rows = fix.verdict_line(result), list(fix.rows(result, everything=True))
    links = {graph.title: graph.id for graph in graphs}
    return Page("fix", result.model.path, line, fix.state(result), rows, [*sections, *tables, run], links)


DEPTH = (
    "Every bar is one tensor, from its mean to its largest absolute value on the samples, measured in FP32 "
    "after the structural passes. A dot marks the tensor that shows a hazard. The strip below shows the type "
    "that each node computes in."
)
CURVES = " The curves are the error of each tensor in the worst sample, emulated, relative to FP32."


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
