"""transpose-convs: a Conv of stride 1 becomes the ConvTranspose that computes the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.model import facts
from rewriter.base import Change, Context, Event, Exactness, Kept, ModelPass, Refusal, Requires, Stage
from rewriter.planning.costs.node_times import TYPICAL
from rewriter.graph import GraphEditor, attribute, label, made_by, open_graphs
from rewriter.model import Model, walk_graphs
from rewriter.planning.planner import node_key
from rewriter.patterns.windows import Windows, pads_of, reason_in_weight, windows_of

WANTED = {"conv-accumulation": "fp16", "conv-transpose-accumulation": "fp32"}
"""What `rewriter probe` must have found on the target, by question."""

AXES = 2
"""Spatial axes of the Convs that were measured."""


@dataclass(frozen=True)
class TransposeConvs(ModelPass):
    """TensorRT-RTX sums an FP16 Conv in FP16 whatever reads it, and an FP16 ConvTranspose in FP32.

    At stride 1 both compute the same if the window is turned round and the channels of the weight change
    places: y[o] = sum over k of w[k] x[o + d k - p] is the ConvTranspose of w[K - 1 - k] with the padding
    d (K - 1) - p. Measured on one H200 with TensorRT-RTX 1.6.1, relative error in FP16 and time, Conv first:
    3x3, 64 channels at 56x56 9.0e-4 and 2.9e-4 in 9.0 and 9.8 us; 3x3, 512 channels at 32x32 2.45e-3 and
    2.9e-4 in 18.9 and 19.5 us; 1x1, 1024 to 256 channels at 14x14 9.0e-4 and 2.9e-4 in 11.7 and 10.4 us.
    docs/accuracy.md has whole networks. Weights stay what they are, bit for bit, so it stands behind
    `compensate-rounding` and before `mixed-precision`.

    It does nothing unless `rewriter probe`, here or recorded, found that the target sums an FP16 Conv in FP16
    (conv-accumulation) and an FP16 ConvTranspose in FP32 (conv-transpose-accumulation); nor in BF16, which
    was not measured.

    Left alone without a word: groups, strides, other than two spatial axes (not measured), computed weights,
    Convs below the options' bounds or in FP32 by the plan: those sum in FP32, and a ConvTranspose in FP32
    takes longer (on that GPU a NAFNet in FP32 took 838 us with Convs, 930 us with 33 ConvTransposes). For
    what a search puts in FP32 the pass runs once more behind it.

    Options:
        depth: Least number of products in a sum (input channels times elements of the window). With all
            Convs changed, NAFNet was 19 % slower, for its sums of 32 to 128 products; with those of 256 and
            more it was 6 % faster, and ResNet 2 %.
        work: Least work of a Conv, in MFLOP: 2 * depth * elements of the result. MobileNetV2, whose Convs of
            that depth have 9 to 40, was 10 % slower (depth 144 and more); ResNet's have 103 to 231. Of sizes
            that are not known the batch counts as 1, height and width as 64. Results of one place (NAFNet's
            and other channel attention) are done whatever their work.
        deep: Number of products from which the work does not matter: FP16 sums of 768 err by 7.7e-4.

    Declines:
        - a Conv that --keep-fp32, --keep-fp32-op or an edited plan names
        - weights that are quantised, or that belong to a graph around this one
        - weights of a type that TensorRT has no product for
        - padding by more than the window reaches
    """

    name = "transpose-convs"
    stage = Stage.FITTING
    requires = Requires(after=("compensate-rounding",))
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
        for scope, graph in reversed(graphs):  # a commit copies the graphs inside: they come first
            graph.refresh()
            weights: dict[str, str] = {}
            for node in graph.nodes:
                conv = _conv(graph, node)
                if conv is None or not self._pays(graph, conv):
                    continue
                reason = _reason_against(graph, conv, context.kept)
                if reason is not None:
                    yield Refusal(label(node), f"it stays a Conv: {reason}")
                elif node_key(scope, node) not in kept:
                    yield _transpose(graph, conv, weights)
            graph.commit()

    def _pays(self, graph: GraphEditor, conv: _Conv) -> bool:
        if conv.depth < self.depth:
            return False
        places = _places(graph, conv)
        return conv.depth >= self.deep or places == 1 or _flop(graph, conv, places) >= self.work * 1e6


def _gains(context: Context) -> bool:
    lowered = context.plan is None or context.plan.precision == "fp16"
    return lowered and all(context.target.answers.get(name) == value for name, value in WANTED.items())


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
        """Products in each sum."""
        return self.windows.channels * math.prod(self.windows.kernel)

    @property
    def transposed_pads(self) -> list[int]:
        """Those of the ConvTranspose; what is below zero it does not take."""
        return [r - p for r, p in zip(self.windows.reach * 2, self.pads, strict=True)]


def _conv(graph: GraphEditor, node: NodeProto) -> _Conv | None:
    """The node as a Conv that may be transposed; None for other nodes."""
    windows = windows_of(graph, node)
    if windows is None or windows.strides != (1,) * AXES or attribute(node, "group", 1) != 1:
        return None
    pads = pads_of(node, windows)
    assert pads is not None  # known at stride 1
    return _Conv(node, windows, pads)


def _places(graph: GraphEditor, conv: _Conv) -> int:
    """Height times width of the result."""
    sizes = (graph.shape(conv.node.output[0]) or (None,) * (AXES + 2))[2:]
    return math.prod(size if isinstance(size, int) else TYPICAL for size in sizes)


def _flop(graph: GraphEditor, conv: _Conv, places: int) -> float:
    """Floating-point operations of one inference."""
    batch = (graph.shape(conv.node.output[0]) or (None,))[0]
    return 2.0 * conv.depth * conv.windows.out * places * (batch if isinstance(batch, int) else 1)


def _reason_against(graph: GraphEditor, conv: _Conv, kept: Kept) -> str | None:
    option = next(kept.options(conv.node), None)
    if option is not None:
        return f"it is kept in FP32 by {option}"
    if min(conv.transposed_pads) < 0:
        return f"it pads by more than its window reaches ({list(conv.pads)})"
    return reason_in_weight(graph, conv.node.input[1])


def _transpose(graph: GraphEditor, conv: _Conv, weights: dict[str, str]) -> Change:
    """Put the ConvTranspose in the place of the Conv; `weights`: the turned ones, by the name of a Conv's."""
    node = conv.node
    inputs = [node.input[0], _turned(graph, node.input[1], weights), *node.input[2:]]
    made = graph.make("ConvTranspose", inputs, node.output, **_layout(conv))
    made.name = node.name or made.name  # a plan, and the user, go on calling it so
    graph.substitute(node.output[0], made)
    return Change(label(node), "became a ConvTranspose, which sums in FP32")


