"""One hazard rule on one small graph, for tests."""

from __future__ import annotations

import math
from collections.abc import Mapping

import graphs
from onnx import TensorProto

from rewriter.graph import open_graphs
from rewriter.hazards import RULES, PrecisionRequest, Survey
from rewriter.model import facts
from rewriter.plan import Range

NAMES = {rule.__name__: rule for rule in RULES}

Ranges = Mapping[str, Range | tuple[float, float]]


def surveyed(
    text: str,
    ranges: Ranges | None = None,
    *,
    request: PrecisionRequest | None = None,
    mixed: bool = False,
    opset: int = 17,
    scope: int = 0,
) -> Survey:
    """The survey of one graph; ranges are (low, high) or whole."""
    source = graphs.graph(text, opset=opset, ir=10 if opset > 17 else 8)
    measured = {
        (scope, name): r
        if isinstance(r, Range)
        else Range(r[0], r[1], max(map(abs, r)) / 2, math.isfinite(r[1]))
        for name, r in (ranges or {}).items()
    }
    graph = open_graphs(source, facts.infer(source))[scope]
    return Survey(
        graph, scope, measured, {"": opset}, request or PrecisionRequest(TensorProto.FLOAT16), mixed
    )


def found(
    rule: str,
    text: str,
    ranges: Ranges | None = None,
    *,
    request: PrecisionRequest | None = None,
    mixed: bool = False,
    opset: int = 17,
    scope: int = 0,
) -> str:
    """Outputs of the nodes of one graph that a rule of `fix` names, sorted."""
    survey = surveyed(text, ranges, request=request, mixed=mixed, opset=opset, scope=scope)
    return " ".join(sorted({h.node.output[0] for h in NAMES[rule](survey)}))
