"""One hazard rule on one small graph, for tests."""

import math
from collections.abc import Mapping

import graphs

from rewriter.hazards import RULES, SCAN_RULES, GraphAnalysis, PrecisionRequest
from rewriter.hazards.analysis import KINDS
from rewriter.ir.graph import open_graphs
from rewriter.ir.plan import Range

NAMES = {rule.__name__: rule for rule in (*RULES, *SCAN_RULES)}
Ranges = Mapping[str, Range | tuple[float, float]]


def analyzed(
    text: str,
    ranges: Ranges | None = None,
    *,
    request: PrecisionRequest | None = None,
    mixed: bool = False,
    opset: int = 17,
    scope: int = 0,
) -> GraphAnalysis:
    """The survey of one graph; ranges are (low, high) or whole."""
    source = graphs.graph(text, opset=opset, ir=10 if opset > 17 else 8)
    measured = {
        (scope, name): r
        if isinstance(r, Range)
        else Range(r[0], r[1], max(map(abs, r)) / 2, math.isfinite(r[1]))
        for name, r in (ranges or {}).items()
    }
    graph = open_graphs(source)[scope]
    request = request or PrecisionRequest()
    return GraphAnalysis(graph, {"": opset}, request.low, scope, measured, request, mixed)


def found(rule: str, analysis: GraphAnalysis, *, severities: bool = False) -> str:
    """Outputs of the nodes that a rule names, sorted; with `severities`, `severity output` of each."""
    hazards = list(NAMES[rule](analysis))
    if severities:
        assert {h.kind for h in hazards} <= KINDS.keys()
        return ", ".join(
            sorted({f"{h.severity or KINDS[h.kind].severity} {h.node.output[0]}" for h in hazards})
        )
    return " ".join(sorted({h.node.output[0] for h in hazards}))
