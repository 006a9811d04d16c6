"""FP32 results of products that are rounded to FP16 and cast back, where a kernel ends with both Casts.

TensorRT-RTX 1.6.1 on an H200 then writes FP16 where the next kernel, or the user, reads FP32: the first half
of the tensor holds pairs of FP16 values, the rest zeros. Computed like that from the exact results, the
relative L2 errors of eleven outputs (2.37 to 8.61) are those of the engine within 0.2 %. The outputs of three
networks with such Convs were infinite. The builder's verbose log calls these kernels `__myl_Fc...CastCast`
(MatMul, Gemm) and `__myl_Corr...CastCast` (Conv).

Results were right where the kernel ends otherwise: with one Cast, with an elementwise operator behind the
Casts, with a view between them that changes the shape, and where a Conv's result is the output. For other
readers it is the log that says which kernels end like that. TensorRT-RTX 1.7.1 has the same names for matrix
products; it was not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from rewriter.graph import GraphView, casts_to
from rewriter.graph.fusion import reduces
from rewriter.graph.ops import ELEMENTWISE, LAYOUTS, PRODUCTS, RESHAPES, SELECTIONS, TENSOR_CORE

_INSIDE = ELEMENTWISE | {"Cast", "Identity"}
"""What the kernel of a product may hold besides the product."""

# Identity is no kernel; of the inequalities, these two were measured
_TAKING = LAYOUTS - {"Identity"} | SELECTIONS | {"Where", "Greater", "Less"}
"""Their kernels take the second Cast, if they alone read it."""


@dataclass(frozen=True)
class RoundTrip:
    """A pair of Casts that ends the kernel of a product.

    Attributes:
        down: The Cast to FP16; `up`: the Cast back to FP32, of the same shape.
    """

    down: NodeProto
    up: NodeProto


def lost_round_trips(graph: GraphView) -> Iterator[RoundTrip]:
    """Every such pair of a graph, in the order of its nodes; all it takes is one sweep."""
    behind: dict[str, bool] = {}  # results of a product's kernel: whether the product is a matrix product
    for node in graph.nodes:
        matrix = _kernel(node, behind)
        if matrix is None:
            continue
        behind.update((name, matrix) for name in node.output)
        trip = _trip(graph, node)
        if trip is not None and _ends(graph, trip.up.output[0], matrix=matrix):
            yield trip


def _kernel(node: NodeProto, behind: dict[str, bool]) -> bool | None:
    """Whether the product whose kernel may hold the node is a matrix product; None if there is none."""
    if node.op_type in TENSOR_CORE:
        return node.op_type in PRODUCTS
    if node.op_type not in _INSIDE:
        return None
    found = [behind[name] for name in node.input if name in behind]
    return any(found) if found else None


def _trip(graph: GraphView, down: NodeProto) -> RoundTrip | None:
    """The pair that begins with a node, if it rounds and nothing else reads what stands between."""
    start = down.input[0] if down.input else ""
    if not casts_to(down, TensorProto.FLOAT16) or graph.dtype(start) != TensorProto.FLOAT:
        return None
    source = graph.producer(start)
    if (
        source is not None
        and source.op_type == "Cast"
        and graph.dtype(source.input[0]) == TensorProto.FLOAT16
    ):
        return None  # nothing is rounded: the Casts are folded
    if graph.only_consumer(start) is not down:
        return None
    up = graph.only_consumer(down.output[0])
    while up is not None and up.op_type in RESHAPES:  # they vanish if the shape comes out as it went in
        up = graph.only_consumer(up.output[0])
    if up is None or not casts_to(up, TensorProto.FLOAT):
        return None
    known = graph.shape(start)
    same = up.input[0] == down.output[0] or (known is not None and graph.shape(up.input[0]) == known)
    return RoundTrip(down, up) if same else None


def _ends(graph: GraphView, result: str, *, matrix: bool) -> bool:
    """Whether the kernel ends with the Cast that writes `result`: no reader's kernel goes on with it."""
    readers = graph.consumers(result)
    if matrix and graph.is_output(result):
        return True
    alone = len(readers) == 1 and readers[0].op_type in _TAKING
    return not alone and any(not (r.op_type in ELEMENTWISE or reduces(r)) for r in readers)
