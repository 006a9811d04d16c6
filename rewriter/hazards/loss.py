"""Hazard rules about chains of values, and about constants: what `scan` reports of overflow and underflow,
flushed constants, weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from onnx import NodeProto

from rewriter.hazards.attention import mask_uses
from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL, UNDERFLOW
from rewriter.hazards.survey import Survey
from rewriter.ir.english import figure
from rewriter.ir.graph import attribute, label
from rewriter.ir.graph.ops import CHEAP, INEQUALITIES, SCALING, TENSOR_CORE, VIEWS
from rewriter.ir.model import Array
from rewriter.ir.plan import Range

WEIGHT_ERROR = 1e-3
"""Relative L2 error of rounded weights; normal numbers lose 2^-11 = 4.9e-4 at most."""

CONSTANT_ERROR = 2e-3
"""Relative error of one rounded scalar: four times what a normal number loses at most."""

_SMALL = "its values are below FP16's normal numbers"

BOUNDS = INEQUALITIES | {"Clip", "Min", "Max"}
"""Operators in which an infinite constant has the effect of a huge one."""


def overflowing(survey: Survey) -> Iterator[Hazard]:
    """Tensors out of range, each with the cheap operators that pass it on.

    `fix` uses the rule `overflow`. Decomposed norms, masks of a Softmax and constants have their own rules.
    """
    inside = {t for n in survey.norms for node in n.nodes for t in node.output if t != n.output}
    masks = _masks(survey)

    def excess(tensor: str) -> bool:
        measured = survey.range(tensor)
        if measured is None or tensor in inside or survey.is_constant(tensor):
            return False
        is_mask = tensor in masks and measured.high <= survey.limit
        return measured.absmax > survey.limit and not is_mask

    for node, head in _chains(survey, excess):
        measured = survey.range(head)
        assert measured is not None  # excess has seen it
        if not measured.finite:
            nan = math.isnan(measured.mean_abs)
            reason = f"{head} is {'NaN' if nan else 'infinite'} in FP32 already"
            repair = "look at the data and at the model: no precision repairs it"
            yield Hazard(node, "overflow", reason, head, measured, "warning" if nan else "note", repair)
        elif measured.absmax <= survey.largest:
            reason = f"{head} comes within a factor of 2 of {figure(survey.largest)}"
            yield survey.hazard(node, "overflow", reason, head, "warning")
        elif _saturates(survey, head):
            reason = f"{head} overflows, which Tanh, Sigmoid or Erf saturates"
            yield survey.hazard(node, "overflow", reason, head, "note")
        else:
            yield survey.hazard(node, "overflow", f"{head} exceeds {figure(survey.largest)}", head, "error")


def _masks(survey: Survey) -> set[str]:
    """Tensors that only Softmax reads, through Add, Where and views: their huge negative values become 0."""
    through = VIEWS | {"Add", "Where", "Mul", "Sub", "Cast"}
    found: set[str] = set()
    for node in reversed(survey.nodes):
        for tensor in node.output:
            readers = [reader for _, reader in survey.readers(tensor)]
            masks = (
                r.op_type == "Softmax" or (r.op_type in through and r.output[0] in found) for r in readers
            )
            if readers and not survey.graph.is_output(tensor) and all(masks):
                found.add(tensor)
    return found


def _chains(survey: Survey, bad: Callable[[str], bool]) -> Iterator[tuple[NodeProto, str]]:
    """Nodes that write a bad tensor, each with the first bad tensor of its chain of cheap operators."""
    head: dict[str, str] = {}
    for node in survey.nodes:
        for tensor in (t for t in node.output if survey.is_float(t) and bad(t)):
            sources = [survey.source(t) for t in node.input if survey.is_float(t)]
            earlier = (head[t] for t in sources if t in head and node.op_type in CHEAP)
            head[tensor] = next(earlier, tensor)
            yield node, head[tensor]


def _saturates(survey: Survey, tensor: str) -> bool:
    """True if only bounded functions read the tensor, scaled or with finite numbers added.

    The tanh form of Gelu has x + 0.0447 x^3 inside: an infinite cube gives tanh(inf) = 1, which is right.
    """
    scaled = VIEWS | SCALING | {"Neg", "Add"}
    readers = [node for _, node in survey.downstream(tensor, lambda n: n.op_type in scaled)]
    if not readers or survey.graph.is_output(tensor):
        return False
    ends = {"Tanh", "Sigmoid", "Erf"}
    reached = any(n.op_type in ends for n in readers)
    return reached and all(
        n.op_type in ends or (n.op_type in scaled and _harmless(survey, n)) for n in readers
    )


def _harmless(survey: Survey, node: NodeProto) -> bool:
    """True if one infinite operand gives an infinite result: no zero as a factor, no second infinity."""
    if survey.graph.is_output(node.output[0]):
        return False
    if node.op_type not in SCALING | {"Add"}:
        return True
    scalars = [survey.scalar(t) for t in node.input]
    if node.op_type != "Add":
        return any(s is not None and s != 0 for s in scalars)
    ranges = [survey.range(t) for t in node.input]
    return any(r is not None and r.absmax <= survey.limit for r in ranges)


def vanishing(survey: Survey) -> Iterator[Hazard]:
    """Tensors whose values are all below FP16's normal numbers; `fix` uses the rule `underflow`.

    A note while 8 bits or more are left, an error where all values become zero.
    """
    if not survey.is_fp16:
        return

    def tiny(tensor: str) -> bool:
        measured = None if survey.is_constant(tensor) else survey.range(tensor)
        return measured is not None and 0 < measured.absmax < FP16_MIN_NORMAL

    for node, head in _chains(survey, tiny):
        measured = survey.range(head)
        assert measured is not None  # tiny has seen it
        if measured.absmax <= FP16_FLUSH:
            yield survey.hazard(node, "underflow", f"{head} becomes zero", head, "error")
        else:
            severity: Severity = "warning" if measured.absmax < UNDERFLOW else "note"
            reason = f"{head} is subnormal throughout and loses bits"
            yield survey.hazard(node, "underflow", reason, head, severity)


def flushed_constants(survey: Survey) -> Iterator[Hazard]:
    """Scalar factors and divisors that become zero, infinite or inexact in FP16."""
    for node in survey.nodes if survey.is_fp16 else ():
        for index, tensor in enumerate(node.input if node.op_type in SCALING else ()):
            value = survey.scalar(tensor) if survey.is_float(tensor) else None
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
    """Constants beyond the lower type's range, or so small that they lose many bits.

    Reported at the first node that reads the constant. Masks have a rule of their own, and a bound that
    no value reaches may be infinite.
    """
    seen = {survey.source(use.node.input[use.index]) for use in mask_uses(survey)}
    for node in survey.nodes:
        if node.op_type in BOUNDS:
            continue
        for tensor in map(survey.source, filter(survey.is_float, node.input)):
            value = None if tensor in seen else survey.graph.constant(tensor)
            seen.add(tensor)
            if value is not None and value.size and value.dtype in (np.float32, np.float64):
                yield from _weights(survey, node, tensor, value)


def _weights(survey: Survey, node: NodeProto, tensor: str, value: Array) -> Iterator[Hazard]:
    largest = float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
    if largest > survey.largest:
        yield survey.hazard(node, "weights", f"{tensor} holds {largest:.4g}", tensor)
    elif survey.is_fp16 and value.size > 1:
        error = _rounding_error(survey, tensor, value)
        if error > WEIGHT_ERROR:
            reason = f"{tensor} is rounded by {error:.1%}: {_SMALL}"
            yield survey.hazard(node, "weights", reason, tensor, "error" if error > 0.5 else "warning")


def _rounding_error(survey: Survey, tensor: str, value: Array) -> float:
    """Relative L2 error of a constant in FP16; 0 if its range excludes one, or if all of it is zero."""
    measured = survey.range(tensor)
    if measured is not None and _cannot_lose(survey, measured):
        return 0.0
    finite = value[np.isfinite(value)].astype(np.float64)
    norm = float(np.linalg.norm(finite))
    return float(np.linalg.norm(finite - finite.astype(np.float16))) / norm if norm else 0.0


def small_weights(survey: Survey) -> Iterator[Hazard]:
    """Products with weights so small that FP16 holds them as subnormal numbers, with a few bits each.

    In FP32, Tensor Cores round them to TF32: 11 bits, as many as FP16's normal numbers have. One such
    Conv, the last of a NAFNet with a residual stream in the thousands, caused most of that model's error.
    """
    errors: dict[str, float] = {}
    for node in survey.nodes if survey.is_fp16 else ():
        for tensor in map(survey.source, node.input[:2] if node.op_type in TENSOR_CORE else ()):
            value = survey.graph.constant(tensor)
            if value is None or value.size < 2 or np.abs(value).max() > survey.largest:
                continue
            if tensor not in errors:
                errors[tensor] = _rounding_error(survey, tensor, value)
            if errors[tensor] > WEIGHT_ERROR:
                reason = f"{tensor} would be rounded by {errors[tensor]:.1%}: {_SMALL}"
                yield survey.hazard(node, "weights", reason, tensor)


def batch_statistics(survey: Survey) -> Iterator[Hazard]:
    """BatchNormalization whose statistics FP16 cannot hold: variances up to 1e8 occur, and subnormal ones.

    Folded into a Conv, they are gone. `weights` judges each constant as a whole; here each channel counts,
    with the epsilon that is added to its variance.
    """
    for node in survey.nodes if survey.is_fp16 else ():
        if node.op_type != "BatchNormalization" or len(node.input) < 5:
            continue
        values = [survey.constant(t) for t in node.input[1:5]]
        known = [v.astype(np.float64) for v in values if v is not None and v.dtype.kind == "f"]
        if len(known) < 4 or not all(np.isfinite(v).all() for v in known):
            continue
        epsilon = float(attribute(node, "epsilon", 1e-5))
        worst = _worst_channel(known, epsilon)
        if worst > WEIGHT_ERROR:
            reason = f"{label(node)}: statistics in FP16 change the factor of one channel by {worst:.2%}"
            if math.isinf(worst):
                reason = f"{label(node)}: statistics up to {max(np.abs(v).max() for v in known):.4g}"
            yield survey.hazard(node, "weights", reason, node.input[4])


def _worst_channel(known: Sequence[Array], epsilon: float) -> float:
    """The largest relative change of a channel's factor; infinite if a statistic overflows."""
    scale, _, _, variance = known
    with np.errstate(over="ignore"):
        rounded = [v.astype(np.float16).astype(np.float64) for v in known]
    if not all(np.isfinite(v).all() for v in rounded):
        return math.inf
    used = np.abs(scale) > FP16_FLUSH * np.abs(scale).max(initial=0.0)
    exact = scale / np.sqrt(variance + epsilon)
    found = rounded[0] / np.sqrt(rounded[3] + epsilon)
    return float(np.max(np.abs(found - exact)[used] / np.abs(exact[used]), initial=0.0))


def _cannot_lose(survey: Survey, measured: Range) -> bool:
    """True if the range excludes a loss: subnormals err by 2^-25 at most, the norm is sqrt(n) * mean."""
    return measured.absmax <= survey.largest and measured.mean_abs * WEIGHT_ERROR / 2 > 2.0**-25
