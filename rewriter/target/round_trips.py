"""Finds FP32 results of products that are cast to FP16 and back at the end of a kernel.

TensorRT-RTX 1.6.1 then writes FP16 where the next kernel, or the user, reads FP32. Which kernels end like
that, and which were seen to be right, is in docs/engines.md#casts-to-fp16-and-back. For some consumers only
the builder's verbose log was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphView, casts_to
from rewriter.ir.graph.match import produced, walk_down
from rewriter.ir.graph.ops import ELEMENTWISE, LAYOUTS, PRODUCTS, REDUCING, RESHAPES, SELECTIONS, TENSOR_CORE
from rewriter.target.fusion import kernel_results

_INSIDE = ELEMENTWISE | {"Cast", "Identity"}
"""Operators that the kernel of a product may hold besides the product."""

# Identity is no kernel; of the inequalities, these two were measured
_TAKING = LAYOUTS - {"Identity"} | SELECTIONS | {"Where", "Greater", "Less"}
"""Operators whose kernels include the second Cast, if nothing else reads it."""


class RoundTrip(NamedTuple):
    """A pair of Casts that ends the kernel of a product: to FP16, and back to FP32, of the same shape."""

    down: NodeProto
    up: NodeProto


def lost_round_trips(graph: GraphView) -> Iterator[RoundTrip]:
    """Every such pair of a graph, in the order of its nodes."""
    nodes = graph.nodes
    kernels = kernel_results(nodes, lambda n: n.op_type in TENSOR_CORE, lambda n: n.op_type in _INSIDE)
    for node in nodes:
        begins = next((kernels[name] for name in node.output if name in kernels), None)
        if begins is None or (trip := _trip(graph, node)) is None:
            continue
        if _ends(graph, trip.up.output[0], matrix=nodes[begins].op_type in PRODUCTS):
            yield trip


def _trip(graph: GraphView, down: NodeProto) -> RoundTrip | None:
    """The pair that begins with a node, if it rounds and nothing else reads the tensors inside it."""
    start = down.input[0] if down.input else ""
    if not casts_to(down, TensorProto.FLOAT16) or graph.dtype(start) != TensorProto.FLOAT:
        return None
    source = produced(graph, start, "Cast")
    if source is not None and graph.dtype(source.input[0]) == TensorProto.FLOAT16:
        return None  # nothing is rounded: the Casts are folded
    if graph.only_consumer(start) is not down:
        return None
    # views vanish if the shape comes out as it went in
    _, end = walk_down(graph, down.output[0], lambda node: node.op_type in RESHAPES)
    up = graph.only_consumer(end)
    if up is None or not casts_to(up, TensorProto.FLOAT):
        return None
    shape = graph.shape(start)
    same = up.input[0] == down.output[0] or (shape is not None and graph.shape(up.input[0]) == shape)
    return RoundTrip(down, up) if same else None


def _ends(graph: GraphView, result: str, *, matrix: bool) -> bool:
    """True if the kernel ends with the Cast that writes `result`: no consumer is computed in it."""
    readers = graph.consumers(result)
    if matrix and graph.is_output(result):
        return True
    alone = len(readers) == 1 and readers[0].op_type in _TAKING
    return not alone and any(r.op_type not in ELEMENTWISE and r.op_type not in REDUCING for r in readers)
