"""scale-query: moves the attention scale from the scores to the query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal
from rewriter.ir.graph import GraphEditor, attribute, label
from rewriter.ir.graph.match import operands, other_operand, produced
from rewriter.ir.graph.ops import LAYOUTS, SCALING

LONGEST = 12
"""Most nodes that are searched after one MatMul: no exporter puts more before its Softmax."""


@dataclass(frozen=True)
class ScaleQuery(GraphPass):
    """QK^T is larger than the scaled score by sqrt(d), and FP16 overflows there first.

    MatMul(q, k) * s becomes MatMul(q * s, k). The sums inside the MatMul are then as small as the score, and
    TensorRT's fused attention expects the scale there. The Mul runs on Q, which is smaller than the scores
    whenever a sequence is longer than a head is wide.

    The scale must be constant and below 1, and its score must feed a Softmax: directly or through Add, Where
    and operators that only move values. If Q has a constant factor of its own, one Mul holds both, provided
    that is exact: one of them must be a power of two.

    If s is a power of two, the result is bit-equal (except for subnormal numbers). Otherwise each element of
    Q is rounded once more and each score once less.

    Declines:
        - a factor of 1 or more
        - a score that is a graph output or has other consumers
        - an operator that is not linear between MatMul and scale
        - a scale that may add axes to the score
    """

    name = "scale-query"
    exactness = Exactness(
        1e-5,
        "one rounding of 2^-24 moves from the score to Q: relative to |Q||K| the score moves by 2^-23 "
        "(Higham 2002, section 3.1), and Softmax's output by as much as the score does",
    )
    before = """
        g (float[2,6,8] q, float[2,8,6] k, float[2,1,6] mask) => (float[2,6,6] p)
        <float scale = {0.35355338}> {
            score = MatMul(q, k)
            scaled = Mul(score, scale)
            masked = Add(scaled, mask)
            p = Softmax<axis = -1>(masked)
        }"""
    after = """
        g (float[2,6,8] q, float[2,8,6] k, float[2,1,6] mask) => (float[2,6,6] p)
        <float scale = {0.35355338}> {
            small = Mul(q, scale)
            scaled = MatMul(small, k)
            masked = Add(scaled, mask)
            p = Softmax<axis = -1>(masked)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            matmul: NodeProto | None = node
            while matmul is not None and matmul.op_type == "MatMul":
                matmul, events = _move_one(graph, matmul)
                yield from events


def _move_one(graph: GraphEditor, matmul: NodeProto) -> tuple[NodeProto | None, list[Event]]:
    """Moves the first scale after a MatMul; returns the new MatMul, if more scales may follow, and the
    events.
    """
    scale = _find(graph, matmul)
    if scale is None:
        return None, []
    obstacle = scale.obstacle or _unfit(graph, scale)
    if obstacle is not None:
        return None, [Refusal(label(scale.node), obstacle)]
    return _move(graph, matmul, scale)


@dataclass(frozen=True)
class _Scale:
    """A Mul or Div by a constant between a MatMul and a Softmax.

    Attributes:
        score: The tensor that it scales.
        constant: The name of its other operand.
        factor: The factor of the score.
        between: The nodes from the MatMul to it.
        obstacle: Why it cannot move.
    """

    node: NodeProto
    score: str
    constant: str
    factor: float
    between: list[NodeProto]
    obstacle: str | None


def _find(graph: GraphEditor, matmul: NodeProto) -> _Scale | None:
    """Returns the first scale between a MatMul and a Softmax."""
    between: list[NodeProto] = []
    obstacle: str | None = None
    tensor = matmul.output[0]
    for _ in range(LONGEST):
        step = _next(graph, tensor)
        if step is None:
            return None
        if step is not graph.only_consumer(tensor):
            use = "is a graph output" if graph.is_output(tensor) else "has other consumers"
            obstacle = obstacle or f"the score {tensor} {use}"
        constant, factor = other_operand(step, tensor), _factor(graph, step, tensor)
        if constant is not None and factor is not None:
            found = _Scale(step, tensor, constant, factor, between, obstacle)
            return found if _feeds_softmax(graph, step.output[0]) else None
        if not _moves(graph, step, tensor):
            obstacle = obstacle or f"{label(step)} between MatMul and scale is not linear"
        between.append(step)
        tensor = step.output[0]
    return None


def _next(graph: GraphEditor, tensor: str) -> NodeProto | None:
    """Returns the consumer to follow: the only one, or the scale among several."""
    consumers = [n for n in graph.consumers(tensor) if tensor in n.input and len(n.output) == 1]
    scales = [n for n in consumers if _factor(graph, n, tensor) is not None]
    chosen = scales or consumers
    ends = {"MatMul", "Gemm", "Conv", "Softmax"}
    return chosen[0] if len(chosen) == 1 and chosen[0].op_type not in ends else None


def _factor(graph: GraphEditor, node: NodeProto, tensor: str) -> float | None:
    """Returns the factor by which a node multiplies `tensor`, if that is a constant scalar."""
    other = other_operand(node, tensor) if node.op_type in SCALING else None
    if other is None or (node.op_type == "Div" and node.input[0] != tensor):
        return None
    value = graph.scalar(other)
    if value is None or not math.isfinite(value) or value == 0:
        return None
    return value if node.op_type == "Mul" else 1 / value


def _moves(graph: GraphEditor, node: NodeProto, tensor: str) -> bool:
    if node.op_type == "Cast":
        return bool(attribute(node, "to") == graph.dtype(tensor))
    return node.op_type in LAYOUTS and node.input[0] == tensor


def _feeds_softmax(graph: GraphEditor, tensor: str) -> bool:
    for _ in range(LONGEST):
        consumers = graph.consumers(tensor)
        if any(n.op_type == "Softmax" for n in consumers):
            return True
        onward = [
            n
            for n in consumers
            if n.op_type in {"Add", "Where"} or _moves(graph, n, tensor) or _factor(graph, n, tensor)
        ]
        if len(onward) != 1:
            return False
        tensor = onward[0].output[0]
    return False


def _unfit(graph: GraphEditor, scale: _Scale) -> str | None:
    if abs(scale.factor) >= 1:
        return f"a factor of {scale.factor:.4g} would not make the score smaller"
    if not _keeps_rank(graph, scale.score, scale.constant):
        return f"{scale.constant} may add axes to the score"
    return None


def _keeps_rank(graph: GraphEditor, tensor: str, scalar: str) -> bool:
    """True if broadcasting a one-element constant against a tensor keeps the tensor's shape."""
    value, rank = graph.constant(scalar), graph.rank(tensor)
    return value is not None and (value.ndim == 0 or (rank is not None and value.ndim <= rank))


def _move(graph: GraphEditor, matmul: NodeProto, scale: _Scale) -> tuple[NodeProto, list[Event]]:
    """Replaces the chain from the MatMul to the scale by one that reads the scaled query."""
    query, key = matmul.input
    scaler = _scale_query(graph, matmul, scale)
    nodes, current, result = [scaler], scaler.output[0], scale.node.output[0]
    old_chain = [matmul, *scale.between]
    for node in old_chain:
        last = node is old_chain[-1]
        out = result if last else graph.tensor(f"{node.output[0]}/scaled", like=node.output[0])
        inputs = [current, key] if node is matmul else [current, *node.input[1:]]
        nodes.append(graph.again(node, inputs, [out], name=f"{label(node)}/scaled"))
        current = out
    graph.substitute(result, *nodes)
    return nodes[1], [
        Change(label(scale.node), f"the factor {scale.factor:.4g} moved to {query}, before {label(matmul)}")
    ]


def _scale_query(graph: GraphEditor, matmul: NodeProto, scale: _Scale) -> NodeProto:
    """Makes the node that scales the query."""
    query, factor, own = matmul.input[0], scale.factor, _own_factor(graph, matmul)
    exact = scale.node.op_type == "Mul" or _power_of_two(factor)
    operator, data = "Mul", query
    if own is not None and exact and (_power_of_two(own[1]) or _power_of_two(factor)):
        data, factor = own[0], own[1] * factor
    elif not exact:
        operator, factor = "Div", 1 / factor
    out = graph.tensor(f"{query}/scaled", like=query)
    constant = graph.add_constant(f"{query}/scale", factor, like=query)
    return graph.make(operator, [data, constant], [out], name=f"{label(scale.node)}/query")


def _own_factor(graph: GraphEditor, matmul: NodeProto) -> tuple[str, float] | None:
    """Returns the operand and factor of a constant Mul that makes Q and that nothing else reads."""
    query = matmul.input[0]
    node = produced(graph, query, "Mul")
    if node is None or matmul.input[1] == query or graph.only_consumer(query) is not matmul:
        return None
    for tensor, constant in operands(node):
        factor = _factor(graph, node, tensor) if graph.scalar(tensor) is None else None
        if factor is not None and _keeps_rank(graph, tensor, constant):
            return tensor, factor
    return None


def _power_of_two(value: float) -> bool:
    return math.frexp(abs(value))[0] == 0.5
