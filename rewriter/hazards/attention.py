"""Hazard rules about attention: masks."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.ir.graph import display_name
from rewriter.ir.graph.ops import CHEAP, SOFTMAX
from rewriter.ir.patterns.masks import Use, extreme, huge_uses, obstacle

BEFORE_SOFTMAX = CHEAP - SOFTMAX


def masks(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Mask constants that become infinite in the lower type, whatever the samples' masks are.

    Multiplied by the 0 of an unmasked entry they are NaN. If they cannot be clamped, because the other factor
    may hold other values than 0 and 1, all nodes from there to the Softmax need FP32. Added or selected they
    are harmless until a row is masked entirely: its Softmax is NaN (docs/hazards.md#masks), as is -inf plus
    another mask's inf.
    """
    for use in mask_uses(analysis, products=True):
        value = f"{extreme(use.value):.4g}"
        tensor, reader = use.node.input[use.index], display_name(use.node)
        if use.node.op_type == "Mul":
            reason = f"{value} in {reader} becomes infinite, and 0 times infinity is NaN"
            before = analysis.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
            for node in (use.node, *(n for _, n in before)):
                yield analysis.hazard(node, "mask", reason, tensor, "error")
        else:
            guarded = _guarded(analysis, use.node)
            end = "which is replaced after the Softmax" if guarded else "and a row masked entirely is NaN"
            severity: Severity = "warning" if use.relies and not guarded else "note"
            reason = f"{value} in {reader} becomes infinite, {end}"
            yield Hazard(use.node, "mask", reason, tensor, severity=severity)


def mask_uses(analysis: GraphAnalysis, *, products: bool = False) -> Iterator[Use]:
    """Constants that become infinite in the lower type and that reach nothing but a Softmax.

    `products`: also finite factors that reach a Softmax among others.
    """
    for use in huge_uses(analysis.graph):
        huge = abs(extreme(use.value)) > analysis.largest
        if huge and (not obstacle(analysis.graph, use) or (products and _multiplies_scores(analysis, use))):
            yield use


def _multiplies_scores(analysis: GraphAnalysis, use: Use) -> bool:
    """True for a finite factor of what reaches a Softmax."""
    if use.node.op_type != "Mul" or not np.isfinite(use.value).all():
        return False
    readers = analysis.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
    return any(n.op_type in ("Softmax", "Attention") for _, n in readers)


def _guarded(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True if an IsNaN reads the Softmax's result, as exporters write it to replace NaN."""
    reached = analysis.downstream(node.output[0], lambda n: n.op_type in CHEAP)
    softmaxes = [n for _, n in reached if n.op_type == "Softmax"]
    readers = [r for s in softmaxes for r in analysis.graph.consumers(s.output[0])]
    return any(r.op_type == "IsNaN" for r in readers)


def of_activations(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for a MatMul of two computed tensors that sums more than one term."""
    if node.op_type != "MatMul" or any(analysis.is_constant(t) for t in node.input):
        return False
    shape = analysis.graph.shape(node.input[0])
    computed = all(analysis.producer(t) is not None for t in node.input)
    return computed and (shape is None or shape[-1:] != (1,))
