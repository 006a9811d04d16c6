"""scale-query: moves the attention scale from the scores to the query."""

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import other_operand
from rewriter.ir.graph.ops import LAYOUTS, SCALING
from rewriter.ir.patterns.norms.language import scaling
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal

LONGEST = 12
"""Most nodes that are searched after one scale: no exporter puts more before its Softmax."""


@dataclass(frozen=True)
class ScaleQuery(GraphPass):
    """QK^T is larger than the scaled score by sqrt(d), and FP16 overflows there first.

    MatMul(q, k) * s becomes MatMul(q * s, k), so that the sums inside the MatMul are as small as the score.
    NVIDIA requires the scale before the product for fused attention ("Fused Attention" in TensorRT's
    documentation), and Ultralytics moved its own there (ultralytics/ultralytics#24990). `rescale` removes
    the overflow as well, but needs ranges of real data and constants around Q.

    The scale must be constant and below 1. Its score must feed a Softmax: directly, through Add or Where, or
    through operators that only move values. If s is a power of two, the result is bit-equal (except for
    subnormal numbers).

    Declines:
        - a factor of 1 or more
        - a score that is a graph output or has other consumers
        - a scale that may add axes to the score
    """

    exactness = Exactness(
        1e-5,
        "one rounding of 2^-24 moves from the score to Q: relative to |Q||K| the score moves by 2^-23 "
        "(Higham 2002, section 3.1), and Softmax's output by as much as the score does",
    )
    example = """
         g (float[2,6,8] q, float[2,8,6] k, float[2,1,6] mask) => (float[2,6,6] p)
         <float scale = {0.35355338}> {
        -    score = MatMul(q, k)
        -    scaled = Mul(score, scale)
        +    small = Mul(q, scale)
        +    scaled = MatMul(small, k)
             masked = Add(scaled, mask)
             p = Softmax<axis = -1>(masked)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes if "Softmax" in graph.operators else ():
            matmul: NodeProto | None = node
            while matmul is not None and matmul.op_type == "MatMul":
                matmul = yield from _move_one(graph, matmul)


def _move_one(graph: GraphEditor, matmul: NodeProto) -> Generator[Event, None, NodeProto | None]:
    """Moves the scale after a MatMul; returns the new MatMul, after which another scale may follow."""
    score = matmul.output[0]
    scales = [(n, factor) for n in graph.consumers(score) if (factor := _factor(graph, n, score)) is not None]
    if len(scales) != 1 or not _feeds_softmax(graph, scales[0][0].output[0]):
        return None
    scale, factor = scales[0]
    if reason := _reason_against(graph, score, scale, factor):
        yield Refusal(display_name(scale), reason)
        return None
    what = f"the factor {factor:.4g} moved to {matmul.input[0]}, before {display_name(matmul)}"
    yield Change(display_name(scale), what)
    return _move(graph, matmul, scale, factor)


def _factor(graph: GraphEditor, node: NodeProto, tensor: str) -> float | None:
    """Returns the factor by which a node multiplies `tensor`, if that is a constant scalar."""
    scaled = scaling(graph, node) if node.op_type in SCALING else None
    factor = scaled[1] if scaled is not None and scaled[0] == tensor else None
    return factor if factor and math.isfinite(factor) else None


def _feeds_softmax(graph: GraphEditor, tensor: str) -> bool:
    for _ in range(LONGEST):
        consumers = graph.consumers(tensor)
        if any(n.op_type == "Softmax" for n in consumers):
            return True
        onward = [n for n in consumers if _leads_on(graph, n, tensor)]
        if len(onward) != 1:
            return False
        tensor = onward[0].output[0]
    return False


def _leads_on(graph: GraphEditor, node: NodeProto, tensor: str) -> bool:
    if node.op_type == "Cast":
        return bool(attribute(node, "to") == graph.dtype(tensor))
    moves = node.op_type in LAYOUTS and node.input[0] == tensor
    return moves or node.op_type in {"Add", "Where"} or _factor(graph, node, tensor) is not None


def _reason_against(graph: GraphEditor, score: str, scale: NodeProto, factor: float) -> str | None:
    if graph.is_output(score):
        return f"the score {score} is a graph output"
    if graph.only_consumer(score) is not scale:
        return f"the score {score} has other consumers"
    if abs(factor) >= 1:
        return f"a factor of {factor:.4g} would not make the score smaller"
    constant = str(other_operand(scale, score))
    adds = (graph.rank(constant) or 0) > (graph.rank(score) or 0)
    return f"{constant} may add axes to the score" if adds else None


def _move(graph: GraphEditor, matmul: NodeProto, scale: NodeProto, factor: float) -> NodeProto:
    """Replaces MatMul and scale by a MatMul of the scaled query."""
    query, key = matmul.input
    rounded = graph.dtype(query) != TensorProto.FLOAT and math.frexp(abs(factor))[0] != 0.5
    # a Div would be kept in FP32, in front of attention's kernel
    operator = scale.op_type if rounded else "Mul"
    value = 1 / factor if operator == "Div" else factor
    scaled, result = graph.tensor(f"{query}/scaled", like=query), scale.output[0]
    constant = graph.add_constant(f"{query}/scale", value, like=query)
    new = graph.clone_node(matmul, [scaled, key], [result], name=f"{display_name(matmul)}/scaled")
    scaler = graph.make(operator, [query, constant], [scaled], name=f"{display_name(scale)}/query")
    graph.replace_producer(result, scaler, new)
    return new
