"""Hazard rules about sums: of products (docs/hazards.md#fp16-accumulators), running sums, and states."""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.ir.graph import attribute, display_name, states
from rewriter.ir.graph.ops import CHEAP, CONTROL_FLOW, LOOPS, RECURRENT, TENSOR_CORE, VIEWS
from rewriter.ir.model import holds_graphs
from rewriter.target.fusion import conv_depth, is_plain_transpose


def partial_sums(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Products whose partial sums leave FP16's range although their results do not.

    Sums of depth * mean|a| * mean|b| occur wherever many terms in a row have one sign. A product between two
    Casts accumulates in FP32, at a small cost: docs/hazards.md#fp16-accumulators.
    """
    for node in analysis.nodes if analysis.is_fp16 else ():
        depth = None if sums_in_fp32(analysis, node) else depth_of(analysis, node)
        result = analysis.range(node.output[0])
        if depth is None or (result is not None and result.absmax > analysis.largest):
            continue  # the rules about overflow report the result
        a, b = (_mean(analysis, node, index, depth) for index in (0, 1))
        if depth * a * b > analysis.largest:
            reason = f"{depth} terms sum up to about {depth * a * b:.2g} if they have one sign"
            yield analysis.hazard(node, "partial-sums", reason, node.output[0])


SLOW_STEP = 16.0
"""Median step of a state, in FP16's last places, below which it stays FP32: 0.2 to 5.9 for states that went
wrong, 84 to 1,346 in ordinary GRUs, LSTMs and caches."""


def accumulation(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """A running sum rounds at every step."""
    for node in analysis.nodes:
        if node.op_type == "CumSum":  # increments below half a unit of the sum so far are lost
            reason = f"{display_name(node)} adds to a growing sum, and loses small terms"
            yield analysis.hazard(node, "accumulation", reason, node.output[0], "warning")
        elif holds_graphs(node) and node.op_type not in CONTROL_FLOW:
            yield Hazard(node, "subgraph", f"{node.op_type} is not taken apart")


def slow_state(analysis: GraphAnalysis, limit: float = SLOW_STEP) -> Iterator[Hazard]:
    """Loop, Scan, LSTM, GRU and RNN with a state that moves too slowly for the lower type.

    In the body of a Loop or Scan, the cheap operators that compute such a state; in the main graph, those
    that compute an output that a recording shows to become an input of the next call.
    """
    for node in analysis.nodes:
        if node.op_type in LOOPS | RECURRENT:
            for name in node.output:
                if reason := _slow(analysis, name, limit):
                    yield analysis.hazard(node, "slow-state", reason, name)
    owner = analysis.graph.owner
    inner = [after for _, after in states(owner, analysis.graph.graph)] if owner is not None else []
    entered = {tensor for node in analysis.nodes if node.op_type in RECURRENT for tensor in node.input}
    for tensor in inner if owner is not None else [value.name for value in analysis.graph.graph.output]:
        if reason := _slow(analysis, tensor, limit):
            for node in analysis.upstream(tensor, _moves_state, entered - {tensor}):
                yield analysis.hazard(node, "slow-state", reason, tensor)


def _moves_state(node: NodeProto) -> bool:
    return node.op_type in CHEAP | RECURRENT


def _slow(analysis: GraphAnalysis, tensor: str, limit: float) -> str:
    """The reason why a state is too slow for the lower type; "" if it is not, or is no state."""
    measured = analysis.range(tensor) if tensor else None
    if measured is None or measured.step is None:
        return ""
    step = measured.step * (1.0 if analysis.is_fp16 else 2.0**-3)  # BF16 has 3 bits fewer
    state = f"state {tensor}" if analysis.graph.is_output(tensor) else "a state"
    moves = f"{state} moves by {step:.2g} of {analysis.low_name}'s last places a step (median)"
    return f"{moves}: rounding holds it back" if step < limit else ""


def sums_in_fp32(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True if `rewriter probe` found that the target accumulates this operator in FP32."""
    kind = "conv" if node.op_type.startswith("Conv") else "matmul"
    if is_plain_transpose(node):
        kind = "conv-transpose"  # other ConvTransposes were not measured: they count as Conv
    return analysis.request.target.answers.get(f"{kind}-accumulation") == "fp32"


def depth_of(analysis: GraphAnalysis, node: NodeProto) -> int | None:
    """Number of terms that one element of a product sums; None for other operators or unknown shapes."""
    if node.op_type not in TENSOR_CORE or len(node.input) < 2:
        return None
    a, b = (analysis.graph.shape(t) or () for t in node.input[:2])
    if node.op_type == "MatMul":
        sizes = (*a[-1:], *(b[-2:-1] or b[-1:]))
    elif node.op_type == "Gemm":
        turned = [bool(attribute(node, name, 0)) for name in ("transA", "transB")]
        sizes = (*(a[:1] if turned[0] else a[1:2]), *(b[1:2] if turned[1] else b[:1]))
    else:
        kernel = analysis.graph.sizes(node.input[1])
        return None if kernel is None else conv_depth(node, kernel)
    return next((size for size in sizes if isinstance(size, int)), None)


def _mean(analysis: GraphAnalysis, node: NodeProto, index: int, depth: int) -> float:
    """Mean absolute value of an operand; 0 if it is unknown."""
    tensor = node.input[index]
    value, measured = analysis.constant(tensor), analysis.range(tensor)
    if value is not None and (measured is None or not measured.finite):  # else it need not be read again
        return float(np.abs(value).mean(dtype=np.float64)) if value.size and value.dtype.kind == "f" else 0.0
    moved = analysis.upstream(tensor, lambda n: n.op_type in VIEWS | {"Dropout", "Softmax"})
    if index == 0 and any(n.op_type == "Softmax" for n in moved):  # its rows sum to 1
        return 1.0 / depth
    return measured.mean_abs if measured is not None and measured.finite else 0.0
