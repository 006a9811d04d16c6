"""Hazard rules about what small numbers lose: underflow, flushed constants, weights, cancellation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.graph import label
from rewriter.hazards.attention import mask_uses
from rewriter.hazards.kinds import Severity
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL, UNDERFLOW
from rewriter.hazards.resolution import made_of_integers
from rewriter.hazards.survey import CHEAP, VIEWS, Hazard, Survey
from rewriter.model import Array
from rewriter.patterns.norms import find_norms
from rewriter.patterns.split_parts import is_made
from rewriter.plan import Range

WEIGHT_ERROR = 1e-3
"""Relative L2 error of rounded weights; 2^-11 = 4.9e-4 is the most that normal numbers lose."""

CONSTANT_ERROR = 2e-3
"""Relative error of one rounded scalar: four times the most that a normal number loses."""

CANCELLATION = 32.0
"""How much larger than their difference two operands are: 2^-12 of them is then 0.8 % of it."""

_SMALL = "its values are below FP16's normal numbers"

MULTIPLYING = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})

BOUNDS = frozenset("Clip Min Max Greater Less GreaterOrEqual LessOrEqual".split())
"""Operators in which an infinite constant does what a huge one did."""


def overflowing(survey: Survey) -> Iterator[Hazard]:
    """Tensors out of range, each with the cheap operators that hand it on; `overflow` names the nodes.

    The inside of a decomposed norm, masks on their way to Softmax and constants have rules of their own.
    """
    inside = {t for n in find_norms(survey.graph) for node in n.nodes for t in node.output if t != n.output}
    masks = masked(survey)

    def excess(tensor: str) -> bool:
        measured = survey.range(tensor)
        if measured is None or tensor in inside or survey.is_constant(tensor):
            return False
        is_mask = tensor in masks and measured.high <= survey.request.limit
        return measured.absmax > survey.request.limit and not is_mask

    for node, head in _chains(survey, excess):
        measured = survey.range(head)
        assert measured is not None  # excess has seen it
        certain = measured.absmax > survey.request.largest
        if not measured.finite:
            nan = math.isnan(measured.mean_abs)
            text = f"{head} is {'NaN' if nan else 'infinite'} in FP32 already"
            severity: Severity = "warning" if nan else "note"
            repair = "look at the data and at the model: no precision repairs it"
            yield Hazard(node, "overflow", text, head, measured, severity, repair)
        elif certain and _saturates(survey, head):
            text = f"{head} overflows, which Tanh, Sigmoid or Erf saturates"
            yield Hazard(node, "overflow", text, head, measured, "note")
        elif certain:
            text = f"{head} exceeds {survey.request.largest:.4g}"
            yield Hazard(node, "overflow", text, head, measured, "error")
        else:
            text = f"{head} comes within a factor of 2 of {survey.request.largest:.4g}"
            yield Hazard(node, "overflow", text, head, measured, "warning")


def masked(survey: Survey) -> set[str]:
    """What Softmax alone reads, through Add, Where and views: its large negative values become 0."""
    through = VIEWS | {"Add", "Where", "Mul", "Sub", "Cast"}
    found: set[str] = set()
    for node in reversed(survey.nodes):
        for tensor in node.output:
            readers = [reader for _, reader in survey.readers(tensor)]
            if (
                readers
                and not survey.graph.is_output(tensor)
                and all(_to_softmax(r, found, through) for r in readers)
            ):
                found.add(tensor)
    return found


def _to_softmax(reader: NodeProto, found: set[str], through: frozenset[str]) -> bool:
    return reader.op_type == "Softmax" or (reader.op_type in through and reader.output[0] in found)


def _chains(survey: Survey, bad: Callable[[str], bool]) -> Iterator[tuple[NodeProto, str]]:
    """Nodes that write a bad tensor, each with the first one of its chain through cheap operators."""
    head: dict[str, str] = {}
    for node in survey.nodes:
        for tensor in (t for t in node.output if survey.is_float(t) and bad(t)):
            sources = [survey.source(t) for t in node.input if survey.is_float(t)]
            earlier = (head[t] for t in sources if t in head and node.op_type in CHEAP)
            head[tensor] = next(earlier, tensor)
            yield node, head[tensor]


def _saturates(survey: Survey, tensor: str) -> bool:
    """Whether a bounded function alone reads it, with scalars and finite numbers added on the way.

    As in x + 0.0447 x^3 inside tanh-GELU: an infinite cube gives tanh(inf) = 1, as it should be.
    """
    scaled = {"Mul", "Div", "Neg", "Add"} | VIEWS
    readers = [node for _, node in survey.downstream(tensor, lambda n: n.op_type in scaled)]
    if not readers or survey.graph.is_output(tensor):
        return False
    ends = {"Tanh", "Sigmoid", "Erf"}
    reached = any(n.op_type in ends for n in readers)
    return reached and all(
        n.op_type in ends or (n.op_type in scaled and _harmless(survey, n)) for n in readers
    )


def _harmless(survey: Survey, node: NodeProto) -> bool:
    """Whether one infinite operand gives an infinite result: no zero to multiply, no second infinity."""
    if survey.graph.is_output(node.output[0]):
        return False
    if node.op_type not in {"Mul", "Div", "Add"}:
        return True
    scalars = [survey.graph.scalar(survey.source(t)) for t in node.input]
    if node.op_type != "Add":
        return any(s is not None and s != 0 for s in scalars)
    ranges = [survey.range(t) for t in node.input]
    return any(r is not None and r.absmax <= survey.request.limit for r in ranges)


def vanishing(survey: Survey) -> Iterator[Hazard]:
    """Tensors all of whose values are below FP16's normal numbers; `underflow` names the nodes.

    A note while 8 bits or more are left, an error where all become zero.
    """
    if survey.request.low != TensorProto.FLOAT16:
        return

    def tiny(tensor: str) -> bool:
        measured = survey.range(tensor)
        known = measured is not None and not survey.is_constant(tensor)
        return known and measured is not None and 0 < measured.absmax < FP16_MIN_NORMAL

    for node, head in _chains(survey, tiny):
        measured = survey.range(head)
        largest = measured.absmax if measured is not None else 0.0
        if largest <= FP16_FLUSH:
            yield Hazard(node, "underflow", f"{head} becomes zero", head, measured, "error")
        else:
            severity: Severity = "warning" if largest < UNDERFLOW else "note"
            reason = f"{head} is subnormal throughout and loses bits"
            yield Hazard(node, "underflow", reason, head, measured, severity)


def flushed_constants(survey: Survey) -> Iterator[Hazard]:
    """Scalars that are multiplied or divided by, and that FP16 makes zero, infinite or inexact."""
    if survey.request.low != TensorProto.FLOAT16:
        return
    for node in survey.nodes:
        for index, tensor in enumerate(node.input if node.op_type in {"Mul", "Div"} else ()):
            value = survey.graph.scalar(survey.source(tensor)) if survey.is_float(tensor) else None
            if value is None or not 0 < abs(value) < FP16_MIN_NORMAL:
                continue
            error = abs(float(np.float16(value)) - value) / abs(value)
            if error > CONSTANT_ERROR:
                yield _flushed(node, index, tensor, value, error)


def _flushed(node: NodeProto, index: int, tensor: str, value: float, error: float) -> Hazard:
    zero, divides = error == 1.0, node.op_type == "Div" and index == 1
    what = "becomes zero" if zero else f"is rounded by {error:.1%}"
    severity: Severity | None = "error" if zero and divides else None
    return Hazard(node, "flushed-constant", f"{value:.3g} in {label(node)} {what}", tensor, severity=severity)


def weights(survey: Survey) -> Iterator[Hazard]:
    """Constants beyond the lower type's range, or so small that rounding costs more than some bits.

    The first node that reads a constant is named. Masks have a rule of their own, and a bound that
    nothing reaches may be infinite.
    """
    seen = {survey.source(use.node.input[use.index]) for use, _ in mask_uses(survey)}
    for node in survey.nodes:
        if node.op_type in BOUNDS:
            continue
        for tensor in map(survey.source, filter(survey.is_float, node.input)):
            value = None if tensor in seen else survey.graph.constant(tensor)
            seen.add(tensor)
            if value is not None and value.size and value.dtype in (np.float32, np.float64):
                yield from _weights(survey, node, tensor, value)


def _weights(survey: Survey, node: NodeProto, tensor: str, value: Array) -> Iterator[Hazard]:
    measured = survey.range(tensor)
    if measured is not None and _cannot_lose(survey, measured):
        return
    largest = float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
    if largest > survey.request.largest:
        yield Hazard(node, "weights", f"{tensor} holds {largest:.4g}", tensor, measured)
    elif survey.request.low == TensorProto.FLOAT16 and value.size > 1:
        error = _rounding_error(value)
        if error > WEIGHT_ERROR:
            text = f"{tensor} is rounded by {error:.1%}: {_SMALL}"
            yield Hazard(node, "weights", text, tensor, measured, "error" if error > 0.5 else "warning")


def _rounding_error(value: Array) -> float:
    """Relative L2 error of a constant in FP16; 0 for one that is zero throughout."""
    finite = value[np.isfinite(value)].astype(np.float64)
    norm = float(np.linalg.norm(finite))
    return float(np.linalg.norm(finite - finite.astype(np.float16))) / norm if norm else 0.0


def small_weights(survey: Survey) -> Iterator[Hazard]:
    """Multiplications by weights so small that FP16 holds them as subnormal numbers, with a few bits each.

    In FP32 a Tensor Core rounds them to TF32: 11 bits, as FP16's normal numbers have. One such Conv, the
    last of a NAFNet whose stream is in the thousands, made up most of that model's error.
    """
    if survey.request.low != TensorProto.FLOAT16:
        return
    errors: dict[str, float] = {}
    for node in survey.nodes:
        for tensor in map(survey.source, node.input[:2] if node.op_type in MULTIPLYING else ()):
            value = survey.graph.constant(tensor)
            if value is None or value.size < 2 or np.abs(value).max() > survey.request.largest:
                continue
            if tensor not in errors:
                measured = survey.range(tensor)
                normal = measured is not None and _cannot_lose(survey, measured)
                errors[tensor] = 0.0 if normal else _rounding_error(value)
            if errors[tensor] > WEIGHT_ERROR:
                text = f"{tensor} would be rounded by {errors[tensor]:.1%}: {_SMALL}"
                yield Hazard(node, "weights", text, tensor, survey.range(tensor))


def _cannot_lose(survey: Survey, measured: Range) -> bool:
    """Whether the range alone says enough: subnormals err by 2^-25 at most, and the norm is sqrt(n) mean."""
    return measured.absmax <= survey.request.largest and measured.mean_abs * WEIGHT_ERROR / 2 > 2.0**-25


def cancellation(survey: Survey) -> Iterator[Hazard]:
    """Sums and differences far smaller than both operands: what rounding took from those is left over.

    Integers that FP16 holds are exact, and so are their differences. What rounding took is what the pass
    split-products wants.
    """
    exact = made_of_integers(survey)
    for node in survey.nodes:
        if node.op_type not in {"Add", "Sub"} or survey.source(node.output[0]) in exact or is_made(node):
            continue
        ranges = [_range(survey, t) for t in (*node.input, node.output[0])]
        known = [r for r in ranges if r is not None and r.finite]
        if len(known) < 3 or known[2].mean_abs <= 0:
            continue
        ratio = min(known[0].mean_abs, known[1].mean_abs) / known[2].mean_abs
        if ratio > CANCELLATION:
            text = f"{label(node)}: the operands are {ratio:.2g} times as large as the result"
            yield Hazard(node, "cancellation", text, node.output[0], known[2])


def _range(survey: Survey, tensor: str) -> Range | None:
    value = survey.graph.scalar(survey.source(tensor))
    return survey.range(tensor) if value is None else Range(value, value, abs(value), True)
