"""Hazards that an already mixed model has settled: what would go wrong in FP16 stands in FP32 there."""

from __future__ import annotations

from onnx import NodeProto

from rewriter.hazards.survey import Hazard, Survey

ANY_TYPE = frozenset(
    "cast-pair wide-integer tf32 known-defect unmeasured no-schema outside-statistics random-data "
    "fp16-reference quantized".split()
)
"""Kinds that FP32 arithmetic has, too, or that are about no arithmetic."""

OF_RESULTS = frozenset({"overflow", "underflow"})
"""Kinds that stand wherever a Cast to the lower type follows, whatever the node itself computes in."""

OF_OPERANDS = frozenset("coordinates order positions phase integers comparison cancellation".split())
"""Kinds that no FP32 node repairs if what it reads was rounded before."""

KEPT = "nothing to do: this model computes it in FP32; keep it so"


def is_kept(survey: Survey, hazard: Hazard) -> bool:
    """Whether the model, mixed already, computes in FP32 what the hazard warns of.

    A Cast to the lower type behind it must not lose what FP32 saved.
    """
    node = hazard.node
    if not survey.mixed or hazard.rule in ANY_TYPE or not _computes_in_fp32(survey, node):
        return False
    if hazard.rule in OF_OPERANDS:
        return not any(survey.was_rounded(t) for t in node.input if survey.is_float(t))
    rounded = [t for t in node.output if survey.is_float(t) and survey.lowered(t)]
    if hazard.rule in OF_RESULTS:
        return not rounded
    measured = [survey.range(t) for t in rounded]
    return all(m is None or m.absmax <= survey.request.largest for m in measured)


def _computes_in_fp32(survey: Survey, node: NodeProto) -> bool:
    """Casts between float types compute nothing: they are judged by what they write."""
    if node.op_type == "Cast":
        return all(survey.is_float(t) for t in (*node.input, *node.output)) or survey.in_fp32(node)
    return survey.in_fp32(node)