def restore_in_fp32(model: Model) -> None:
    """Make the ConvTransposes that this pass made Convs again where they are FP32, in place.

    A search has types tried on one model: as an engine, a plan is what the pass gives for it.
    """
    if not any(_is_made(node) for graph in walk_graphs(model.proto.graph) for node in graph.node):
        return
    for graph in reversed(open_graphs(model, facts.infer(model))):
        graph.refresh()
        weights: dict[str, str] = {}
        for node in graph.nodes:
            if _is_made(node) and graph.dtype(node.input[1]) == TensorProto.FLOAT:
                _restore(graph, node, weights)
        graph.commit()


def _is_made(node: NodeProto) -> bool:
    """Whether it is a ConvTranspose of this pass."""
    return node.op_type == "ConvTranspose" and made_by(node, (TransposeConvs.name,))


def _restore(graph: GraphEditor, node: NodeProto, weights: dict[str, str]) -> None:
    kernel = attribute(node, "kernel_shape")
    reach = [d * (k - 1) for d, k in zip(attribute(node, "dilations"), kernel, strict=True)]
    layout = {name: attribute(node, name) for name in ("kernel_shape", "strides", "dilations", "group")}
    pads = [r - p for r, p in zip(reach * 2, attribute(node, "pads"), strict=True)]
    inputs = [node.input[0], _turned(graph, node.input[1], weights), *node.input[2:]]
    made = graph.make("Conv", inputs, node.output, pads=pads, **layout)
    made.name = node.name or made.name
    graph.substitute(node.output[0], made)


def _layout(conv: _Conv) -> dict[str, Any]:
    return {
        "kernel_shape": list(conv.windows.kernel),
        "strides": list(conv.windows.strides),
        "dilations": list(conv.windows.dilations),
        "pads": conv.transposed_pads,
        "group": 1,
    }


def _turned(graph: GraphEditor, name: str, weights: dict[str, str]) -> str:
    """Name of the weight with its channels exchanged, its window turned round; shared as the one given is."""
    if name not in weights:
        value = graph.constant(name)
        assert value is not None, name  # `_conv` asked
        turned = np.flip(value, tuple(range(2, value.ndim))).swapaxes(0, 1)
        weights[name] = graph.add_constant(f"{name}/transposed", np.ascontiguousarray(turned))
    return weights[name]
