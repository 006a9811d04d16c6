"""fold-quantized-bias: replaces a dequantised int32 bias by a float constant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.ir.base import Change, Context, Event, GraphPass, Refusal
from rewriter.ir.graph import GraphEditor, attribute, label
from rewriter.ir.model import Array

_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
"""ONNX Runtime's quantiser writes 16-bit QDQ pairs in its own domain, with the same arithmetic."""


@dataclass(frozen=True)
class FoldQuantizedBias(GraphPass):
    """TensorRT's parser takes INT8, INT4 and FP8 into DequantizeLinear, but not the int32 of a bias.

    ONNX Runtime's quantiser stores the bias of a Conv or Gemm as int32 with the scale (input scale
    x weight scale), per tensor or per axis. As all of it is constant, so is its float value:
    (x - zero point) * scale, rounded once to float32 as DequantizeLinear does.

    Declines:
        - int8 and smaller constants, which are weights that TensorRT runs quantised
        - an int32 input, scale or zero point that is computed
        - a scale that does not fit the axis; a bias quantised in blocks
    """

    name = "fold-quantized-bias"
    refittable = False
    before = """
        g (float[1,2,4,4] x, float[3,2,1,1] w) => (float[1,3,4,4] y)
        <int32[3] q = {100, -20, 3}, float[3] scale = {0.5, 0.25, 0.125}> {
            b = DequantizeLinear<axis = 0>(q, scale)
            y = Conv(x, w, b)
        }"""
    after = """
        g (float[1,2,4,4] x, float[3,2,1,1] w) => (float[1,3,4,4] y)
        <float[3] b = {50.0, -5.0, 0.375}> {
            y = Conv(x, w, b)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if node.op_type == "DequantizeLinear" and node.domain in _DOMAINS:
                event = _fold(graph, node)
                if event is not None:
                    yield event


def _fold(graph: GraphEditor, node: NodeProto) -> Event | None:
    operands = [graph.constant(name) if name else None for name in node.input]
    reason = _reason_against(graph, node, operands)
    if reason is not None:
        return Refusal(label(node), reason) if reason else None
    data, scale = operands[0], operands[1]
    assert data is not None and scale is not None
    zero_point = operands[2] if len(operands) > 2 else None
    axis = int(attribute(node, "axis", 1))
    scale_of_each, zero_of_each = (_spread(v, data, axis) for v in (scale, zero_point))
    if scale_of_each is None or zero_of_each is None:
        return Refusal(label(node), f"its scale does not fit axis {axis} of {list(data.shape)}")
    _replace(graph, node, _dequantized(data, scale_of_each, zero_of_each))
    return Change(label(node), f"int32 {node.input[0]} became a constant of {scale.dtype}")


def _reason_against(graph: GraphEditor, node: NodeProto, operands: list[Array | None]) -> str | None:
    """Returns why the node stays; "" if it is no such bias, None if it can be folded."""
    data = operands[0]
    if data is not None and data.dtype != np.int32:
        return "a quantised weight stays quantised: TensorRT runs it so"
    if data is None and graph.dtype(node.input[0]) != TensorProto.INT32:
        return ""
    missing = [n for n, value in zip(node.input, operands, strict=True) if n and value is None]
    if missing:
        return f"{missing[0]} is computed, so its value is not constant; TensorRT refuses int32 here"
    if attribute(node, "block_size", 0):
        return "it is quantised in blocks, and no bias is"
    return None


def _spread(operand: Array | None, data: Array, axis: int) -> Array | None:
    """Reshapes a scale or zero point so that it broadcasts over `data`; None if it does not fit.

    One element counts for the whole tensor, as in ONNX Runtime; a vector runs along `axis`.
    """
    if operand is None:
        return np.zeros((), np.int32)
    if operand.size == 1:
        return operand.reshape(())
    if not -data.ndim <= axis < data.ndim or operand.shape != (data.shape[axis],):
        return None
    shape = [1] * data.ndim
    shape[axis] = operand.size
    return operand.reshape(shape)


def _dequantized(data: Array, scale: Array, zero_point: Array) -> Array:
    """Computes (data - zero point) * scale: int32, then one float32 product, rounded to the scale's type.

    Source: ONNX's DequantizeLinear and the loop in ONNX Runtime's CPU kernel.
    """
    with np.errstate(over="ignore"):  # int32 differences wrap and products overflow in ONNX Runtime, too
        centred = data - zero_point.astype(np.int32)
        product: Array = centred.astype(np.float32) * scale.astype(np.float32)
        return product.astype(scale.dtype)


def _replace(graph: GraphEditor, node: NodeProto, value: Array) -> None:
    output = node.output[0]
    constant = graph.add_constant(f"{output}/folded", value)
    graph.redirect(output, constant)
    if graph.is_output(output):
        graph.substitute(output, graph.make("Identity", [constant], [output], name=f"{label(node)}/Identity"))
    else:
        graph.remove(node)
