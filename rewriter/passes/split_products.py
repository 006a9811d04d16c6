"""split-products: splits the data of an FP16 product into the sum of two FP16 tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto

from rewriter.base import Context, Event, Exactness, GraphPass, Refusal, Requires, refused
from rewriter.graph import GraphEditor, is_op, is_quantised, label
from rewriter.graph.fusion import after_products, is_depthwise
from rewriter.graph.match import produced
from rewriter.graph.new_weights import NewWeights
from rewriter.graph.ops import TENSOR_CORE
from rewriter.model import facts
from rewriter.patterns.split_parts import PASS, is_made
from rewriter.planning.costs.estimate import priced
from rewriter.planning.costs.node_times import PROCESSORS
from rewriter.planning.free_fp32 import PROBE
from rewriter.rewriting.product_splitting.operands import feeds_attention, operand_of
from rewriter.rewriting.product_splitting.writing import Splitting

LEAST_SHARE = 0.2
"""Least share of the products by weights that must be splittable (docs/accuracy.md#split-products): 0.17
(RT-DETR) was not worth it, 0.24 (ViT-B) was."""


@dataclass(frozen=True)
class SplitProducts(GraphPass):
    """With FP32 sums, a product errs by the rounding of its data and of its weight: 2.1e-4 each.

    hi = FP16(x) and lo = FP16(x - hi) together hold 22 bits of x. A product of few rows leaves most of a GPU
    idle, so the pass makes its result larger and keeps its depth. A MatMul multiplies the rows [hi; lo] by
    the columns [hi | lo] of the weight, with an FP32 epilogue. The next kernel adds the quarters in FP32.
    A T5 encoder with split MLPs errs 40 % less, for some 40 % more latency
    (docs/accuracy.md#split-products).

    As that is expensive, all such products are split or none. None are if the estimate exceeds
    `--max-latency-cost`; a search spends the rest of the budget. None are if they are fewer than a fifth of
    all products by weights: the others err most then, and the search gets the whole budget.

    The pass splits the products of an MLP. They read, in FP32, a norm or values computed elementwise from a
    product. Their results do not go into attention, which rounds them once more and sums them in FP16.

    The data goes through an Expand, and a Where selects hi or lo. The Expand stands before a norm, because
    TensorRT-RTX 1.6.1 gives NaN where a norm's own kernel repeats its rows. A norm with other consumers is
    computed twice.

    The pass runs after `keep-epilogues` and before `compensate-rounding`, which then has nothing to round
    there. It only works if `rewriter probe`, here or recorded, found that an FP32 bias makes an FP16 product
    sum in FP32 (matmul-epilogue).

    Skipped without a report: Gemm, products outside an MLP, results of more tiles than the option allows.

    Options:
        tiles: Most tiles of 128 x 128 in the result of the larger product. 132 is what the multiprocessors of
            an H200 compute at a time (`rewriter.planning.costs.node_times`).

    Declines:
        - more products than the budget allows, or too few of all products by weights
        - an unknown number of rows, or data of more than three axes
        - data of a norm over other axes than the last, or with a view after it that moves elements
        - one of several products of one tensor, which TensorRT merges and sums in FP16
        - a MatMul that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, that belong to an enclosing graph, or that FP16 cannot hold
    """

    name = PASS
    requires = Requires(opset=13, after=("keep-epilogues",))  # from there on Split takes sizes as an input
    exactness = Exactness(
        1e-5,
        "two FP16 numbers have 22 bits, 2.4e-7; 3.5e-7 measured on a T5 encoder, with sums in another order",
    )
    tiles: int = PROCESSORS
    before = """
        g (float[3,2] x) => (float[3,2] y)
        <float[2] scale = {1.5, 0.7}, float[2,2] w = {1.1, 2.2, 3.3, 4.4}> {
            n = LayerNormalization<axis = -1>(x, scale)
            y = MatMul(n, w)
        }"""
    after = """
        g (float[3,2] x) => (float[3,2] y)
        <float[2] scale = {1.5, 0.7}, int64[1] axis = {-3}, int64[3] twice = {2, 1, 1},
         float least = {-65504.0}, float most = {65504.0}, bool[2,1,1] second = {0, 1},
         int64[2] rows = {6, 2}, float[2,4] both = {1.099609375, 2.19921875, 0.000390530, 0.000781059,
                            3.30078125, 4.3984375, -0.000781059, 0.00156212},
         float[4] zeros = {0.0, 0.0, 0.0, 0.0}, int64[2] parts = {3, 3}, int64[2] columns = {2, 2}> {
            up = Unsqueeze(x, axis)
            repeated = Expand(up, twice)
            n = LayerNormalization<axis = -1>(repeated, scale)
            limited = Clip(n, least, most)
            half = Cast<to = 10>(limited)
            hi = Cast<to = 1>(half)
            lo = Sub(n, hi)
            picked = Where(second, lo, hi)
            stacked = Reshape(picked, rows)
            product = MatMul(stacked, both)
            summed = Add(product, zeros)
            top, bottom = Split<axis = -2>(summed, parts)
            added = Add(bottom, top)
            large, small = Split<axis = -1>(added, columns)
            y = Add(small, large)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        sums = context.target.answers.get(PROBE) == "fp32"
        if not sums or context.budget == 0.0:
            return
        epilogues, weights = after_products(graph), NewWeights(graph)
        found: list[Splitting] = []
        products = [node for node in graph.nodes if _is_product(graph, node)]
        projected = Counter(node.input[0] for node in products)
        for node in products:
            source = None if is_made(node) else operand_of(graph, node.input[0], epilogues)
            if source is None or feeds_attention(graph, node):
                continue
            split = Splitting(graph, node, source, weights)
            reason = split.reason_against(projected[node.input[0]], context.kept)
            if refusal := refused(node, "it is not split", reason):
                yield refusal
            elif split.tiles <= self.tiles:
                found.append(split)
        reason = _reason_against_all(graph, found, context) if found else None
        if reason is not None:
            yield Refusal(label(found[0].node), reason)
        else:
            yield from (split.write() for split in found)


def _reason_against_all(graph: GraphEditor, found: Sequence[Splitting], context: Context) -> str | None:
    """Returns why products that could be split are not; None if they may be."""
    if context.budget is None:
        return None
    weighted = sum(map(partial(_is_weighted, graph), graph.nodes))
    if len(found) < LEAST_SHARE * weighted:
        return (
            f"it is not split: {len(found)} of {weighted} products by weights could be, and the search gains "
            "more on the others"
        )
    prices = priced(graph.model, facts.infer(graph.model), context.target)
    us = sum(split.us for split in found)
    share = us / (sum(prices.base.values()) or us)
    if share <= context.budget:
        return None
    return (
        f"it is not split: {len(found)} such products would cost some {us:.0f} us; "
        f"--max-latency-cost {math.ceil(100 * share)}% allows it"
    )


def _is_weighted(graph: GraphEditor, node: NodeProto) -> bool:
    """True for a matrix product by a constant weight, and for such a Conv that is not depthwise."""
    if not is_op(node, *TENSOR_CORE):
        return False
    weight = node.input[1]
    made = produced(graph, weight, "Constant", "DequantizeLinear") is not None
    return (made or graph.is_initializer(weight)) and not is_depthwise(node, graph.shape(weight) or ())


def _is_product(graph: GraphEditor, node: NodeProto) -> bool:
    """True for a MatMul of computed data by a constant FP32 matrix."""
    if not is_op(node, "MatMul"):
        return False
    weight = graph.constant(node.input[1])
    quantised = is_quantised(graph, node.input[1])
    constant = quantised or (weight is not None and weight.ndim == 2 and weight.dtype == np.float32)
    return constant and graph.constant(node.input[0]) is None
