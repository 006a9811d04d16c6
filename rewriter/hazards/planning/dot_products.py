"""Keeps written-out sums of products in FP32: Mul by a constant matrix, ReduceSum, and their neighbours.

The pass unfold-dot-products writes the last product of a network so. In FP32, neither its operands nor its
result are rounded: the pooling before it computes in FP32 inside, and the elementwise nodes after it are the
output.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from rewriter.hazards import Hazard
from rewriter.hazards.survey import Survey
from rewriter.ir.graph.ops import ELEMENTWISE, RESHAPES

RULE = "dot-product"
_REASON = "a written-out sum of products, which is to be exact"

_POOLING = frozenset({"GlobalAveragePool", "ReduceMean"})


def extend_over_dot_products(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add such sums to `found`, with the pooling that they read and the elementwise nodes after them."""
    if survey.request.low == TensorProto.FLOAT:
        return
    for node in survey.nodes:
        product = _product(survey, node)
        if product is not None:
            for kept in (node, product, *_before(survey, product), *_after(survey, node)):
                found.setdefault(id(kept), Hazard(kept, RULE, _REASON, node.output[0]))


def _product(survey: Survey, node: NodeProto) -> NodeProto | None:
    """The Mul by a constant matrix that only the ReduceSum `node` reads; None if there is none."""
    product = survey.producer(node.input[0]) if node.op_type == "ReduceSum" else None
    if product is None or product.op_type != "Mul":
        return None
    constant = [name for name in product.input if survey.is_constant(name)]
    if len(constant) != 1 or survey.graph.rank(constant[0]) != 2:
        return None
    return product if survey.graph.only_consumer(product.output[0]) is node else None


def _before(survey: Survey, product: NodeProto) -> Iterator[NodeProto]:
    """The views before the Mul, and the pooling before these, if nothing else reads them."""
    (tensor,) = (name for name in product.input if not survey.is_constant(name))
    node = survey.producer(tensor)
    while node is not None and survey.graph.only_consumer(node.output[0]) is not None:
        if node.op_type not in RESHAPES | _POOLING:
            return
        yield node
        node = survey.producer(node.input[0]) if node.op_type in RESHAPES else None


def _after(survey: Survey, node: NodeProto) -> Iterator[NodeProto]:
    """The elementwise nodes and views after the sum."""
    moves = ELEMENTWISE | RESHAPES
    for _, reader in survey.downstream(node.output[0], lambda n: n.op_type in moves):
        if reader.op_type in moves:
            yield reader
