"""unfold-group-norm: a GroupNorm without SiLU becomes LayerNormalization over the elements of each group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires
from rewriter.ir.graph import GraphEditor, attribute, is_op, label
from rewriter.ir.graph.match import other_operand
from rewriter.ir.graph.ops import RESHAPES

ACTIVATIONS = ("Sigmoid", "Swish")


@dataclass(frozen=True)
class UnfoldGroupNorm(GraphPass):
    """TensorRT-RTX 1.6.1 has no kernel for some GroupNorms alone, such as those before attention, on Hopper.

    Such an engine is built and does not load. With these norms as LayerNormalization it does: the decoder of
    a latent diffusion model takes 448 us, its UNet 1028 (one H100; with all norms so 574 and 1123, with
    all norms in FP32 490 and 1271). One norm of 256 channels at 32 x 32 after a Conv takes 32.2 us instead of
    38.4. A GroupNorm with SiLU has a kernel that loads, and is 6 to 22 % faster with what is around it.

    Exporters write GroupNorm as InstanceNormalization, of scale 1 and bias 0, between two Reshapes: its rows
    are groups. LayerNormalization over the last of its three axes is the same.

    Declines:
        - a norm that SiLU follows
        - rows of unknown length
    """

    name = "unfold-group-norm"
    requires = Requires(opset=17)
    exactness = Exactness(1e-5, "sums of FP32 in another order")
    before = """
        g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <int64[3] groups = {0, 2, -1}, int64[4] whole = {1, 4, 2, 2},
         float[2] one = {1, 1}, float[2] zero = {0, 0}, float[4,1,1] scale = {1, 2, 3, 4}> {
            rows = Reshape(x, groups)
            norm = InstanceNormalization<epsilon = 0.000001>(rows, one, zero)
            image = Reshape(norm, whole)
            y = Mul(image, scale)
        }"""
    after = """
        g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <int64[3] groups = {0, 2, -1}, int64[4] whole = {1, 4, 2, 2},
         float[8] ones = {1, 1, 1, 1, 1, 1, 1, 1}, float[4,1,1] scale = {1, 2, 3, 4}> {
            rows = Reshape(x, groups)
            norm = LayerNormalization<epsilon = 0.000001>(rows, ones)
            image = Reshape(norm, whole)
            y = Mul(image, scale)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        scales: dict[tuple[int, int | None], str] = {}
        for node in graph.nodes:
            if not is_op(node, "InstanceNormalization") or not _normalises_rows(graph, node):
                continue
            rows, result = node.input[0], node.output[0]
            length = (graph.shape(rows) or (None,))[-1]
            if _activated(graph, result):
                yield Refusal(label(node), "SiLU follows: TensorRT has one kernel for both")
            elif not isinstance(length, int):
                yield Refusal(label(node), "the number of elements of a group is not known")
            else:
                key = (length, graph.dtype(rows))
                if key not in scales:
                    scales[key] = graph.add_constant(f"{result}/ones", np.ones(length), like=rows)
                # ONNX Runtime's FP16 kernel is wrong for a scale of one element, which ONNX allows
                fields = {"name": node.name, "axis": -1, "epsilon": attribute(node, "epsilon", 1e-5)}
                norm = graph.make("LayerNormalization", [rows, scales[key]], [result], **fields)
                graph.substitute(result, norm)
                yield Change(label(node), "a GroupNorm became LayerNormalization over its groups")


def _normalises_rows(graph: GraphEditor, node: NodeProto) -> bool:
    """True for [N, G, L] with scale 1 and bias 0."""
    scale, bias = (graph.constant(name) for name in node.input[1:3])
    plain = scale is not None and bias is not None and bool((scale == 1).all() and (bias == 0).all())
    return plain and graph.rank(node.input[0]) == 3


def _activated(graph: GraphEditor, tensor: str) -> bool:
    """True if SiLU reads a tensor, through views, and through a scale and a bias for each channel."""
    while (reader := graph.only_consumer(tensor)) is not None:
        other = other_operand(reader, tensor) if is_op(reader, "Mul", "Add") else None
        if not is_op(reader, *RESHAPES) and (other is None or graph.constant(other) is None):
            break
        tensor = reader.output[0]
    return any(is_op(reader, *ACTIVATIONS) for reader in graph.consumers(tensor))
