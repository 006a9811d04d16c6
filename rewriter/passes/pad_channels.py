"""pad-channels: fills the channels between Convs up to a multiple of 16 with zeros."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Kept, Refusal
from rewriter.ir.graph import GraphEditor, attribute, label
from rewriter.ir.graph.ops import ELEMENTWISE, SCALING, SUMS
from rewriter.ir.graph.weights import NewWeights, layout_obstacle
from rewriter.ir.model import STANDARD_DOMAINS, Array
from rewriter.ir.model.graphs import reads
from rewriter.passes.algorithms.windows import windows_of

UNARY = (ELEMENTWISE - SCALING - SUMS - {"Pow", "Reciprocal", "Log", "Min", "Max", "PRelu"}) | {
    "Identity",
    "Dropout",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "GlobalMaxPool",
}
"""Compute each channel by itself, and give a finite value for a channel of zeros."""

SPATIAL_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum", "ReduceMax"})

ROWS = SUMS | SCALING | {"PRelu"}
"""May have a constant operand with a value for each channel."""

NEUTRAL = (0.0, 0.0, 0.0, 1.0)
"""Scale, bias, mean and variance of a BatchNormalization for a channel of zeros."""


@dataclass(frozen=True)
class PadChannels(GraphPass):
    """TensorRT-RTX has no fast kernel for a Conv whose channels are no multiple of 16.

    A pointwise Conv of 90 channels needs 8.4 us, and one of 96 needs 2.9; 3x3 Convs of 44 and 48 channels
    need 12.6 and 4.7, and Xception's 728 channels 9.1 instead of 4.7 for 736 (docs/accuracy.md#channels). So
    weights get rows of zeros, the tensors between Convs more channels, and the Convs that read them columns
    of zeros. An added channel is finite and meets zeros alone, so that all other channels keep their values.
    The new weights stay in memory until they are lowered, also those of external data.

    Channels go from a Conv of one group through activations, poolings, sums and products, depthwise Convs,
    BatchNormalizations, Concats and Resizes.

    Skipped without a report: numbers of channels up to `least`, quantised or computed weights.

    Options:
        step: What numbers of channels become multiples of.
        least: Numbers of channels up to this one stay: 3x3 Convs of 32 channels are slower than of 24.

    Declines:
        - channels that any other operator reads, or that are handed out
        - a Conv that --keep-fp32, --keep-fp32-op or an edited plan names
    """

    step: int = 16
    least: int = 32

    name = "pad-channels"
    refittable = False
    exactness = Exactness(1e-5, "ONNX Runtime may add the same products in another order, with more zeros")
    example: ClassVar[Mapping[str, Any]] = {"step": 2, "least": 1}
    before = """
        g (float[N,1,2,2] x) => (float[N,1,2,2] y)
        <float[3,1,1,1] a = {1, 2, 3}, float[3] bias = {4, 5, 6}, float[1,3,1,1] b = {7, 8, 9}> {
            wide = Conv(x, a, bias)
            positive = Relu(wide)
            y = Conv(positive, b)
        }"""
    after = """
        g (float[N,1,2,2] x) => (float[N,1,2,2] y)
        <float[4,1,1,1] a = {1, 2, 3, 0}, float[4] bias = {4, 5, 6, 0}, float[1,4,1,1] b = {7, 8, 9, 0}> {
            wide = Conv(x, a, bias)
            positive = Relu(wide)
            y = Conv(positive, b)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        channels = _Channels(graph, context.kept)
        for node in graph.nodes:
            channels.visit(node)
        reasons = {channels.root(block): reason for block, reason in reversed(channels.fixed.items())}
        sizes = dict[int, int]()
        for block, conv in channels.convs.items():
            size, root = channels.sizes[block], channels.root(block)
            if size <= self.least or size % self.step == 0:
                continue
            if root in reasons:
                yield Refusal(label(conv), f"it keeps its {size} channels: {reasons[root]}")
                continue
            sizes[root] = -(-size // self.step) * self.step
            yield Change(label(conv), f"{sizes[root]} channels in place of {size}")
        if sizes:
            _Padding(graph, channels, sizes).write()


Layout = tuple[int, ...]
"""The blocks of channels of a tensor, in their order: a Concat has those of all its inputs."""


@dataclass
class _Channels:
    """Divides the channels of all tensors into blocks, and ties those that have to have one size.

    Attributes:
        layouts: Of each tensor whose channels are known.
        sizes: Number of channels of each block. `tied`: another block of the same size, or itself.
        fixed: Blocks that keep their size, with the reason. `convs`: the Conv that each block comes from.
        nodes: The nodes that can be given more channels, in topological order.
    """

    graph: GraphEditor
    kept: Kept
    layouts: dict[str, Layout] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    tied: list[int] = field(default_factory=list)
    fixed: dict[int, str] = field(default_factory=dict)
    convs: dict[int, NodeProto] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)

    def root(self, block: int) -> int:
        """The block that stands for all that are tied to this one."""
        while self.tied[block] != block:
            self.tied[block] = block = self.tied[self.tied[block]]
        return block

    def visit(self, node: NodeProto) -> None:
        """Gives the result of a node its layout, or fixes the layouts of all that it reads."""
        layout = self._result(node) if node.domain in STANDARD_DOMAINS and len(node.output) == 1 else None
        if layout is None:
            for name in reads(node):
                self._fix(self.layouts.get(name, ()), f"{label(node)} reads {name}")
            return
        self.nodes.append(node)
        self.layouts[node.output[0]] = layout
        if self.graph.is_output(node.output[0]):
            self._fix(layout, f"{node.output[0]} is an output")

    def _result(self, node: NodeProto) -> Layout | None:
        """The layout of what a node computes; None if it does not compute each channel by itself."""
        op, first = node.op_type, node.input[0] if node.input else ""
        if op == "Conv":
            return self._of_conv(node)
        if op == "Div" and self.graph.scalar(node.input[1]) is None:
            return None  # zero by zero
        if op in SUMS | SCALING:
            return self._of_operands(node)
        if op == "Concat":
            parts = [self._of(name) or () for name in node.input]
            joins = all(parts) and attribute(node, "axis") in (1, 1 - (self.graph.rank(first) or 0))
            return tuple(chain.from_iterable(parts)) if joins else None
        if op in {"BatchNormalization", "PRelu"}:
            rows = all(self._is_row(first, name, op == "BatchNormalization") for name in node.input[1:])
            return self._of(first) if rows else None
        return self._of(first) if op in UNARY or self._is_spatial(node) else None

    def _is_spatial(self, node: NodeProto) -> bool:
        """True for a reduction, resampling or padding of the axes after the channels."""
        op, rank = node.op_type, self.graph.rank(node.input[0]) if node.input else None
        if rank is None:
            return False
        if op in SPATIAL_REDUCTIONS:
            axes = self.graph.axes(node) or ()
            return bool(axes) and attribute(node, "keepdims", 1) == 1 and min(a % rank for a in axes) > 1
        if op == "Resize":
            scales = self.graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
            return scales is not None and len(scales) == rank and bool((scales[:2] == 1).all())
        if op == "Pad" and len(node.input) in (2, 3):
            pads = self.graph.constant(node.input[1])
            return pads is not None and not pads.reshape(2, -1)[:, :2].any()
        return False

    def _of(self, tensor: str) -> Layout | None:
        """The layout of a computed tensor; a new fixed block if its channels come from elsewhere."""
        shape = self.graph.shape(tensor)
        if (
            shape is None
            or len(shape) < 3
            or not isinstance(shape[1], int)
            or self.graph.constant(tensor) is not None
        ):
            return None
        if tensor not in self.layouts:
            self.layouts[tensor] = self._new(shape[1])
            self._fix(self.layouts[tensor], f"{tensor} has them from elsewhere")
        return self.layouts[tensor]

    def _new(self, size: int) -> Layout:
        self.tied.append(len(self.tied))
        self.sizes.append(size)
        return (len(self.tied) - 1,)

    def _fix(self, layout: Layout, reason: str) -> None:
        for block in layout:
            self.fixed.setdefault(block, reason)

    def _of_conv(self, node: NodeProto) -> Layout | None:
        windows, source = windows_of(self.graph, node), self._of(node.input[0])
        bias = node.input[2] if len(node.input) > 2 else ""
        if windows is None or source is None or (bias and self.graph.constant(bias) is None):
            return None
        if layout_obstacle(self.graph, node.input[1]) or self.kept.reason(node):
            return None
        groups = attribute(node, "group", 1)
        if groups == 1:
            self.convs[len(self.tied)] = node
            return self._new(windows.out)
        return source if groups == windows.out == windows.channels else None

    def _of_operands(self, node: NodeProto) -> Layout | None:
        """The layout of a sum or product of tensors of equal channels, rows of channels and scalars."""
        computed = [name for name in node.input if self.graph.constant(name) is None]
        layouts = [self._of(name) or () for name in computed]
        if not all(layouts) or len({self.graph.rank(name) for name in computed}) != 1:
            return None
        first, *others = layouts
        for other in others:
            if not self._tie(first, other):
                return None
        rows = (name for name in node.input if name not in computed and self.graph.scalar(name) is None)
        return first if all(self._is_row(computed[0], name) for name in rows) else None

    def _tie(self, one: Layout, other: Layout) -> bool:
        if [self.sizes[block] for block in one] != [self.sizes[block] for block in other]:
            return False
        for a, b in zip(one, other, strict=True):
            self.tied[self.root(a)] = self.root(b)
        return True

    def _is_row(self, tensor: str, constant: str, vector: bool = False) -> bool:
        """True for a constant of one value, or one for each channel: a vector, or as Add broadcasts it."""
        value, shape = self.graph.constant(constant), self.graph.shape(tensor)
        if value is None or shape is None or layout_obstacle(self.graph, constant):
            return False
        axis = 0 if vector else value.ndim - len(shape) + 1
        return value.size == 1 or (axis >= 0 and value.size == shape[1] == value.shape[axis])


@dataclass
class _Padding:
    """Pads weights and constants; `sizes` are the new numbers of channels, by the root of a block."""

    graph: GraphEditor
    channels: _Channels
    sizes: dict[int, int]

    def __post_init__(self) -> None:
        self.weights = NewWeights(self.graph)

    def write(self) -> None:
        """Gives all nodes their new constants, and then all tensors with more channels a new name."""
        graph = self.graph
        for node in self.channels.nodes:
            self._write(node)
        for tensor, layout in self.channels.layouts.items():
            if self._grows(layout):
                first, _, *others = graph.shape(tensor) or ()
                shape = (first, self._places(layout)[1], *others)
                graph.rename(tensor, graph.tensor(f"{tensor}/padded", dtype=graph.dtype(tensor), shape=shape))

    def _write(self, node: NodeProto) -> None:
        layouts, made = self.channels.layouts, self.channels.layouts[node.output[0]]
        if node.op_type == "Conv":
            depthwise = attribute(node, "group", 1) > 1
            self._pad(node, 1, {0: made} if depthwise else {0: made, 1: layouts[node.input[0]]})
            if len(node.input) > 2 and node.input[2]:
                self._pad(node, 2, {0: made})
            for item in node.attribute:
                if item.name == "group" and depthwise:
                    item.i = self._places(made)[1]
        elif node.op_type == "BatchNormalization":
            for index, fill in enumerate(NEUTRAL, start=1):
                self._pad(node, index, {0: made}, fill)
        elif node.op_type in ROWS:
            rank = self.graph.rank(node.output[0]) or 0
            for index, name in enumerate(node.input):
                value = self.graph.constant(name)
                if value is not None and value.size > 1:
                    self._pad(node, index, {value.ndim - rank + 1: made})

    def _pad(self, node: NodeProto, index: int, layouts: Mapping[int, Layout], fill: float = 0.0) -> None:
        """Lets a node read a constant whose axes have the channels of the layouts."""
        name = node.input[index]
        places = {axis: self._places(layout) for axis, layout in layouts.items() if self._grows(layout)}
        if not places or self.graph.value(name).size == 1:
            return

        def wide() -> Array:
            value = self.graph.value(name)
            for axis, (where, count) in places.items():
                old, shape = value, list(value.shape)
                shape[axis] = count
                value = np.full(shape, fill, old.dtype)
                value[(slice(None),) * axis + (where,)] = old
            return value

        key = (name, *((axis, count, where.tobytes()) for axis, (where, count) in places.items()))
        self.graph.set_input(node, index, self.weights.made(key, f"{name}/padded", wide))

    def _grows(self, layout: Layout) -> bool:
        return any(self.channels.root(block) in self.sizes for block in layout)

    def _places(self, layout: Layout) -> tuple[Array, int]:
        """The new places of the old channels, and the new number of channels."""
        places, count = list[Array](), 0
        for block in layout:
            size = self.channels.sizes[block]
            places.append(np.arange(count, count + size))
            count += self.sizes.get(self.channels.root(block), size)
        return np.concatenate(places), count
