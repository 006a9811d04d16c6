"""split-products: what an FP16 product reads becomes the sum of two FP16 tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter import facts
from rewriter.base import Change, Context, Event, Exactness, GraphPass, Kept, Refusal, Spent
from rewriter.costs import PROCESSORS, TILE
from rewriter.edits import GraphEditor, attribute, is_own, is_quantised, label
from rewriter.epilogues import PROBE
from rewriter.kernels import CONVOLUTIONS, PRODUCTS, behind_products, is_depthwise
from rewriter.mlp import Source, feeds_attention, source_of
from rewriter.model import Array
from rewriter.pricing import priced
from rewriter.rounding import Grid
from rewriter.splits import PASS, cost_us, is_made

FP16 = Grid(TensorProto.FLOAT16)

FIRST_OPSET = 13
"""From opset 13 on Unsqueeze and Split take their axes and sizes as inputs."""

MOST_AXES = 3
"""TensorRT views a tensor of more axes as a matrix before a product, and then sums it in FP16."""


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
            of an H200 compute at a time (see `rewriter.costs`).

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
        behind, weights = behind_products(graph), dict[str, str]()
        found: list[_Splitting] = []
        products = [node for node in graph.nodes if _is_product(graph, node)]
        projected = Counter(node.input[0] for node in products)
        for node in products:
            source = None if is_made(node) else source_of(graph, node.input[0], behind)
            if source is None or feeds_attention(graph, node):
                continue
            split = _Splitting(graph, node, source, weights)
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


def _reason_against_all(graph: GraphEditor, found: Sequence[_Splitting], context: Context) -> str | None:
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


@dataclass(frozen=True)
class _Splitting:
    """Writes one product anew.

    Attributes:
        weights: Names of split weights by those of the given ones: layers that share one go on sharing.
        nodes: What was made so far.
    """

    graph: GraphEditor
    node: NodeProto
    source: Source
    weights: dict[str, str]
    nodes: list[NodeProto] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the data; () if it is not known."""
        shape = self.graph.shape(self.node.input[0]) or ()
        sizes = tuple(size for size in shape if isinstance(size, int))
        return sizes if len(sizes) == len(shape) else ()

    @property
    def columns(self) -> int:
        """Of the given weight."""
        return int(self._value().shape[1])

    def _value(self) -> Array:
        """Of the given weight [depth, columns]."""
        value = self.graph.constant(self.node.input[1])
        assert value is not None, self.node.input[1]  # `_is_product` asked
        return value

    @property
    def us(self) -> float:
        """What it takes longer, estimated."""
        return cost_us(self._value().size)

    @property
    def tiles(self) -> int:
        """Of the larger product's result."""
        rows = math.prod(self.sizes[:-1])
        return math.ceil(2 * rows / TILE) * math.ceil(2 * self.columns / TILE)

    def reason_against(self, projections: int, kept: Kept) -> str | None:
        """Why it stays as it is; `projections`: how many products its data has."""
        option = next(kept.options(self.node), None)
        if option is not None:
            return f"it is kept in FP32 by {option}"
        if self.graph.model.opset < FIRST_OPSET:
            return f"it takes opset {FIRST_OPSET}, the model has {self.graph.model.opset}: run upgrade-opset"
        if (refusal := self._reason_in_weight()) is not None:
            return refusal
        if len(self.sizes) < 2:
            return f"the rows of {self.node.input[0]} are not known: give the model fixed shapes"
        if len(self.sizes) > MOST_AXES:
            return f"{self.node.input[0]} has {len(self.sizes)} axes: TensorRT sums such a product in FP16"
        if not self.source.plain:
            return f"{self.node.input[0]} is no norm over the last axis, or has been moved since"
        if self.graph.rank(self.source.tensor) != len(self.sizes):
            return f"{self.source.tensor} has other axes than {self.node.input[0]}"
        if projections > 1:
            return (
                f"TensorRT merges the {projections} products of {self.node.input[0]}: run merge-projections"
            )
        return None

    def _reason_in_weight(self) -> str | None:
        if is_quantised(self.graph, self.node.input[1]):
            return "its weight is quantised: TensorRT runs it so"
        if not is_own(self.graph, self.node.input[1]):
            return "its weight belongs to a graph around it, and would be copied"
        return FP16.refusal(self._value())

    def write(self) -> Change:
        """Put the larger product, and the sums of its parts, in the place of the node."""
        out, us = self.node.output[0], self.us
        product = self._add("MatMul", [self._stacked(), self._weight()], "wide")
        zeros = self.graph.add_constant(f"{out}/zeros", np.zeros(2 * self.columns, np.float32))
        summed = self._add("Add", [product, zeros], "summed")
        top, bottom = self._halves(summed, -2, self.sizes[-2], ("top", "bottom"))
        added = self._add("Add", [bottom, top], "added")
        large, small = self._halves(added, -1, self.columns, ("large", "small"))
        self.nodes.append(self.graph.make("Add", [small, large], [out], name=label(self.node)))
        self.graph.substitute(out, *self.nodes)
        return Spent(label(self.node), "data and weight split", us)

    def _stacked(self) -> str:
        """The data as rows of hi, and below them those of lo; `mixed-precision` leaves such Casts alone."""
        *outer, rows, depth = self.sizes
        up = self._add("Unsqueeze", [self.source.tensor, self._ints("axis", -3)], "up")
        data = self._add("Expand", [up, self._ints("twice", 2, 1, 1)], "repeated")
        if (norm := self.source.norm) is not None:
            attributes = {a.name: attribute(norm, a.name) for a in norm.attribute} | {"axis": -1}
            data = self._add(norm.op_type, [data, *norm.input[1:]], "normed", **attributes)
        limited = self._add("Clip", [data, self._limit("least", -1.0), self._limit("most", 1.0)], "limited")
        half = self._add("Cast", [limited], "half", to=TensorProto.FLOAT16)
        hi = self._add("Cast", [half], "hi", to=TensorProto.FLOAT)
        lo = self._add("Sub", [data, hi], "lo")
        second = self.graph.add_constant(f"{self.node.output[0]}/second", np.array([[[False]], [[True]]]))
        picked = self._add("Where", [second, lo, hi], "picked")
        return self._add("Reshape", [picked, self._ints("stacked", *outer, 2 * rows, depth)], "stacked")

    def _limit(self, name: str, sign: float) -> str:
        """FP16's largest number: beyond it all is lo, which is right where the product is FP32."""
        value = np.float32(sign) * FP16.largest
        return self.graph.add_constant(f"{self.node.output[0]}/{name}", np.asarray(value))

    def _weight(self) -> str:
        """Name of the constant [depth, columns of hi, columns of lo], FP32 with values of FP16."""
        name = self.node.input[1]
        if name not in self.weights:
            value = self._value()
            hi = FP16.nearest(value)
            both = np.concatenate([hi, FP16.nearest(value - hi)], axis=1)
            self.weights[name] = self.graph.add_constant(f"{name}/split", both)
        return self.weights[name]

    def _halves(self, tensor: str, axis: int, size: int, names: tuple[str, str]) -> tuple[str, str]:
        first, second = (self._tensor(name) for name in names)
        sizes = self._ints(f"{names[0]}/sizes", size, size)
        self.nodes.append(self.graph.make("Split", [tensor, sizes], [first, second], axis=axis))
        return first, second

    def _add(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        made = self._tensor(name, attributes.get("to", TensorProto.FLOAT))
        self.nodes.append(self.graph.make(op_type, inputs, [made], **attributes))
        return made

    def _tensor(self, name: str, dtype: int = TensorProto.FLOAT) -> str:
        return self.graph.tensor(f"{self.node.output[0]}/{name}", dtype=dtype)

    def _ints(self, name: str, *values: int) -> str:
        return self.graph.add_constant(f"{self.node.output[0]}/{name}", np.asarray(values, np.int64))
