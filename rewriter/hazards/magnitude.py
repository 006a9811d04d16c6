"""Hazard rules about overflow and underflow: of tensors, and inside one operator, which no tensor shows."""

import math
from collections.abc import Callable, Iterator, Mapping, Set

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.base.text import figure
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.ir.graph import attribute
from rewriter.ir.graph.ops import CHEAP, SCALING, SOFTMAX, VIEWS
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
        measured = analysis.range(tensor)
        if measured is None or not measured.reach > analysis.largest or analysis.is_constant(tensor):
            return False
        return not (id(node) in parts and analysis.source(tensor) in inside)

    for node, tensor, head in _chains(analysis, beyond):
        measured = analysis.range(tensor)
        assert measured is not None  # beyond has seen it
        if not _is_harmless(analysis, tensor, measured):
            severity, what = _severity(analysis, tensor, measured)
            yield analysis.hazard(node, "overflow", f"{head} {what}", tensor, severity)


def _severity(analysis: GraphAnalysis, tensor: str, measured: Range) -> tuple[Severity, str]:
    """The severity of a tensor out of range, and its state as a phrase."""
    if not measured.finite:
        nan = math.isnan(measured.mean_abs)
        return ("warning", "is NaN in FP32 already") if nan else ("note", "is infinite in FP32 already")
    if measured.absmax <= analysis.largest:
        factor, end = figure(measured.headroom), figure(analysis.largest)
        return "warning", f"comes within a factor of {factor} of {end}"
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
    if measured is None or not measured.reach > analysis.largest:
        return False
    return not _is_harmless(analysis, tensor, measured)


def largest(value: Array) -> float:
    """Largest absolute value of a constant, without infinities."""
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))


def _is_harmless(analysis: GraphAnalysis, tensor: str, measured: Range) -> bool:
    return _is_mask(analysis, tensor, measured) or _is_replaced(analysis, tensor, measured)


def _is_replaced(analysis: GraphAnalysis, tensor: str, measured: Range) -> bool:
    """True if only NaN is out of range, as of masked rows, and only a Where reads it that replaces that."""
    only_nan = math.isnan(measured.mean_abs) and max(-measured.low, measured.high) <= analysis.limit
    if not only_nan or analysis.is_output(tensor):
        return False
    readers = [reader for _, reader in analysis.readers(tensor) if reader.op_type != "IsNaN"]
    return bool(readers) and all(replaces_nan(analysis, reader) for reader in readers)


def replaces_nan(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for Where(IsNaN(x), constant, x), as PyTorch writes it after the Softmax of masked rows."""
    if node.op_type != "Where" or not analysis.is_constant(node.input[1]):
        return False
    asked = analysis.graph.producer(node.input[0])
    if asked is None or asked.op_type != "IsNaN":
        return False
    return analysis.source(node.input[2]) == analysis.source(asked.input[0])


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
        for tensor in (t for t in analysis.floats(node) if bad(node, t)):
            if tensor in node.output:
                floats = filter(analysis.is_float, node.input if node.op_type in CHEAP else ())
                head[tensor] = next((head[t] for t in map(analysis.source, floats) if t in head), tensor)
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


NAIVE_LOG_SUM_EXP = "https://github.com/NVIDIA/TensorRT/issues/4772"

TERMS: Mapping[str, Callable[[float], float]] = {
    "ReduceLogSumExp": lambda x: math.exp(min(x, 700.0)),
    "ReduceLogSum": lambda x: x,
    "LpNormalization": lambda x: x * x,
}
"""Operators with a hidden sum, each with the term that an element adds to it."""


def hidden_sums(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Operators that keep a sum of exponentials or squares in the lower type.

    Emulation rounds tensors only, so it does not show this. The sum is at least its largest term, and at
    least n times the term of the mean (Jensen's inequality). An error if that overflows or the largest term
    becomes zero, a warning if it is near.
    """
    stable = analysis.request.target.answers.get("reduce-log-sum-exp") == "right"
    for node in analysis.nodes:
        term = TERMS.get(node.op_type)
        measured = analysis.range(node.input[0]) if term else None
        if term is None or measured is None or not measured.finite or attribute(node, "p", 2) != 2:
            continue
        exponential = node.op_type == "ReduceLogSumExp"
        if exponential and stable:
            continue
        number = reduced_count(analysis, node) or 1
        largest = term(measured.high if exponential else measured.absmax)
        same_sign = measured.low >= 0 or node.op_type == "LpNormalization"
        least = max(largest, number * term(measured.mean_abs) if same_sign else 0.0)
        small = analysis.is_fp16 and 0 < largest < FP16_MIN_NORMAL
        if least > analysis.largest or (small and largest <= FP16_FLUSH):
            severity: Severity = "error"
        elif number * largest > analysis.limit or small:
            severity = "warning"
        else:
            continue
        reason = f"the sum inside {node.op_type} lies between {least:.2g} and {number * largest:.2g}"
        link = NAIVE_LOG_SUM_EXP if exponential else ""
        tensor = node.input[0]
        yield Hazard(node, "internal-overflow", reason, tensor, measured, severity, link=link)


NORM_OPERATORS = {
    "LayerNormalization": "layer-normalization",
    "InstanceNormalization": "instance-normalization",
    "GroupNormalization": "group-normalization",
    "RMSNormalization": "rms-normalization",
}
"""Operators that compute in FP32 inside unless the probe of this name finds otherwise."""


def norm_operators(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Normalisations that lose accuracy in FP16 on this target, as `rewriter probe` found."""
    for node in analysis.nodes if analysis.is_fp16 else ():
        if analysis.request.target.answers.get(NORM_OPERATORS.get(node.op_type, "")) == "fp16":
            reason = f"{node.op_type} was measured to lose accuracy in FP16 on this target"
            yield analysis.hazard(node, "internal-overflow", reason, node.input[0])


def long_softmax(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Softmax over more entries than FP16 can count: equal scores sum exp(0) to more than 65504.

    Seen in https://github.com/tier4/autoware-ml/pull/95
    """
    for node in analysis.nodes:
        axis = attribute(node, "axis", -1 if analysis.opsets.get("", 13) >= 13 else 1)
        size = analysis.graph.size(node.input[0], axis) if node.op_type in SOFTMAX else None
        if isinstance(size, int) and size > analysis.largest:
            reason = f"{node.op_type} over {size} entries may sum up to {size} inside"
            yield analysis.hazard(node, "internal-overflow", reason, node.input[0])


def reduced_count(analysis: GraphAnalysis, node: NodeProto) -> int | None:
    """The number of elements that a reduction combines into one; None if a shape is not fully known."""
    sizes, result = analysis.graph.sizes(node.input[0]), analysis.graph.sizes(node.output[0])
    if sizes is not None and node.op_type == "LpNormalization":
        return sizes[int(attribute(node, "axis", -1))]
    return math.prod(sizes) // max(1, math.prod(result)) if sizes is not None and result is not None else None
