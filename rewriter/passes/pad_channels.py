"""pad-channels: fills the channels between Convs up to a multiple of 16 with zeros."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import optional_input
from rewriter.ir.graph.ops import ELEMENTWISE, SCALING, SUMS
from rewriter.ir.graph.weights import NewWeights, layout_obstacle
from rewriter.ir.model import STANDARD_DOMAINS, Array
from rewriter.ir.model.graphs import reads
from rewriter.ir.model.tensors import TensorFacts
from rewriter.ir.plan import NodePatterns
from rewriter.passes.algorithms.windows import windows_of
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires

POOLINGS = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
UNARY = POOLINGS | {"Identity", "Dropout"}
UNARY |= ELEMENTWISE - SCALING - SUMS - set("Pow Reciprocal Log Sqrt Exp Min Max PRelu".split())
"""Compute each channel by itself, and give a finite value for a channel of zeros."""

SPATIAL_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax"})

OPERANDS = SUMS | SCALING | {"PRelu"}  # may have a constant operand with a value for each channel

NEUTRAL = {1: 0.0, 2: 0.0, 3: 0.0, 4: 1.0}
"""Scale, bias, mean and variance of a BatchNormalization for a channel of zeros, by their inputs."""


@dataclass(frozen=True)
class PadChannels(GraphPass):
    """TensorRT-RTX has no fast kernel for a Conv whose channels are no multiple of 16.

    So weights get rows of zeros, the tensors between Convs more channels, and the Convs that read them
    columns of zeros (docs/accuracy.md#channels). An added channel is finite and only meets zeros, so all
    other channels keep their values. The new weights stay in memory until they are lowered.

    Above `largest` memory decides: an EfficientNet of 16 images lost 5 % by this pass and two others. A
    Concat that other parts have aligned, as 94 channels of motion and 2 of flow in RAFT, is left aligned:
    with 290 channels in place of 288 it took 2.3 times as long (benchmarks/README.md#deployed-sizes).

    Skipped without a report: numbers of channels up to `least`, quantised or computed weights.

    Options:
        step: Numbers of channels become multiples of this.
        least: Numbers of channels up to this one stay: 3x3 Convs of 32 channels are slower than of 24.
        largest: Most elements of a tensor that gets channels, in the first sample; 0 for any.

    Declines:
        - channels that any other operator reads, or that are graph outputs
        - a tensor larger than `largest`, and channels without which a Concat is aligned
        - a Conv that --keep-fp32, --keep-fp32-op or an edited plan names
    """

    step: int = 16
    least: int = 32
    largest: int = 2**20

    refittable = False
    requires = Requires(precisions=frozenset({"fp16", "bf16"}))  # in TF32 an HRNet lost 14 % by it
    exactness = Exactness(1e-5, "ONNX Runtime may add the same products in another order, with more zeros")
    example_options: ClassVar[Mapping[str, Any]] = {"step": 2, "least": 1}
    example = """
         g (float[N,1,2,2] x) => (float[N,1,2,2] y)
        -<float[3,1,1,1] a = {1, 2, 3}, float[3] bias = {4, 5, 6}, float[1,3,1,1] b = {7, 8, 9}> {
        +<float[4,1,1,1] a = {1, 2, 3, 0}, float[4] bias = {4, 5, 6, 0}, float[1,4,1,1] b = {7, 8, 9, 0}> {
             wide = Conv(x, a, bias)
             positive = Relu(wide)
             y = Conv(positive, b)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        channels = _Channels(graph, context.kept)
        for node in graph.nodes if "Conv" in graph.operators else ():
            channels.visit(node)
        if self.largest:
            channels.limit(self.largest, graph.model.at_sizes(context.sample).facts().main)
        least = max(self.least, 1)
        wanted = [conv for conv in channels.convs if conv[1].size > least and conv[1].size % self.step]
        for _, block in wanted:
            block.root().more = 0 if block.root().obstacle else -block.size % self.step
        channels.keep_aligned(self.step)
        for conv, block in wanted:
            root, size = block.root(), block.size
            if root.obstacle:
                yield Refusal(display_name(conv), f"it keeps its {size} channels: {root.obstacle}")
            else:
                yield Change(display_name(conv), f"{size + root.more} channels instead of {size}")
        channels.pad()


@dataclass(eq=False)
class _Block:
    """The channels of one Conv's result, or of a tensor from elsewhere.

    `tied` is another block of the same size; the root of tied blocks holds what applies to all of them. An
    `obstacle` is why they keep their size, and `more` the channels that are added to each.
    """

    size: int
    obstacle: str | None = None
    more: int = 0
    tied: _Block | None = None

    def root(self) -> _Block:
        block = self
        while block.tied is not None:
            block.tied = block.tied.tied or block.tied  # halves the way
            block = block.tied
        return block


Layout = tuple[_Block, ...]
"""The channels of a tensor: a Concat has the blocks of all its inputs, in their order."""

Constant = tuple[NodeProto, int, Mapping[int, Layout], float]
"""A node, the index of a constant that it reads, the layouts of the constant's axes, and the padding."""


@dataclass
class _Channels:
    """Divides the channels of all tensors into blocks, ties those that have to have one size, and pads them.

    Attributes:
        layouts: Of each tensor whose channels are known.
        convs: The Convs that blocks come from.
        constants, depthwise: What has to be changed where blocks grow, in topological order.
    """

    graph: GraphEditor
    kept: NodePatterns
    layouts: dict[str, Layout] = field(default_factory=dict)
    convs: list[tuple[NodeProto, _Block]] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    depthwise: list[NodeProto] = field(default_factory=list)

    def visit(self, node: NodeProto) -> None:
        """Gives the result of a node its layout, or fixes the layouts of all that it reads."""
        layout = self._result(node) if node.domain in STANDARD_DOMAINS and len(node.output) == 1 else None
        if layout is None:
            for name in reads(node):
                _fix(self.layouts.get(name, ()), f"{display_name(node)} reads {name}")
            return
        self.layouts[node.output[0]] = layout
        if self.graph.is_output(node.output[0]):
            _fix(layout, f"{node.output[0]} is an output")

    def _result(self, node: NodeProto) -> Layout | None:
        """The layout of what a node computes; None if it does not compute each channel by itself."""
        op, first = node.op_type, node.input[0] if node.input else ""
        if op == "Conv":
            return self._of_conv(node)
        if op == "Div" and self.graph.scalar(node.input[1]) is None:
            return None  # zero by zero
        if op in OPERANDS:
            return self._of_operands(node)
        if op == "Concat":
            parts = [self._of(name) or () for name in node.input]
            joins = all(parts) and attribute(node, "axis") in (1, 1 - (self.graph.rank(first) or 0))
            return tuple(chain.from_iterable(parts)) if joins else None
        if op == "BatchNormalization":
            layout = self._of(first)
            rows = layout and all(self._is_row(node, i, layout, 0, fill) for i, fill in NEUTRAL.items())
            return layout if rows else None
        return self._of(first) if op in UNARY or self._is_spatial(node) else None

    def _is_spatial(self, node: NodeProto) -> bool:
        """True for a reduction, resampling or padding of the axes after the channels."""
        op, rank = node.op_type, self.graph.rank(node.input[0]) if node.input else None
        if rank is None:
            return False
        if op in SPATIAL_REDUCTIONS:
            axes = self.graph.axes(node) or ()
            return bool(axes) and attribute(node, "keepdims", 1) == 1 and min(a % rank for a in axes) > 1
        if op == "Resize" and not attribute(node, "axes") and not optional_input(node, 1):
            scales = self.graph.constant(optional_input(node, 2))
            return scales is not None and len(scales) == rank and bool((scales[:2] == 1).all())
        if op == "Pad" and len(node.input) in (2, 3):
            pads = self.graph.constant(node.input[1])
            return pads is not None and not pads.reshape(2, -1)[:, :2].any()
        return False

    def _of(self, tensor: str) -> Layout | None:
        """The layout of a computed tensor; a new fixed block if its channels come from elsewhere."""
        shape = self.graph.shape(tensor) or ()
        if len(shape) < 3 or not isinstance(shape[1], int) or self.graph.constant(tensor) is not None:
            return None
        if tensor not in self.layouts:
            self.layouts[tensor] = (_Block(shape[1], f"{tensor} has them from elsewhere"),)
        return self.layouts[tensor]

    def _of_conv(self, node: NodeProto) -> Layout | None:
        windows, source, bias = windows_of(self.graph, node), self._of(node.input[0]), optional_input(node, 2)
        if windows is None or source is None or (bias and self.graph.constant(bias) is None):
            return None
        if layout_obstacle(self.graph, node.input[1]) or self.kept.reason(node):
            return None
        groups, block = attribute(node, "group", 1), _Block(windows.out)
        if groups not in (1, windows.out) or (groups > 1 and groups != windows.channels):
            return None
        layout = (block,) if groups == 1 else source
        self.convs += [(node, block)] if groups == 1 else []
        self.depthwise += [node] if groups > 1 else []
        self.constants.append((node, 1, {0: layout} | ({1: source} if groups == 1 else {}), 0.0))
        self.constants += [(node, 2, {0: layout}, 0.0)] if bias else []
        return layout

    def _of_operands(self, node: NodeProto) -> Layout | None:
        """The layout of a sum or product of tensors of equal channels, rows of channels and scalars."""
        computed = [name for name in node.input if self.graph.constant(name) is None]
        layouts = [self._of(name) or () for name in computed]
        ranks = {self.graph.rank(name) or 0 for name in (*computed, node.output[0])}
        if not layouts or not all(layouts) or len(ranks) != 1:
            return None  # all of them constants, or channels that are not known
        first, rank = layouts[0], ranks.pop()
        if not all(_tie(first, other) for other in layouts[1:]):
            return None
        values = ((i, self.graph.constant(name)) for i, name in enumerate(node.input))
        rows = (self._is_row(node, i, first, v.ndim - rank + 1) for i, v in values if v is not None)
        return first if all(rows) else None

    def _is_row(self, node: NodeProto, index: int, layout: Layout, axis: int, fill: float = 0.0) -> bool:
        """True for a constant of one value, or of one for each channel along its axis `axis`."""
        value, size = self.graph.constant(node.input[index]), sum(block.size for block in layout)
        if value is None or value.size == 1:
            return value is not None
        self.constants.append((node, index, {axis: layout}, fill))
        is_row = axis >= 0 and value.size == size == value.shape[axis]
        return is_row and layout_obstacle(self.graph, node.input[index]) is None

    def limit(self, largest: int, facts: Mapping[str, TensorFacts]) -> None:
        """Fixes the channels of tensors of more elements; an axis of unknown size counts as one element."""
        for tensor, layout in self.layouts.items():
            known = facts.get(tensor) or self.graph.facts(tensor)
            if known is not None and known.elements > largest:
                _fix(layout, f"{tensor} has more than {largest} elements, for which no gain was measured")

    def keep_aligned(self, step: int) -> None:
        """Takes added channels back where a tensor of several parts would no longer be aligned."""
        parts, changed = [layout for layout in self.layouts.values() if len(layout) > 1], True
        while changed:
            changed = False
            for layout in parts:
                before, more = sum(b.size for b in layout), sum(b.root().more for b in layout)
                if more and math.gcd(before + more, step) < math.gcd(before, step):
                    _fix(layout, f"a Concat of {before} channels is aligned with them")
                    for block in layout:
                        block.root().more, changed = 0, True

    def pad(self) -> None:
        """Pads constants, and then gives all tensors with more channels another name."""
        graph, weights = self.graph, NewWeights(self.graph)
        for node, index, layouts, fill in self.constants:
            name = node.input[index]
            gaps = {axis: positions for axis, layout in layouts.items() if (positions := _gaps(layout))}
            if gaps:
                wide = partial(_padded, graph, name, gaps, fill)
                graph.set_input(node, index, weights.made((name, fill, str(gaps)), f"{name}/padded", wide))
        for node in self.depthwise:
            group = next(item for item in node.attribute if item.name == "group")
            group.i += len(_gaps(self.layouts[node.output[0]]))
        for tensor, layout in self.layouts.items():
            if any(block.root().more for block in layout):
                shape = list(graph.shape(tensor) or (None, None))
                shape[1] = sum(block.size + block.root().more for block in layout)
                padded = graph.tensor(f"{tensor}/padded", dtype=graph.dtype(tensor), shape=tuple(shape))
                graph.rename(tensor, padded)


def _fix(layout: Layout, obstacle: str) -> None:
    for block in layout:
        root = block.root()
        root.obstacle = root.obstacle or obstacle


def _tie(one: Layout, other: Layout) -> bool:
    """Ties the blocks of two layouts; False if they differ in size."""
    if [block.size for block in one] != [block.size for block in other]:
        return False
    for a, b in zip(one, other, strict=True):
        if (root := a.root()) is not (tied := b.root()):
            tied.tied, root.obstacle = root, root.obstacle or tied.obstacle
    return True


def _gaps(layout: Layout) -> list[int]:
    """The positions, as `numpy.insert` takes them, at which channels are added."""
    ends = accumulate(block.size for block in layout)
    return [end for end, block in zip(ends, layout, strict=True) for _ in range(block.root().more)]


def _padded(graph: GraphEditor, constant: str, gaps: Mapping[int, list[int]], fill: float) -> Array:
    value = graph.value(constant)
    for axis, positions in gaps.items():
        value = np.insert(value, positions, fill, axis)
    return value
