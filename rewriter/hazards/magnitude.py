"""Hazard rules about single values: overflow and underflow."""

import math
from collections.abc import Callable, Iterator, Set

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.base.text import figure
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.ir.graph.ops import CHEAP, SCALING, VIEWS
from rewriter.ir.model import Array
from rewriter.ir.plan import Range

FP16_MIN_NORMAL = 2.0**-14  # IEEE 754 binary16: smaller numbers lose bits

FP16_FLUSH = 2.0**-25
"""Half of binary16's smallest subnormal number: up to here, numbers round to zero."""

UNDERFLOW = 2.0**-17
"""Subnormals are multiples of 2^-24: a tensor whose largest value is smaller keeps fewer than 8 bits."""


def overflow(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """An input or output leaves the lower type's range, or nearly does; norms have rules of their own."""
    parts = {id(node) for norm in analysis.norms for node in norm.nodes}
    inside = {t for norm in analysis.norms for n in norm.nodes for t in n.output if t != norm.output}

    def beyond(node: NodeProto, tensor: str) -> bool:
        measured = None if analysis.is_constant(tensor) else analysis.range(tensor)
        own = id(node) in parts and analysis.source(tensor) in inside
        return measured is not None and measured.reach > analysis.largest and not own

    for node, tensor, head in _chains(analysis, beyond):
        measured = analysis.range(tensor)
        assert measured is not None  # beyond has seen it
        if not _is_mask(analysis, tensor, measured):
            severity, what = _severity(analysis, tensor, measured)
            yield analysis.hazard(node, "overflow", f"{head} {what}", tensor, severity)


def _severity(analysis: GraphAnalysis, tensor: str, measured: Range) -> tuple[Severity, str]:
    """The severity of a tensor out of range, and its state as a phrase."""
    if not measured.finite:
        nan = math.isnan(measured.mean_abs)
        return ("warning", "is NaN in FP32 already") if nan else ("note", "is infinite in FP32 already")
    if measured.absmax <= analysis.largest:
        return (
            "warning",
            f"comes within a factor of {figure(measured.headroom)} of {figure(analysis.largest)}",
        )
    if measured.high <= analysis.limit and _only_feeds(analysis, tensor, {"Softmax"}):
        return "note", "has huge negative numbers, which Softmax turns into zeros"
    if _saturates(analysis, tensor):
        return "warning", "overflows, which Tanh, Sigmoid or Erf saturates"
    return "error", f"exceeds {figure(analysis.largest)}"


def excess(analysis: GraphAnalysis, tensor: str) -> bool:
    """True if a tensor is out of range."""
    value = analysis.constant(tensor)
    if value is not None:  # a constant needs no head-room
        return largest(value) > analysis.largest
    measured = analysis.range(tensor)
    return (
        measured is not None
        and measured.reach > analysis.largest
        and not _is_mask(analysis, tensor, measured)
    )


def largest(value: Array) -> float:
    """Largest absolute value of a constant, without infinities."""
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))


def _is_mask(analysis: GraphAnalysis, tensor: str, measured: Range) -> bool:
    """True if only huge negative values are out of range, and only Softmax, which makes them 0, or MaxPool,
    which drops them where it pads with -inf, reads them.
    """
    if math.isnan(measured.mean_abs) or not measured.high <= analysis.limit:
        return False
    fits = measured.low == -math.inf or measured.low >= -analysis.largest
    return fits and _only_feeds(analysis, tensor, {"Softmax", "MaxPool"})


def _only_feeds(analysis: GraphAnalysis, tensor: str, ends: Set[str]) -> bool:
    through = VIEWS | {"Add", "Where"}
    return bool(_readers(analysis, tensor, through, ends))


def _saturates(analysis: GraphAnalysis, tensor: str) -> bool:
    """True if only bounded functions read the tensor, scaled or in a sum.

    The tanh form of Gelu has x + 0.0447 x^3 inside: an infinite cube gives tanh(inf) = 1, which is right.
    """
    scaled, ends = VIEWS | SCALING | {"Neg", "Add"}, {"Tanh", "Sigmoid", "Erf"}
    readers = _readers(analysis, tensor, scaled, ends)
    outputs = (tensor, *(n.output[0] for n in readers if n.op_type not in ends))
    return bool(readers) and not any(map(analysis.is_output, outputs))


def _readers(analysis: GraphAnalysis, tensor: str, through: Set[str], ends: Set[str]) -> list[NodeProto]:
    """The readers of a tensor, seen through some operators; none if another operator than `ends` reads it.

    The first such reader ends the walk: all of a residual network reads each of its sums.
    """
    found = list[NodeProto]()
    for _, node in analysis.downstream(tensor, lambda n: n.op_type in through):
        if node.op_type not in through | ends:
            return []
        found.append(node)
    return found


def _chains(
    analysis: GraphAnalysis, bad: Callable[[NodeProto, str], bool]
) -> Iterator[tuple[NodeProto, str, str]]:
    """The bad tensors that each node reads or writes, each with the first of its chain of cheap operators."""
    head: dict[str, str] = {}
    for node in analysis.nodes:
        floats = filter(analysis.is_float, node.input if node.op_type in CHEAP else ())
        before = [*map(analysis.source, floats)]
        for tensor in (t for t in analysis.floats(node) if bad(node, t)):
            if tensor in node.output:
                head[tensor] = next((head[t] for t in before if t in head), tensor)
            source = analysis.source(tensor)
            yield node, tensor, head.get(source, source)


def underflow(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """A whole tensor, or a constant factor, below FP16's normal range: it loses bits, and all up to 2^-25.

    A note while 8 bits or more are left, an error where all values become zero.
    """

    def tiny(node: NodeProto, tensor: str) -> bool:
        value = analysis.constant(tensor)
        if value is not None:
            return node.op_type in SCALING and 0 < np.abs(value).max(initial=0.0) < UNDERFLOW
        measured = analysis.range(tensor)
        return measured is not None and 0 < measured.absmax < FP16_MIN_NORMAL

    for node, tensor, head in _chains(analysis, tiny) if analysis.is_fp16 else ():
        value, measured = analysis.constant(tensor), analysis.range(tensor)
        reach = largest(value) if value is not None else measured.absmax if measured else 0.0
        severity: Severity = "warning" if reach < UNDERFLOW else "note"
        what = "is subnormal throughout and loses bits"
        if reach <= FP16_FLUSH:
            divides = node.op_type == "Div" and tensor == node.input[1]
            severity, what = "error" if value is None or divides else "warning", "becomes zero"
        yield analysis.hazard(node, "underflow", f"{head} {what}", tensor, severity)
