"""Hazard rules about front ends: linear transforms of an input signal, such as spectrograms.

FP16 rounds each sample, weight and sum of a transform relative to the large ones. What is small beside them
is noise, and a function that is steep at 0 shows it: a logarithm, a root, a quotient.
"""

from collections.abc import Iterator

from onnx import NodeProto

from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.ir.graph import display_name
from rewriter.ir.graph.ops import REDUCTIONS, SCALING, SUMS, TENSOR_CORE, VIEWS
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
        advice = f"and {display_name(node)} shows it: build with TF32 off"
        for transform in (n for n in inside if _uses_tf32(analysis, n)):
            reason = (
                f"{display_name(transform)}: an FP32 engine computes it in TF32, as inexact as FP16, {advice}"
            )
            yield analysis.hazard(transform, "tf32", reason, tensor, "warning")
        measured = analysis.range(tensor)
        span = f"values from {measured.low:.3g} to {measured.high:.3g}" if measured else "values"
        reason = (
            f"{display_name(node)} reads {span} of the transformed input: FP16 rounds away the small ones"
        )
        name = display_name(node)
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
