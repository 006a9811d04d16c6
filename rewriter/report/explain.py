"""Explains rules, and nodes of a fixed model: `rewriter rule` and `rewriter why`."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import NodeProto

from rewriter.base.errors import UsageError, nearest
from rewriter.base.text import Row, Summary
from rewriter.hazards.analysis import KINDS
from rewriter.hazards.planning import free_fp32, planner
from rewriter.ir.graph import display_name, open_graphs
from rewriter.ir.graph.editor import TAG, GraphEditor
from rewriter.ir.model import Model, load
from rewriter.ir.plan import SEARCHED
from rewriter.jobs.fix.provenance import ALREADY_AVOIDED, RULE, VERSION, noted
from rewriter.jobs.fix.refusals import near_names
from rewriter.target import quirks

PAGE = "docs/findings.md"

OTHER_RULES: Mapping[str, str] = {
    "user": "you named the node, its operator, or a plan that has it",
    SEARCHED: "a search for a plan within the tolerance keeps it",
    "no-lower-type": "the operator has no FP16 (BF16) in this opset or in TensorRT, or reads bits",
    "unknown-type": "the type of one of its tensors is not known",
    "generated": "random numbers: another type would give another sequence",
    "float64": "it only makes a float64 output, which needs more than 11 bits",
    "subgraph": "it holds branches or a loop body, and keeps the types that these exchange",
    planner.BETWEEN: "it lies between nodes in FP32: two Casts would cost more than it does in FP32",
    planner.RESIDUAL: "it adds to a stream whose first sum is kept in FP32",
    free_fp32.RULE: "free: elementwise after an FP16 product, whose sum then stays in FP32",
    free_fp32.NORM_RULE: "free: a norm of one operator, which computes in FP32 inside",
    free_fp32.SOFTMAX_RULE: "free: attention's Softmax, with which attention stays one kernel",
    free_fp32.RECIPROCAL_RULE: "free: a division by a constant, which FP16 would round to a product",
    free_fp32.DOT_PRODUCT_RULE: "free: a written-out sum of products",
}
"""Rules that a plan names for nodes in which nothing goes wrong."""


@dataclass(frozen=True, repr=False)
class RuleExplanation(Summary):
    """A kind of hazard, another rule of a plan, or a known defect of TensorRT."""

    name: str
    title: str  # its name in reports
    cause: str = ""  # the explanation
    picture: str = ""  # the same as text; "" if there is none
    severity: str = ""  # error, warning or note; "" for rules that are no hazards
    remedy: str = ""  # advice; "" where nothing has to be done
    link: str = PAGE

    def summary(self) -> Iterator[Row]:
        yield self.name, self.title + (f" ({self.severity})" if self.severity else "")
        for title, text in (("Cause", self.cause), ("Helps", self.remedy), ("More", self.link)):
            yield from [(title, text)] if text else []


@dataclass(frozen=True, repr=False)
class NodeExplanation(Summary):
    """A node of a fixed model."""

    node: str
    types: str  # of its outputs
    reads: tuple[str, ...]  # neighbours with their types
    feeds: tuple[str, ...]  # neighbours with their types
    reason: str  # as `fix` noted it; "" if it noted none
    made_by: str = ""  # the pass that made it; "" for a node of the original
    rule: RuleExplanation | None = None

    def summary(self) -> Iterator[Row]:
        yield self.node, self.types
        yield "Reason", self.reason or "none: its values fit the lower precision, or it has no floats"
        yield "Reads", ", ".join(self.reads) or "nothing"
        yield "Feeds", ", ".join(self.feeds) or "nothing"
        if self.made_by:
            yield "Made by", f"{self.made_by}: `rewriter passes show {self.made_by}`"


def rules() -> dict[str, str]:
    """Every rule and known defect by name, with its title."""
    defects = {quirk.id: quirk.title for quirk in quirks.table()}
    return {name: kind.title for name, kind in KINDS.items()} | dict(OTHER_RULES) | defects


def rule(name: str) -> RuleExplanation:
    """Explains a rule: its cause, a picture of it, and what helps; UsageError: there is no such rule."""
    if name in KINDS:
        kind = KINDS[name]
        return RuleExplanation(name, kind.title, kind.why, kind.picture, kind.severity, kind.repair)
    if name in OTHER_RULES:
        return RuleExplanation(name, "a rule that is no hazard", OTHER_RULES[name])
    for quirk in quirks.table():
        if quirk.id == name:
            helps = quirk.remedy.removeprefix("proposed: ") + (" (`fix` does)" if quirk.repaired else "")
            chain = " --> ".join(quirk.chain)
            return RuleExplanation(
                name, quirk.title, quirk.releases, chain, quirk.severity, helps, quirk.link or quirk.source
            )
    raise UsageError(f"there is no rule {name!r}", where="rewriter rule", hint=nearest(name, rules()))


def why(node: str, fixed: str | os.PathLike[str] | onnx.ModelProto) -> NodeExplanation:
    """Explains a node of a model that `fix` wrote, from what `fix` noted in the file.

    Args:
        node: Its name, or the name of one of its outputs.

    Raises:
        ModelError: it is no model.
        UsageError: it has no such node, or no notes of `fix`.
    """
    model = load(fixed)
    if not noted(model, VERSION):
        raise UsageError("the file has no notes of `fix`", where=str(fixed), hint="name a result of `fix`")
    graphs = open_graphs(model)
    pairs = [(graph, candidate) for graph in graphs for candidate in graph.nodes]
    for graph, candidate in pairs:
        if node in (candidate.name, display_name(candidate), *candidate.output):
            return _explained(graph, candidate, model)
    hint = f"there are {near_names(node, (display_name(candidate) for _, candidate in pairs))}"
    raise UsageError(f"no node has the name {node!r}", where=str(fixed), hint=hint)


def _explained(graph: GraphEditor, node: NodeProto, model: Model) -> NodeExplanation:
    notes = {entry.key: entry.value for entry in node.metadata_props}
    makers = (graph.producer(name) for name in node.input if name)
    readers = (reader for name in node.output for reader in graph.consumers(name))
    name = notes.get(RULE, "")
    return NodeExplanation(
        f"{display_name(node)} ({node.op_type})",
        _types(graph, node),
        tuple(f"{display_name(m)} ({m.op_type}, {_types(graph, m)})" for m in makers if m is not None),
        tuple(f"{display_name(r)} ({r.op_type}, {_types(graph, r)})" for r in readers),
        notes.get(ALREADY_AVOIDED, ""),
        notes.get(TAG, ""),
        rule(name) if name in rules() else None,
    )


def _types(graph: GraphEditor, node: NodeProto) -> str:
    """`FP16` or `FP32, INT64`: the types of a node's outputs."""
    names = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16"}
    kinds = [graph.dtype(name) for name in node.output if name]
    texts = [onnx.TensorProto.DataType.Name(kind) if kind else "unknown type" for kind in kinds]
    return ", ".join(dict.fromkeys(names.get(text, text) for text in texts))
