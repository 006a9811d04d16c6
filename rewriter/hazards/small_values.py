"""Hazard rules about small values that a later node makes large: logarithms, roots and divisors.

In a front end, a linear transform of an input signal such as a spectrogram, FP16 rounds each sample, weight
and sum relative to the large ones. What is small beside them is noise.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import partial

from onnx import NodeProto

from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL, UNDERFLOW
from rewriter.hazards.resolution import EXACT_INTEGERS, from_inputs, mixes_coordinates
from rewriter.ir.graph import display_name, ops
from rewriter.ir.graph.ops import (
    CHEAP,
    INEQUALITIES,
    PRODUCTS,
    REDUCTIONS,
    SCALING,
    SUMS,
    TENSOR_CORE,
    VALUE_PRESERVING,
    VIEWS,
)
from rewriter.target.fusion import operands_of

RESOLUTION = 2.0**-11  # relative rounding error of FP16 (half an ulp)

TRANSFORMS = TENSOR_CORE | {"STFT", "DFT"}
"""Operators that sum an input signal with the weights of a basis."""

LINEAR = VIEWS | SUMS | TENSOR_CORE | SCALING | {"Neg", "Pad"}
POWERS = REDUCTIONS - {"ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSum", "ReduceLogSumExp"}
POWERS |= {"Pow", "Sqrt", "Abs", "Max", "Clip"}

_FRONT_END = LINEAR | POWERS | TRANSFORMS | {"ReduceMax", "ReduceMin", "Reciprocal", "Where"}


def steep_functions(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Logarithms, roots and quotients of what a transform computes from a graph input.

    Where its results span more than 2^11, FP32 reaches from the function through the transform to the input.
    In FP32 such a front end was also faster (docs/hazards.md#small-values). A magnitude sqrt(re^2 + im^2) is
    not steep in the transform's results: its error is as large as theirs. With activations between, it is no
    front end, and norms have a rule of their own.

    TF32 rounds the transforms as FP16 does, although they stay FP32. Sums of weights of one sign, such as a
    bank of mel filters, cancel nothing and lose nothing.
    """
    for node, tensor, inside in _steep(analysis):
        name = display_name(node)
        advice = f"as inexact as FP16, and {name} shows it: build with TF32 off"
        for transform in (n for n in inside if _uses_tf32(analysis, n)):
            reason = f"{display_name(transform)}: an FP32 engine computes it in TF32, {advice}"
            yield analysis.hazard(transform, "tf32", reason, tensor, "warning")
        measured = analysis.range(tensor)
        span = f"values from {measured.low:.3g} to {measured.high:.3g}" if measured else "values"
        reason = f"{name} reads {span} of the transformed input: FP16 rounds away the small ones"
        for inner in (node, *inside):
            yield analysis.hazard(inner, "steep-function", reason, tensor, about=name)


