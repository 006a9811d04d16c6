"""Hazard rules about attention: masks, large scores, and linear attention without normalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.survey import Survey
from rewriter.ir.graph import label
from rewriter.ir.graph.ops import CHEAP, SOFTMAX
from rewriter.ir.patterns.masks import Use, huge_uses, obstacle

BEFORE_SOFTMAX = CHEAP - SOFTMAX


def masks(survey: Survey) -> Iterator[Hazard]:
    """Mask constants that become infinite in the lower type, whatever the samples' masks are.

    Multiplied by the 0 of an unmasked entry they are NaN. Added or selected they are harmless until a
    row is masked entirely: its Softmax is NaN (docs/hazards.md#masks), as is -inf plus another mask's inf.
    """
    for use in mask_uses(survey):
        value = f"{float(use.value.reshape(-1)[np.argmax(np.abs(use.value.astype(np.float64)))]):.4g}"
        tensor, place = use.node.input[use.index], label(use.node)
        if use.node.op_type == "Mul":
            reason = f"{value} in {place} becomes infinite, and 0 times infinity is NaN"
            yield Hazard(use.node, "mask", reason, tensor, severity="error")
        else:
            guarded = _guarded(survey, use.node)
            end = "which is replaced after the Softmax" if guarded else "and a row masked entirely is NaN"
            severity: Severity = "warning" if use.relies and not guarded else "note"
            reason = f"{value} in {place} becomes infinite, {end}"
            yield Hazard(use.node, "mask", reason, tensor, severity=severity)


def unbounded_masks(survey: Survey) -> Iterator[Hazard]:
    """Huge constants times a mask that may hold other values than 0 and 1, and so cannot be clamped.

    The product is 0 on samples without padding, and beyond the lower type on others. All nodes from there
    to the Softmax are kept in FP32, where even a row that is masked entirely stays finite.
    """
    for use in huge_uses(survey.graph):
        value = float(np.max(np.abs(use.value.astype(np.float64))))
        if use.node.op_type != "Mul" or not survey.largest < value < np.inf:
            continue
        reached = [n for _, n in survey.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)]
        if any(n.op_type == "Softmax" for n in reached):
            tensor = use.node.input[use.index]
            reason = f"{value:.4g} in {label(use.node)} masks scores, and no sample may have shown it"
            yield from (survey.hazard(inner, "mask", reason, tensor) for inner in (use.node, *reached))


LARGEST_LOGIT = 2048.0
"""FP16 has 11 bits: from here on its numbers are 2 or more apart, and a rounded logit is off by up to 1."""


def large_logits(survey: Survey) -> Iterator[Hazard]:
    """Softmax of scores whose rounding changes probabilities by a factor e and more.

    A mask's huge negative scores become 0 whatever their rounding, so only the largest score counts.
    """
    for node in survey.nodes if survey.is_fp16 else ():
        measured = survey.range(node.input[0]) if node.op_type in SOFTMAX else None
        if measured is not None and measured.finite and measured.high > LARGEST_LOGIT:
            step = 2.0 ** (math.frexp(measured.high)[1] - 11)
            reason = (
                f"{label(node)} reads scores up to {measured.high:.3g}, which FP16 holds in steps of {step:g}"
            )
            yield survey.hazard(node, "logits", reason, node.input[0])


def mask_uses(survey: Survey) -> Iterator[Use]:
    """Constants that become infinite in the lower type and that reach nothing but a Softmax."""
    for use in huge_uses(survey.graph):
        huge = np.max(np.abs(use.value.astype(np.float64))) > survey.largest
        if huge and not obstacle(survey.graph, use):
            yield use


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
