"""Hazard rules about range: what overflows, and what underflows where it matters."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.edits import label
from rewriter.kinds import Severity
from rewriter.norms import Norm, find_norms
from rewriter.plan import Range
from rewriter.survey import VIEWS, Hazard, Survey

FP16_MIN_NORMAL = 2.0**-14
"""IEEE 754 binary16: below it, numbers lose bits."""

FP16_FLUSH = 2.0**-25
"""Half of binary16's smallest subnormal number: what is not larger rounds to zero."""


UNDERFLOW = 2.0**-17
"""Subnormals are multiples of 2^-24: a tensor whose largest value is smaller keeps fewer than 8 bits."""


def overflow(survey: Survey) -> Iterator[Hazard]:
    """A tensor at the border leaves the lower type's range, or nearly does."""
    for node in survey.nodes:
        for tensor in survey.floats(node):
            excess = _excess(survey, tensor)
            if excess:
                yield Hazard(node, "overflow", f"{tensor} {excess}", tensor, survey.range(tensor))
                break


def _excess(survey: Survey, tensor: str) -> str:
    """What is too large about a tensor; "" if nothing is, or nothing is known."""
    value = survey.graph.constant(survey.source(tensor))
    if value is not None:  # a constant needs no head-room
        largest = float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
        return f"holds {largest:.4g}" if largest > survey.settings.largest else ""
    measured = survey.range(tensor)
    if measured is None or measured.absmax <= survey.settings.limit or _is_mask(survey, tensor, measured):
        return ""
    return f"exceeds {survey.settings.limit:.4g}" if measured.finite else "is not finite"


def _is_mask(survey: Survey, tensor: str, measured: Range) -> bool:
    """Whether only large negative values are out of range, and Softmax makes 0 of them in any precision."""
    if math.isnan(measured.mean_abs) or not measured.high <= survey.settings.limit:
        return False
    fits = measured.low == -math.inf or measured.low >= -survey.settings.largest
    return fits and _only_feeds_softmax(survey, tensor)


def _only_feeds_softmax(survey: Survey, tensor: str) -> bool:
    through = VIEWS | {"Add", "Where"}
    readers = [node for _, node in survey.downstream(tensor, lambda n: n.op_type in through)]
    return bool(readers) and all(n.op_type in through | {"Softmax"} for n in readers)


def underflow(survey: Survey) -> Iterator[Hazard]:
    """A whole tensor deep below FP16's normal range: it keeps a few bits, and below 2^-25 none."""
    if survey.settings.low != TensorProto.FLOAT16:
        return
    for node in survey.nodes:
        for tensor in survey.floats(node):
            if 0 < _largest(survey, tensor) < UNDERFLOW:
                reason = f"{tensor} stays below {UNDERFLOW:.2g}, deep in FP16's subnormals"
                yield Hazard(node, "underflow", reason, tensor, survey.range(tensor))
                break


def _largest(survey: Survey, tensor: str) -> float:
    """Largest absolute value of a constant, or measured; 0 if nothing is known."""
    value = survey.graph.constant(survey.source(tensor))
    if value is not None:
        return float(np.abs(value).max(initial=0.0))
    measured = survey.range(tensor)
    return measured.absmax if measured is not None else 0.0


def unfused_norm(survey: Survey) -> Iterator[Hazard]:
    """The squares inside a decomposed normalisation overflow long before its input does."""
    for norm in find_norms(survey.graph):
        reason = f"part of a decomposed {norm.kind} that ends in {norm.output}"
        severity = _inner_severity(survey, norm)
        for node in norm.nodes:
            yield Hazard(node, "unfused-norm", reason, norm.input, survey.range(norm.input), severity)


def _inner_severity(survey: Survey, norm: Norm) -> Severity:
    """How bad a norm is in the lower precision, by the largest value measured inside it."""
    inner = (survey.range(t) for node in norm.nodes for t in node.output if t != norm.output)
    worst = max((r.absmax for r in inner if r is not None), default=math.inf)
    if worst > survey.settings.largest:
        return "error"
    return "warning" if worst > survey.settings.limit else "note"


def lost_epsilon(survey: Survey) -> Iterator[Hazard]:
    """A constant below FP16's smallest normal number that guards a division, root or logarithm.

    The island reaches from the sum of squares, whose small values would vanish, to what is guarded.
    """
    if survey.settings.low != TensorProto.FLOAT16:
        return
    for node in survey.nodes:
        found = _epsilon(survey, node)
        guarded = _guarded(survey, node.output[0]) if found else []
        if found is None or not guarded:
            continue
        epsilon, other = found
        reason = f"{epsilon:.3g} in {label(node)} is below FP16's normal range"
        measured = survey.range(other)
        severity = _epsilon_severity(epsilon, measured)
        for inner in (*survey.upstream(other, _sums_squares), node, *guarded):
            yield Hazard(inner, "epsilon", reason, other, measured, severity)


def _epsilon_severity(epsilon: float, measured: Range | None) -> Severity:
    """Error if 0 was guarded on the samples and no longer is; a note if all values are normal numbers."""
    if measured is None:
        return "warning"
    if measured.low < FP16_FLUSH and epsilon <= FP16_FLUSH:
        return "error"
    return "warning" if measured.low < FP16_MIN_NORMAL else "note"


def _epsilon(survey: Survey, node: NodeProto) -> tuple[float, str] | None:
    """The epsilon that a node adds or bounds with, and the tensor that it does that to."""
    pairs = {"Add": ((0, 1), (1, 0)), "Max": ((0, 1), (1, 0)), "Clip": ((1, 0),), "Where": ((1, 2), (2, 1))}
    for index, other in pairs.get(node.op_type, ()):
        if len(node.input) <= max(index, other):
            continue
        value = survey.graph.scalar(survey.source(node.input[index]))
        if value is None or not 0 < value < FP16_MIN_NORMAL:
            continue
        measured = survey.range(node.input[other])
        if measured is None or not measured.low > 1.0:  # far above the epsilon, it decides nothing
            return value, node.input[other]
    return None


def _guarded(survey: Survey, tensor: str) -> list[NodeProto]:
    """The nodes from an epsilon to the division, root or logarithm that it protects."""
    through = VIEWS | {"Sqrt", "Pow"}
    path = list(survey.downstream(tensor, lambda n: n.op_type in through))
    if not any(_is_sensitive(survey, name, node) for name, node in path):
        return []
    return [node for name, node in path if node.op_type in through or _is_sensitive(survey, name, node)]


def _is_sensitive(survey: Survey, tensor: str, node: NodeProto) -> bool:
    """Whether zero in place of a tiny `tensor` changes what the node makes of it."""
    if node.op_type == "Div":
        return bool(node.input[1] == tensor)
    if node.op_type == "Pow":
        exponent = survey.graph.scalar(survey.source(node.input[1]))
        return node.input[0] == tensor and exponent is not None and exponent < 1
    return node.op_type in {"Reciprocal", "Log", "Sqrt"}


def _sums_squares(node: NodeProto) -> bool:
    square = node.op_type == "Mul" and node.input[0] == node.input[1]
    sums = {"ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2", "Pow", "Sqrt"}
    return square or node.op_type in VIEWS | sums