def _uses_tf32(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for a product whose weights have both signs, on Tensor Cores in FP32."""
    if node.op_type not in TENSOR_CORE:
        return False
    weights = (analysis.constant(t) for t in node.input[:2])
    signed = any(value is not None and value.min(initial=0.0) < 0 for value in weights)
    return signed and operands_of(node, *(analysis.graph.shape(t) or () for t in node.input[:2])) != "fp32"


def _steep(analysis: GraphAnalysis) -> Iterator[tuple[NodeProto, str, list[NodeProto]]]:
    """Functions that are steep in the results of a transform, their operands, and the nodes before them."""
    for node in analysis.nodes if analysis.is_fp16 else ():
        tensor = steep_operand(analysis, node)
        measured = analysis.range(tensor) if tensor else None
        root = is_root(analysis, node)
        if tensor is None or measured is None or not measured.finite:
            continue
        if not 0 <= measured.low < RESOLUTION * measured.mean_abs or (measured.low == 0 and not root):
            continue
        inside = _front_end(analysis, node)
        degree = _degree(analysis, tensor, {}) if inside else None
        steep = degree is not None and (not root or degree * analysis.exponent(node) < 1)
        if steep and not any(node is inner for norm in analysis.norms for inner in norm.nodes):
            yield node, tensor, inside


def steep_operand(analysis: GraphAnalysis, node: NodeProto) -> str | None:
    """The operand whose relative error decides the result; None for other nodes, and for constants."""
    if node.op_type == "Div":
        tensor = node.input[1]
    elif node.op_type in {"Log", "Reciprocal"} or analysis.exponent(node) < 1:
        tensor = node.input[0]
    else:
        return None
    return None if analysis.is_constant(tensor) else str(tensor)


def is_root(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for powers with an exponent between 0 and 1: 0 for 0, with a slope that has no bound."""
    return 0 < analysis.exponent(node) < 1


def _front_end(analysis: GraphAnalysis, end: NodeProto) -> list[NodeProto]:
    """The nodes from the graph inputs to a node; none if one is no linear operator, power or quotient."""
    stack, seen, nodes = list(end.input), set[str](), list[NodeProto]()
    while stack:
        name = analysis.source(stack.pop())
        node = analysis.graph.producer(name)
        if name in seen or node is None or not analysis.is_float(name) or analysis.is_constant(name):
            continue
        seen.add(name)
        floats = [t for t in node.input if analysis.is_float(t)]
        if floats and not _is_front_end(analysis, node):
            return []
        nodes.append(node)
        stack.extend(floats)
    return [node for node in nodes if analysis.producer(node.output[0]) is node]


def _is_front_end(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for linear operators and powers; a bound is an epsilon below 1, and no activation such as ReLU."""
    if node.op_type in {"Max", "Clip"}:
        bounds = [analysis.scalar(t) for t in node.input if t and analysis.is_constant(t)]
        return bool(bounds) and all(b is not None and 0 < b < 1 for b in bounds)
    return node.op_type in _FRONT_END


def _degree(analysis: GraphAnalysis, tensor: str, known: dict[str, float | None]) -> float | None:
    """The degree to which a tensor of a front end grows with the first transform's results; None before one.

    A tensor of degree 2 is 4 times as large if these results are twice as large. A function of a degree of 1
    or more changes by no more than they do, relative to the largest.
    """
    name = analysis.source(tensor)
    node = analysis.graph.producer(name)
    if name in known or node is None or analysis.is_constant(name):
        return known.get(name)
    degrees = [_degree(analysis, t, known) for t in node.input if analysis.is_float(t)]
    after = [degree for degree in degrees if degree is not None]
    if node.op_type in TRANSFORMS:
        known[name] = sum(after) if after else 1.0
    elif not after:
        known[name] = None
    elif node.op_type == "Mul":
        known[name] = sum(after)
    elif node.op_type in {"Div", "Reciprocal"}:
        known[name] = (degrees[0] or 0.0) - (degrees[1] or 0.0) if node.op_type == "Div" else -after[0]
    else:
        power = 2.0 if node.op_type == "ReduceSumSquare" else analysis.exponent(node)
        known[name] = power * min(after)
    return known[name]


SMALL_ROOT = 2.0**8 * FP16_FLUSH**0.5
"""Mean of a root below which flushed values show: their roots, up to sqrt(2^-25), are then 2^-8 of it."""

_KEEPS_SMALL = LINEAR | POWERS | {"Exp", "Relu", "Softmax", "Sigmoid", "Where"}
"""Operators whose positive results are small because their operands are, or that make them small."""


def small_operands(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Operands of logarithms, roots and divisions with values that FP16 flushes or holds with a few bits.

    The island reaches back to where the small values come from, and holds comparisons of them, which guard
    divisions by zero. Signed operands are left out: their smallest magnitude is not measured.
    """
    for node in analysis.nodes if analysis.is_fp16 else ():
        tensor = steep_operand(analysis, node)
        lost = _loss(analysis, node, tensor) if tensor else ""
        if tensor and lost:
            reason = f"{display_name(node)} reads {lost}"
            small = [node, *analysis.upstream(tensor, lambda n: _makes_small(analysis, n))]
            readers = (r for n in small for _, r in analysis.readers(n.output[0]))
            guards = (r for r in readers if r.op_type in INEQUALITIES)
            for inner in (*small, *guards):
                yield analysis.hazard(inner, "small-operand", reason, tensor, about=display_name(node))


def _loss(analysis: GraphAnalysis, node: NodeProto, tensor: str) -> str:
    """The loss of an operand in FP16, as a phrase; "" if it has no effect on the result."""
    measured = analysis.range(tensor)
    if measured is None or not measured.finite or measured.low < 0:
        return ""
    smallest = f"{tensor}, whose smallest value is {measured.low:.3g}"
    if is_root(analysis, node):
        result = analysis.range(node.output[0])
        shows = result is not None and 0 < result.mean_abs < SMALL_ROOT
        return smallest if shows and measured.low < FP16_MIN_NORMAL else ""
    if not 0 < measured.low < UNDERFLOW:
        return ""
    return f"{smallest}: zero in FP16" if measured.low <= FP16_FLUSH else smallest


def _makes_small(analysis: GraphAnalysis, node: NodeProto) -> bool:
    measured = analysis.range(node.output[0])
    small = measured is not None and 0 <= measured.low < FP16_MIN_NORMAL
    return small and node.op_type in _KEEPS_SMALL


def differences(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Sums that leave little of their terms, which FP16 rounds by 2^-12 of them.

    - Of squares and products of the same tensors: E[x^2] - E[x]^2, |x|^2 - 2 x p + |p|^2. The island
      reaches back to what is squared: the rounding of x itself cancels.
    - Of what arithmetic makes of graph inputs: coordinates and times, minus others or minus a constant. The
      island reaches back to the inputs, which FP32 makes exact. What a layer computes is inexact already.
    """
    parts = {id(node) for norm in analysis.norms for node in norm.nodes}
    for node in (n for n in analysis.nodes if n.op_type in SUMS and id(n) not in parts):
        ranges = [analysis.range(t) for t in (*node.input, *node.output)]
        if len(ranges) < 3 or not all(r is not None and r.finite and r.mean_abs for r in ranges):
            continue
        *terms, rest = (r for r in ranges if r is not None)
        size, left = min(r.mean_abs for r in terms), rest.mean_abs
        least = min(abs(rest.low), abs(rest.high))
        nodes = _square_terms(analysis, node) if size > _CANCELS * min(least, left) else None
        if nodes and any(n.op_type in _PRODUCTS for n in nodes):  # distances, of which the least count
            exact = size / EXACT_INTEGERS[analysis.request.low]
            left = least if rest.low * rest.high >= 0.0 or least < exact else left
        if nodes is None or size <= _CANCELS * left:
            apart = size > _CANCELS_INPUTS * left and size > 2.0 * rest.absmax  # a mask is exact
            nodes = from_inputs(analysis, node.input, partial(_moves_inputs, analysis)) if apart else None
        reason = f"{display_name(node)} leaves {left:.3g} of numbers of about {size:.3g}"
        for inner in (node, *nodes) if nodes is not None else ():
            yield analysis.hazard(inner, "cancellation", reason, node.output[0], about=display_name(node))


def _square_terms(analysis: GraphAnalysis, node: NodeProto) -> list[NodeProto] | None:
    """The nodes between a sum and the tensors whose squares, and products, it adds; None for other sums."""

    def walk(tensor: str, ops: AbstractSet[str], ends: AbstractSet[str]) -> list[NodeProto]:
        def through(n: NodeProto) -> bool:
            return ends.isdisjoint(n.output) and (n.op_type in ops or _is_statistic(analysis, n))

        return list(analysis.upstream(tensor, through))

    squares = (n for t in node.input for n in walk(t, SUMS, set()) if analysis.squares(n))
    base = {analysis.source(n.input[0]) for n in squares}
    base = {t for t in base if base.isdisjoint(i for n in walk(t, SUMS, set()) for i in n.input)}
    paths = [walk(t, SUMS | _PRODUCTS, base) for t in node.input if base and analysis.producer(t)]
    if not paths or not all(any(analysis.squares(n) or n.op_type in _PRODUCTS for n in p) for p in paths):
        return None
    return list({id(n): n for path in paths for n in path}.values())


def _moves_inputs(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for arithmetic without a layer, which FP32 makes of an input as exactly as the original does."""
    moves = (CHEAP | VALUE_PRESERVING) - ops.SOFTMAX - ops.CONTROL_FLOW
    return node.op_type in moves or mixes_coordinates(analysis, node)


_PRODUCTS = PRODUCTS | {"Einsum"}

_CANCELS = 4.0
"""Ratio of squares to what a sum leaves of them: two bits are lost, and more with a larger mean."""

_CANCELS_INPUTS = 8.0
"""The same for inputs: 2^-12 of them is 2^-9 of the difference, and FP16 rounds both terms."""


def _is_statistic(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for squares, means of them, and what scales or reshapes those."""
    if node.op_type in SCALING:
        return analysis.squares(node) or any(analysis.scalar(t) is not None for t in node.input)
    means = {"ReduceMean", "ReduceSum", "ReduceSumSquare", "GlobalAveragePool"}
    return analysis.squares(node) or node.op_type in VIEWS | means
