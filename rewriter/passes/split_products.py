"""split-products: what an FP16 product reads becomes the sum of two FP16 tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto

from rewriter.model import facts
from rewriter.base import Context, Event, Exactness, GraphPass, Refusal, Requires
from rewriter.planning.costs.node_times import PROCESSORS
from rewriter.graph import GraphEditor, is_quantised, label
from rewriter.planning.free_fp32 import PROBE
from rewriter.graph.fusion import CONVOLUTIONS, PRODUCTS, after_products, is_depthwise
from rewriter.rewriting.product_splitting.operands import feeds_attention, operand_of
from rewriter.planning.costs.estimate import priced
from rewriter.patterns.split_parts import PASS, is_made
from rewriter.rewriting.product_splitting.writing import Splitting

LEAST_SHARE = 0.2
"""Of the products by weights that have to be split; measured were 0.17 (RT-DETR), which was not worth it, and
0.24 (ViT-B), which was."""


@dataclass(frozen=True)
class SplitProducts(GraphPass):
    """With FP32 sums, a product errs by the rounding of what it reads: 2.1e-4 each.

    hi = FP16(x) and lo = FP16(x - hi) together have 22 bits of x. A product of few rows leaves most of a GPU
    idle, so its depth stays what it is and its result grows: a MatMul of the rows [hi; lo] by the columns
    [hi | lo] of the weight, an FP32 epilogue, and the sum of its quarters in FP32, which the kernel that
    follows computes. Measured on one H200 with TensorRT-RTX 1.6.1, a T5 encoder whose MLPs are split: 2.4e-4
    in place of 4.0e-4, in 599 and 431 us.

    So it is dear: all of them are split or none, and none where that takes more than `--max-latency-cost`
    allows, by an estimate. A search spends what is left of the budget. Where such products are fewer than a
    fifth of all by weights, the others err most, and the search gets it whole: a UNet with 50 % to spend
    erred by 1.3e-3 with its MLPs split and by 7.2e-4 without.

    It takes the products of an MLP: those that read a norm, or what is elementwise behind a product, in FP32,
    and whose results do not go into attention, which rounds them once more and sums them in FP16.

    What is split goes through an Expand, and a Where picks hi or lo. Of a norm the Expand is before it:
    where a norm's kernel was to repeat its rows, TensorRT-RTX 1.6.1 gave NaN. A norm with other readers, too,
    is computed twice.

    It stands behind `keep-epilogues` and before `compensate-rounding`, which then has nothing to round there.
    It does nothing unless `rewriter probe`, here or recorded, found that an FP32 bias makes an FP16 product
    sum in FP32 (matmul-epilogue).

    Left alone without a word: Gemm, other products than those of an MLP, results of more tiles than the
    option says.

    Options:
        tiles: Most tiles of 128 x 128 in the result of the larger product: 132 are what the multiprocessors
            of an H200 compute at a time (see `rewriter.planning.costs.node_times`).

    Declines:
        - more products than the budget allows, or few of many
        - a number of rows that is not known
        - data of more than three axes
        - data of a norm over other axes than the last, or with a view behind it that moves elements
        - one of several products of one tensor, which TensorRT merges and sums in FP16
        - a MatMul that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, that belong to a graph around this one, or that FP16 cannot hold
        - a model below opset 13
    """

    name = PASS
    requires = Requires(opset=13, after=("keep-epilogues",))  # from there on Split takes sizes as an input
    exactness = Exactness(
        1e-5,
        "two FP16 numbers have 22 bits, 2.4e-7; 3.5e-7 measured on a T5 encoder, with sums in another order",
    )
    tiles: int = PROCESSORS
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[3,2] x) => (float[3,2] y)
        <float[2] scale = {1.5, 0.7}, float[2,2] w = {1.1, 2.2, 3.3, 4.4}> {
            n = LayerNormalization<axis = -1>(x, scale)
            y = MatMul(n, w)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
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
        epilogues, weights = after_products(graph), dict[str, str]()
        found: list[Splitting] = []
        products = [node for node in graph.nodes if _is_product(graph, node)]
        projected = Counter(node.input[0] for node in products)
        for node in products:
            source = None if is_made(node) else operand_of(graph, node.input[0], epilogues)
            if source is None or feeds_attention(graph, node):
                continue
            split = Splitting(graph, node, source, weights)
            reason = split.reason_against(projected[node.input[0]], context.kept)
            if reason is not None:
                yield Refusal(label(node), f"it is not split: {reason}")
            elif split.tiles <= self.tiles:
                found.append(split)
        reason = _reason_against_all(graph, found, context) if found else None
        if reason is not None:
            yield Refusal(label(found[0].node), reason)
        else:
            yield from (split.write() for split in found)


def _reason_against_all(graph: GraphEditor, found: Sequence[Splitting], context: Context) -> str | None:
    """Why products are not split that could be; None if they may be."""
    if context.budget is None:
        return None
    weighted = sum(map(partial(_is_weighted, graph), graph.nodes))
    if len(found) < LEAST_SHARE * weighted:
        return (
            f"it is not split: {len(found)} of {weighted} products by weights could be, and for the others "
            "the search has more use of the latency"
        )
    prices = priced(graph.model, facts.infer(graph.model), context.target)
    us = sum(split.us for split in found)
    share = us / (sum(prices.base.values()) or us)
    if share <= context.budget:
        return None
    return (
        f"it is not split: {len(found)} such products would take some {us:.0f} us more; "
        f"--max-latency-cost {math.ceil(100 * share)}% allows it"
    )


def _is_weighted(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether it is a matrix product by a constant weight, or such a Conv that is not depthwise."""
    if node.op_type not in PRODUCTS | CONVOLUTIONS or node.domain not in {"", "ai.onnx"}:
        return False
    weight = node.input[1]
    producer = graph.producer(weight)
    made = producer is not None and producer.op_type in {"Constant", "DequantizeLinear"}
    return (made or graph.is_initializer(weight)) and not is_depthwise(node, graph.shape(weight) or ())


def _is_product(graph: GraphEditor, node: NodeProto) -> bool:
    """Whether it is a MatMul of computed data by a constant FP32 matrix."""
    if node.op_type != "MatMul" or node.domain not in {"", "ai.onnx"}:
        return False
    weight = graph.constant(node.input[1])
    quantised = is_quantised(graph, node.input[1])
    constant = quantised or (weight is not None and weight.ndim == 2 and weight.dtype == np.float32)
    return constant and graph.constant(node.input[0]) is None
