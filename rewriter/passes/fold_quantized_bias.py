"""fold-quantized-bias: replaces a dequantised int32 bias by a float constant."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.model import Array
from rewriter.passes.base import Change, Context, Event, GraphPass, Refusal

_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
"""ONNX Runtime's quantiser writes 16-bit QDQ pairs in its own domain, with the same arithmetic."""


@dataclass(frozen=True)
class FoldQuantizedBias(GraphPass):
    """TensorRT's parser takes INT8, INT4 and FP8 into DequantizeLinear, but not the int32 of a bias.

    ONNX Runtime's quantiser stores the bias of a Conv or Gemm as int32 with the scale (input scale
    x weight scale), per tensor or per axis. As all of it is constant, so is its float value.

    Declines:
        - int8 and smaller constants, which are weights that TensorRT runs quantised
        - an int32 input, scale or zero point that is computed; a zero point other than 0, which ONNX excludes
        - a scale that does not fit the axis, such as one of blocks
    """

    refittable = False
    example = """
         g (float[1,2,4,4] x, float[3,2,1,1] w) => (float[1,3,4,4] y)
        -<int32[3] q = {100, -20, 3}, float[3] scale = {0.5, 0.25, 0.125}> {
        -    b = DequantizeLinear<axis = 0>(q, scale)
        +<float[3] b = {50.0, -5.0, 0.375}> {
             y = Conv(x, w, b)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if node.op_type == "DequantizeLinear" and node.domain in _DOMAINS:
                operands = [graph.constant(name) for name in node.input if name]
                reason = _reason_against(graph, node, operands)
                if reason is None:
                    yield _fold(graph, node, *(value for value in operands[:2] if value is not None))
                elif reason:
                    yield Refusal(display_name(node), reason)


def _reason_against(graph: GraphEditor, node: NodeProto, operands: Sequence[Array | None]) -> str | None:
    """Returns why the node stays; "" if it is no such bias, None if it can be folded."""
    data, scale = operands[:2]
    if data is not None and data.dtype != np.int32:
        return "a quantised weight stays quantised: TensorRT runs it so"
    if data is None and graph.dtype(node.input[0]) != TensorProto.INT32:
        return ""
    if data is None or scale is None:
        computed = node.input[0 if data is None else 1]
        return f"{computed} is computed, so its value is not constant; TensorRT refuses int32 here"
    if any(zero_point is None or zero_point.any() for zero_point in operands[2:]):
        return "its zero point is computed, or is not 0"
    axis = attribute(node, "axis", 1)
    if scale.size > 1 and (not -data.ndim <= axis < data.ndim or scale.shape != (data.shape[axis],)):
        return f"its scale does not fit axis {axis} of {list(data.shape)}"
    return None


def _fold(graph: GraphEditor, node: NodeProto, data: Array, scale: Array) -> Change:
    """Replaces the node by its value: a float32 product, rounded to the scale's type as ONNX Runtime does."""
    sizes = [1] * data.ndim
    if scale.size > 1:
        sizes[attribute(node, "axis", 1)] = -1
    output = node.output[0]
    with np.errstate(over="ignore"):  # it overflows in ONNX Runtime, too
        value = (data.astype(np.float32) * scale.astype(np.float32).reshape(sizes)).astype(scale.dtype)
    constant = graph.add_constant(f"{output}/folded", value)
    graph.replace_all_uses_with(output, constant)
    if graph.is_output(output):
        copy = graph.make("Identity", [constant], [output], name=f"{display_name(node)}/Identity")
        graph.replace_producer(output, copy)
    else:
        graph.remove(node)
    return Change(display_name(node), f"int32 {node.input[0]} became a constant of {scale.dtype}")
