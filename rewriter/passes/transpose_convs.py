"""transpose-convs: replaces a Conv of stride 1 by the ConvTranspose that computes the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto

from rewriter.hazards.planning.costs.node_times import TYPICAL
from rewriter.ir.base import Change, Context, Event, Exactness, Kept, ModelPass, Refusal, Stage
from rewriter.ir.graph import GraphEditor, attribute, label, open_graphs
from rewriter.ir.graph.weights import NewWeights, layout_obstacle
from rewriter.ir.model import Model, facts
from rewriter.ir.patterns.windows import Windows, pads_of, windows_of
from rewriter.ir.plan import node_key

NEEDED_ANSWERS = {"conv-accumulation": "fp16", "conv-transpose-accumulation": "fp32"}
"""The answers of `rewriter probe` that the pass needs, by question."""

AXES = 2
"""Spatial axes of the Convs that were measured."""

WIDEST = 7
"""Largest window along an axis. An H200 did not load an engine with a ConvTranspose of 3 x 39 in FP16 before
an activation in FP32: cuDNN had no plan for it. No window between 7 and 39 was tried."""


@dataclass(frozen=True)
class TransposeConvs(ModelPass):
    """TensorRT-RTX sums an FP16 Conv in FP16 whatever reads it, and an FP16 ConvTranspose in FP32.

    At stride 1 both compute the same if the window is reversed and the channels of the weight are swapped:
    y[o] = sum over k of w[k] x[o + d k - p] is the ConvTranspose of w[K - 1 - k] with the padding d (K - 1)
    - p. The error falls to a third or less, in about the same time (docs/accuracy.md#convs-of-stride-1).
    Weights stay the same, bit for bit, so the pass runs before
    `mixed-precision`.

    It only works if `rewriter probe`, here or recorded, found that the target sums an FP16 Conv in FP16
    (conv-accumulation) and an FP16 ConvTranspose in FP32 (conv-transpose-accumulation). It does nothing in
    BF16, which was not measured.

    Skipped without a report: groups, strides, other than two spatial axes (not measured), computed weights,
    Convs below the bounds of the options. So are Convs that the plan keeps in FP32: they sum in FP32
    already, and an FP32 ConvTranspose is slower. A search runs the pass for each
    of its candidates.

    Options:
        depth: Least number of products in a sum (input channels times elements of the window). Shallower sums
            have little to gain, and many are slower as a ConvTranspose.
        work: Least work of a Conv, in MFLOP: 2 * depth * elements of the result. Below it a kernel is mostly
            launch overhead. An unknown batch counts as 1, unknown height and width as 64. Results of one
            place (channel attention) are transposed whatever their work.
        deep: Number of products from which the work does not matter, because their FP16 sums err most.

    Declines:
        - a Conv that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, or that belong to an enclosing graph
        - weights of a type that TensorRT has no product for
        - padding by more than the window reaches, and windows wider than 7
    """

    name = "transpose-convs"
    refittable = False
    stage = Stage.ADAPTING
    exactness = Exactness(
        1e-5,
        "ONNX Runtime adds in another order: 3.5e-6 measured on an RT-DETR, at most 6.8e-7 on four others",
    )
    depth: int = 256
    work: int = 64
    deep: int = 768
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,1,4,4] x, float[2] b) => (float[1,2,3,4] y)
        <float[2,1,2,1] w = {1.0, 2.0, 3.0, 4.0}> {
            y = Conv(x, w, b)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1,1,4,4] x, float[2] b) => (float[1,2,3,4] y)
        <float[1,2,2,1] turned = {2.0, 1.0, 4.0, 3.0}> {
            y = ConvTranspose<pads = [1, 0, 1, 0]>(x, turned, b)
        }"""
    example: ClassVar[Mapping[str, Any]] = {"depth": 1, "work": 0}

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        if not _gains(context):
            return
        plan = context.plan
        kept = {decision.key for decision in plan.decisions} if plan is not None else set()
        graphs = list(enumerate(open_graphs(model, facts.infer(model), tag=self.name)))
        for scope, graph in reversed(graphs):  # an outer commit copies inner graphs, so these come first
            weights = NewWeights(graph)
            with graph:
                for node in graph.nodes:
                    conv = _conv(graph, node)
                    if conv is None or not self._pays(graph, conv):
                        continue
                    reason = _reason_against(graph, conv, context.kept)
                    if reason is not None:
                        yield Refusal(label(node), f"it stays a Conv: {reason}")
                    elif node_key(scope, node) not in kept:
                        yield _transpose(graph, conv, weights)

    def _pays(self, graph: GraphEditor, conv: _Conv) -> bool:
        if conv.depth < self.depth:
            return False
        places = _places(graph, conv)
        return conv.depth >= self.deep or places == 1 or _flop(graph, conv, places) >= self.work * 1e6


def _gains(context: Context) -> bool:
    lowered = context.plan is None or context.plan.precision == "fp16"
    return lowered and all(
        context.target.answers.get(name) == value for name, value in NEEDED_ANSWERS.items()
    )


@dataclass(frozen=True)
class _Conv:
    """A dense Conv of stride 1 with a constant weight [channels, read, *kernel].

    Attributes:
        pads: At the beginning of each axis, then at the end of each.
    """

    node: NodeProto
    windows: Windows
    pads: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of products in each sum."""
        return self.windows.channels * math.prod(self.windows.kernel)

    @property
    def transposed_pads(self) -> list[int]:
        """Padding of the ConvTranspose, which accepts none below zero."""
        return [r - p for r, p in zip(self.windows.reach * 2, self.pads, strict=True)]


def _conv(graph: GraphEditor, node: NodeProto) -> _Conv | None:
    """Returns the node as a Conv that may be transposed; None for other nodes."""
    windows = windows_of(graph, node)
    if windows is None or windows.strides != (1,) * AXES or attribute(node, "group", 1) != 1:
        return None
    pads = pads_of(node, windows)
    assert pads is not None  # known at stride 1
    return _Conv(node, windows, pads)


def _places(graph: GraphEditor, conv: _Conv) -> int:
    """Returns height times width of the result."""
    sizes = (graph.shape(conv.node.output[0]) or (None,) * (AXES + 2))[2:]
    return math.prod(size if isinstance(size, int) else TYPICAL for size in sizes)


def _flop(graph: GraphEditor, conv: _Conv, places: int) -> float:
    """Returns the floating-point operations of one inference."""
    batch = (graph.shape(conv.node.output[0]) or (None,))[0]
    return 2.0 * conv.depth * conv.windows.out * places * (batch if isinstance(batch, int) else 1)


def _reason_against(graph: GraphEditor, conv: _Conv, kept: Kept) -> str | None:
    if (reason := kept.reason(conv.node)) is not None:
        return reason
    if max(conv.windows.kernel) > WIDEST:
        sizes = "x".join(map(str, conv.windows.kernel))
        return f"a ConvTranspose with a window of {sizes} may build and not load"
    if min(conv.transposed_pads) < 0:
        return f"it pads by more than its window reaches ({list(conv.pads)})"
    return layout_obstacle(graph, conv.node.input[1])


def _transpose(graph: GraphEditor, conv: _Conv, weights: NewWeights) -> Change:
    """Replaces the Conv by the ConvTranspose."""
    node = conv.node
    inputs = [node.input[0], _turned(node.input[1], weights), *node.input[2:]]
    made = graph.make("ConvTranspose", inputs, node.output, **_layout(conv))
    made.name = node.name or made.name  # plans and options of the user refer to the name
    graph.substitute(node.output[0], made)
    return Change(label(node), "became a ConvTranspose, which sums in FP32")


def _layout(conv: _Conv) -> dict[str, Any]:
    return {
        "kernel_shape": list(conv.windows.kernel),
        "strides": list(conv.windows.strides),
        "dilations": list(conv.windows.dilations),
        "pads": conv.transposed_pads,
        "group": 1,
    }


def _turned(name: str, weights: NewWeights) -> str:
    """Returns the name of the weight with channels swapped and window reversed."""
    return weights.changed(
        name, "transposed", lambda value: np.flip(value, tuple(range(2, value.ndim))).swapaxes(0, 1)
    )
