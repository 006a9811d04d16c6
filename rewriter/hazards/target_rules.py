"""Rules that ask the target: what its parser refuses, and which known defects a graph meets."""

from collections.abc import Iterator

from rewriter.base.errors import Severity
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.target.operators import refused, runs_on_dla
from rewriter.target.quirks import ASK, affected, kept, of_chains, repairs, table


def known_defects(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Nodes that meet a defect of the target's release, or of a release that the target may be."""
    opset = analysis.opsets.get("", 1)
    for quirk in table():
        concerned = quirk.concerns(analysis.request.target)
        if concerned is False or opset < quirk.min_opset or not quirk.meets(analysis.request.low):
            continue
        probed = analysis.request.target.answers.get(quirk.answer) == "wrong"
        where = f"seen by `rewriter probe` on {analysis.request.target}" if probed else quirk.releases
        reason = f"{quirk.title} ({where})"
        severity = quirk.severity if concerned else "note"
        remedy = quirk.remedy
        if quirk.repaired:
            remedy += ": `fix` does" if concerned else f"; {ASK}"
        for node in affected(analysis.graph, quirk):
            yield Hazard(node, "known-defect", reason, None, None, severity, remedy, quirk.link)


def kept_for_defects(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Nodes whose kernel in the lower precision has a defect in the target, and has none in FP32."""
    for quirk in repairs(analysis.request.target, analysis.request.low):
        for node in kept(analysis.graph, quirk):
            yield Hazard(node, "known-defect", f"{quirk.title} ({quirk.releases})")


def lowered_for_defects(analysis: GraphAnalysis) -> set[int]:
    """Identities of nodes that must not be in FP32 without need: their FP32 kernel has a defect there."""
    quirks = repairs(analysis.request.target, analysis.request.low)
    return {id(node) for quirk in quirks for node in of_chains(analysis.graph, quirk, quirk.lower)}


def refused_operators(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Nodes that the target's parser refuses, and those that a DLA leaves to the GPU."""
    request = analysis.request
    refusals = {id(r.node): r for r in refused(analysis.graph, request.parser, request.plugin_types)}
    for node in analysis.graph.nodes:
        if (refusal := refusals.get(id(node))) is not None:
            severity: Severity = "warning" if refusal.row.repaired else "error"
            remedy = refusal.row.remedy or None
            yield Hazard(node, "refused-operator", refusal.reason, severity=severity, repair=remedy)
        elif request.target.device and not runs_on_dla(node):
            reason = f"the {request.target.device.upper()} has no {node.op_type}: it runs on the GPU"
            fallback = "allow the GPU (--allowGPUFallback); each change of device copies tensors"
            yield Hazard(node, "refused-operator", reason, severity="note", repair=fallback)
