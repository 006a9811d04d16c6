"""TF32 in an emulation: what FP32 products of matrices do on Tensor Cores unless TF32 is switched off.

Their operands are rounded to 10 bits behind the leading one, as FP16 has them, with FP32's exponents; sums
are FP32. Measured on one H200 (TensorRT-RTX 1.6.1): a relative error of 2.9e-4 for a MatMul or Conv of random
FP32 operands, which is sqrt(2) times 2.1e-4, the error of one rounding to 11 bits (see `accumulate`). So an
FP32 island round such a node has FP32 sums and range, and no better weights than FP16 has. What reads
dequantised operands is left alone: TensorRT runs it in INT8. So is a depthwise Conv, which has nothing for a
Tensor Core: whole networks in FP32 err by 7.4e-4 (MobileNetV2) and 6.4e-4 (NAFNet) on the same GPU; emulated
7.6e-4 and 5.9e-4 with exact depthwise Convs, 9.4e-4 and 7.7e-4 with rounded ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.parser
from onnx import GraphProto, NodeProto, TensorProto, helper

from rewriter.graph.fusion import is_depthwise
from rewriter.graph.ops import LAYOUTS, TENSOR_CORE
from rewriter.model import Model, walk_graphs
from rewriter.model.facts import Facts

DOMAIN = "rewriter.tf32"

_LEAST_OPSET, _LEAST_IR = 13, 8
"""Operators as they are used here; local functions."""

SPLITTER = 2.0**13 + 1.0
"""T. J. Dekker (1971): with c = x * (2^13 + 1), c - (c - x) is x rounded to 24 - 13 = 11 bits."""

LARGEST = 3.0e34
"""Beyond it, x * (2^13 + 1) may be infinite: such numbers, infinities and NaN stay as they are."""

_ROUND = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    Round (x) => (y) {{
        splitter = Constant <value_float = {SPLITTER:.1f}> ()
        largest = Constant <value_float = {LARGEST:.1e}> ()
        c = Mul (x, splitter)
        rest = Sub (c, x)
        rounded = Sub (c, rest)
        size = Abs (x)
        small = Less (size, largest)
        y = Where (small, rounded, x)
    }}"""


def round_to_tf32(emulated: Model, given: Model, facts: Facts) -> None:
    """Round the operands of the matrix products that `given` computes in FP32.

    What was FP16 before keeps every bit. In operator sets below 13 nothing is done.

    Args:
        emulated: What `retype` made of `given`; changed in place. It has the same nodes of these operators
            in the same order.
        facts: Of `given`.
    """
    if emulated.opset < _LEAST_OPSET:
        return
    used = False
    pairs = zip(walk_graphs(given.proto.graph), walk_graphs(emulated.proto.graph), strict=True)
    for scope, (source, target) in reversed(list(enumerate(pairs))):  # inner graphs before their owners
        positions = _chosen(source, target, facts, scope)
        if positions:
            used = True
            _rewrite(target, positions)
    if used:
        proto = emulated.proto
        proto.ir_version = max(proto.ir_version, _LEAST_IR)
        proto.opset_import.add(domain=DOMAIN, version=1)
        proto.functions.append(onnx.parser.parse_function(_ROUND.replace("OPSET", str(emulated.opset))))


def _chosen(source: GraphProto, target: GraphProto, facts: Facts, scope: int) -> set[int]:
    """Positions in `target` of the nodes that compute in FP32 in `source`."""
    known = facts.main | facts.scopes[scope]
    originals = [n for n in source.node if n.op_type in TENSOR_CORE]
    copies = [i for i, n in enumerate(target.node) if n.op_type in TENSOR_CORE]
    makers = {name: node for node in source.node for name in node.output}
    found = set()
    for node, position in zip(originals, copies, strict=True):
        operands = [known[name].dtype for name in node.input[:2] if name in known]
        quantized = any(_is_dequantized(name, makers) for name in node.input[:2])
        if len(operands) < 2 or set(operands) != {TensorProto.FLOAT} or quantized:
            continue
        if not is_depthwise(node, known[node.input[1]].shape or ()):
            found.add(position)
    return found


def _is_dequantized(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """Whether a DequantizeLinear makes the tensor, through what only arranges or casts it."""
    node = makers.get(name)
    while node is not None and node.op_type in LAYOUTS | {"Cast"}:
        node = makers.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"


def _rewrite(graph: GraphProto, positions: set[int]) -> None:
    """Round both operands in front of the nodes; each tensor once."""
    nodes: list[NodeProto] = []
    rounded: dict[str, str] = {}
    for index, node in enumerate(graph.node):
        if index in positions:
            for operand in (0, 1):
                node.input[operand] = _rounded(node.input[operand], rounded, nodes)
        nodes.append(node)
    copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _rounded(name: str, known: dict[str, str], nodes: list[NodeProto]) -> str:
    if name not in known:
        known[name] = f"{DOMAIN}/{name}"
        nodes.append(helper.make_node("Round", [name], [known[name]], domain=DOMAIN))
    return known[name]
