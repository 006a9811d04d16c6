"""Hazard rules about small values that a later node makes large: logarithms, roots and divisors.

A logarithm shows relative errors, whatever the size of the value: what FP16 flushes to zero becomes -inf.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from rewriter.hazards.analysis import GraphAnalysis
from rewriter.hazards.front_ends import LINEAR, POWERS, is_root, steep_operand
from rewriter.hazards.kinds import Hazard
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL, UNDERFLOW
from rewriter.hazards.norms import MEAN_RATIO
from rewriter.ir.graph import display_name
from rewriter.ir.graph.ops import INEQUALITIES, SCALING, VIEWS

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
            yield from (analysis.hazard(n, "small-operand", reason, tensor) for n in (*small, *guards))


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


def square_differences(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """A variance as E[x^2] - E[x]^2 outside norms: rounding errors remain where |mean| exceeds the deviation.

    The island reaches back to what is squared.
    """
    for node in analysis.nodes:
        ranges = [analysis.range(t) for t in (*node.input, *node.output)] if node.op_type == "Sub" else []
        finite = [r for r in ranges if r is not None and r.finite]
        if len(finite) < 3 or not finite[1].mean_abs > _CANCELS * finite[2].mean_abs:
            continue
        squares = [list(analysis.upstream(t, lambda n: _is_statistic(analysis, n))) for t in node.input]
        if all(any(analysis.squares(n) for n in path) for path in squares):
            size = finite[1].mean_abs
            reason = f"{display_name(node)} subtracts squares of about {size:.3g}, and little remains"
            nodes = {id(n): n for path in ([node], *squares) for n in path}
            yield from (analysis.hazard(n, "cancellation", reason, node.output[0]) for n in nodes.values())


def exponential_differences(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """exp(x) - 1 or 1 - exp(x) of small x: FP16 rounds exp(x), which is nearly 1. JAX writes Elu so."""
    for node in analysis.nodes if analysis.is_fp16 else ():
        exponential = _less_one(analysis, node)
        result = analysis.range(node.output[0])
        if exponential is not None and result is not None and 0 < result.mean_abs < 1 / MEAN_RATIO:
            reason = f"{display_name(node)} leaves {result.mean_abs:.3g} on average of an exponential near 1"
            yield from (
                analysis.hazard(n, "cancellation", reason, node.output[0]) for n in (exponential, node)
            )


def _less_one(analysis: GraphAnalysis, node: NodeProto) -> NodeProto | None:
    """The Exp of a difference between an exponential and one; None for other nodes."""
    one = {"Sub": 1.0, "Add": -1.0}.get(node.op_type)
    for tensor, constant in (node.input, reversed(node.input)) if one else ():
        exponential = analysis.producer(tensor)
        if exponential is not None and exponential.op_type == "Exp" and analysis.scalar(constant) == one:
            return exponential
    return None


_CANCELS = 4.0
"""Ratio of a square to the difference: two bits are lost, and more with a larger mean."""


def _is_statistic(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for squares, means of them, and what scales or reshapes those."""
    if node.op_type in SCALING:
        return analysis.squares(node) or any(analysis.scalar(t) is not None for t in node.input)
    means = {"ReduceMean", "ReduceSum", "ReduceSumSquare", "GlobalAveragePool"}
    return analysis.squares(node) or node.op_type in VIEWS | means
