"""Hazard rules about attention: masks, and linear attention without normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.hazards.analysis import Survey
from rewriter.hazards.kinds import Hazard
from rewriter.ir.graph import label
from rewriter.ir.graph.ops import CHEAP, SOFTMAX
from rewriter.ir.patterns.masks import Use, extreme, huge_uses, obstacle

BEFORE_SOFTMAX = CHEAP - SOFTMAX


def masks(survey: Survey) -> Iterator[Hazard]:
    """Mask constants that become infinite in the lower type, whatever the samples' masks are.

    Multiplied by the 0 of an unmasked entry they are NaN. If they cannot be clamped, because the other factor
    may hold other values than 0 and 1, all nodes from there to the Softmax need FP32. Added or selected they
    are harmless until a row is masked entirely: its Softmax is NaN (docs/hazards.md#masks), as is -inf plus
    another mask's inf.
    """
    for use in mask_uses(survey, products=True):
        value = f"{extreme(use.value):.4g}"
        tensor, place = use.node.input[use.index], label(use.node)
        if use.node.op_type == "Mul":
            reason = f"{value} in {place} becomes infinite, and 0 times infinity is NaN"
            before = survey.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
            for node in (use.node, *(n for _, n in before)):
                yield survey.hazard(node, "mask", reason, tensor, "error")
        else:
            guarded = _guarded(survey, use.node)
            end = "which is replaced after the Softmax" if guarded else "and a row masked entirely is NaN"
            severity: Severity = "warning" if use.relies and not guarded else "note"
            reason = f"{value} in {place} becomes infinite, {end}"
            yield Hazard(use.node, "mask", reason, tensor, severity=severity)


def mask_uses(survey: Survey, *, products: bool = False) -> Iterator[Use]:
    """Constants that become infinite in the lower type and that reach nothing but a Softmax.

    `products`: also finite factors that reach a Softmax among others.
    """
    for use in huge_uses(survey.graph):
        huge = abs(extreme(use.value)) > survey.largest
        if huge and (not obstacle(survey.graph, use) or (products and _multiplies_scores(survey, use))):
            yield use


def _multiplies_scores(survey: Survey, use: Use) -> bool:
    """True for a finite factor of what reaches a Softmax."""
    if use.node.op_type != "Mul" or not np.isfinite(use.value).all():
        return False
    readers = survey.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
    return any(n.op_type == "Softmax" for _, n in readers)


def _guarded(survey: Survey, node: NodeProto) -> bool:
    """True if an IsNaN reads the Softmax's result, as exporters write it to replace NaN."""
    reached = survey.downstream(node.output[0], lambda n: n.op_type in CHEAP)
    softmaxes = [n for _, n in reached if n.op_type == "Softmax"]
    readers = [r for s in softmaxes for r in survey.graph.consumers(s.output[0])]
    return any(r.op_type == "IsNaN" for r in readers)


def linear_attention(survey: Survey) -> Iterator[Hazard]:
    """Two products of activations in sequence without a Softmax: K^T V grows with the number of tokens.

    Reported for EfficientViT, EfficientViT-SAM and Sana:
    https://github.com/NVIDIA/TensorRT/issues/3893
    """
    for node in survey.nodes:
        if not of_activations(survey, node) or any(_is_softmax(survey, t) for t in node.input):
            continue
        readers = survey.downstream(node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
        second = next((n for _, n in readers if n is not node and of_activations(survey, n)), None)
        if second is not None and not any(_is_softmax(survey, t) for t in second.input):
            reason = f"{label(node)} sums over the tokens, and {label(second)} reads it without a Softmax"
            yield survey.hazard(node, "linear-attention", reason, node.output[0])


def of_activations(survey: Survey, node: NodeProto) -> bool:
    """True for a MatMul of two computed tensors that sums more than one term."""
    if node.op_type != "MatMul" or any(survey.is_constant(t) for t in node.input):
        return False
    shape = survey.graph.shape(node.input[0])
    computed = all(survey.producer(t) is not None for t in node.input)
    return computed and (shape is None or shape[-1:] != (1,))


def _is_softmax(survey: Survey, tensor: str) -> bool:
    """True if a Softmax leads to the tensor through cheap operators."""
    seen = survey.upstream(tensor, lambda n: n.op_type in CHEAP)
    return any(n.op_type == "Softmax" for n in seen)
