"""TF32 in an emulation: what a GPU makes of the FP32 operands of a MatMul, Gemm or Conv.

TensorRT lets Tensor Cores multiply FP32 matrices in TF32 unless it is told not to: operands keep 11
significant bits, as many as FP16 has, and FP32's range; sums are FP32. Measured on one H200
(TensorRT-RTX 1.6.1), random operands: relative L2 error 2.9e-4, which is two roundings to nearest of
2.1e-4 each. So an FP32 island round such a node has FP32 sums and range, and no better weights than
FP16 has. What reads dequantised operands is left alone: TensorRT runs it in INT8.

The rounding is Veltkamp's splitting (Dekker, "A floating-point technique for extending the available
precision", 1971):
with c = (2^13 + 1) x in FP32, c - (c - x) is x with 24 - 13 bits. Scaled by 2^-14, so that the largest
float does not overflow on the way.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.parser
from onnx import GraphProto, NodeProto, TensorProto, helper

from rewriter.facts import Facts
from rewriter.model import Model, walk_graphs

MULTIPLYING = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})

_ARRANGING = frozenset({"Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})

DOMAIN = "rewriter.tf32"

_SPLIT = 2.0**-14
_LEAST_IR = 8
"""Local functions."""

_ROUND = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    Round (x) => (y) {{
        small = Constant <value_float = {_SPLIT!r}> ()
        factor = Constant <value_float = {_SPLIT * (2.0**13 + 1)!r}> ()
        back = Constant <value_float = {1 / _SPLIT!r}> ()
        scaled = Mul (x, small)
        c = Mul (x, factor)
        low = Sub (c, scaled)
        high = Sub (c, low)
        y = Mul (high, back)
    }}"""


def multiply_in_tf32(emulated: Model, given: Model, facts: Facts) -> None:
    """Round the operands of every MatMul, Gemm, Conv and ConvTranspose that `given` computes in FP32.

    Args:
        emulated: What `retype` made of `given`; changed in place. It has the same nodes of these
            operators in the same order.
        facts: Of `given`.
    """
    used = False
    for scope, (source, target) in enumerate(
        zip(walk_graphs(given.proto.graph), walk_graphs(emulated.proto.graph), strict=True)
    ):
        known = facts.main | facts.scopes[scope]
        originals = [n for n in source.node if n.op_type in MULTIPLYING]
        copies = [n for n in target.node if n.op_type in MULTIPLYING]
        makers = {name: node for node in source.node for name in node.output}
        wide = [
            copy
            for node, copy in zip(originals, copies, strict=True)
            if (result := known.get(node.output[0])) is not None
            and result.dtype == TensorProto.FLOAT
            and not any(_is_dequantized(name, makers) for name in node.input[:2])
        ]
        if wide:
            used = True
            _round_operands(target, {id(node) for node in wide})
    if used:
        emulated.proto.ir_version = max(emulated.proto.ir_version, _LEAST_IR)
        emulated.proto.opset_import.add(domain=DOMAIN, version=1)
        emulated.proto.functions.append(
            onnx.parser.parse_function(_ROUND.replace("OPSET", str(emulated.opset)))
        )


def _is_dequantized(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """Whether a DequantizeLinear makes the tensor, through what only arranges or casts it."""
    node = makers.get(name)
    while node is not None and node.op_type in _ARRANGING:
        node = makers.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"


def _round_operands(graph: GraphProto, wide: set[int]) -> None:
    """Put a call of the function before each node of `wide`; a tensor is rounded once."""
    rounded: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        copy = node
        if id(node) in wide:
            copy = NodeProto.FromString(node.SerializeToString())
            for position, name in enumerate(node.input[:2]):
                if name not in rounded:
                    rounded[name] = f"{name}/tf32"
                    nodes.append(helper.make_node("Round", [name], [rounded[name]], domain=DOMAIN))
                copy.input[position] = rounded[name]
        nodes.append(copy)
    kept = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(kept)
