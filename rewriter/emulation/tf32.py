"""TF32 in an emulation: the arithmetic of FP32 matrix products on Tensor Cores, unless TF32 is switched off.

Operands are rounded to 11 significant bits, as FP16 has them, with the exponents of FP32; sums are FP32. So
an FP32 island around such a node has the range and the sums of FP32, but its weights are no more precise than
FP16. Nodes with dequantised operands are skipped, because TensorRT runs them in INT8, and so are depthwise
Convs, which do not run on Tensor Cores (docs/accuracy.md#emulated-sums).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import GraphProto, NodeProto, TensorProto, helper

from rewriter.emulation.local_functions import declare, paired
from rewriter.graph.fusion import is_depthwise
from rewriter.graph.ops import LAYOUTS, TENSOR_CORE
from rewriter.model import Model, walk_graphs
from rewriter.model.facts import Facts, TensorFacts
from rewriter.model.graphs import refill

DOMAIN = "rewriter.tf32"

SPLITTER = 2.0**13 + 1.0
"""T. J. Dekker (1971): with c = x * (2^13 + 1), c - (c - x) is x rounded to 24 - 13 = 11 bits."""

LARGEST = 3.0e34
"""Beyond it, x * (2^13 + 1) may be infinite: such numbers, infinities and NaN are not rounded."""

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

    Operands that were FP16 keep every bit. Below opset 13 nothing is rounded.

    Args:
        emulated: The result of `retype` on `given`, which has the same nodes of these operators in the same
            order; changed in place.
        facts: Of `given`.
    """
    graphs = list(walk_graphs(given.proto.graph))
    for scope, graph, pairs in paired(given, emulated, TENSOR_CORE):
        positions = _chosen(graphs[scope], pairs, facts.main | facts.scopes[scope])
        if positions:
            _rewrite(graph, positions)
    declare(emulated, DOMAIN, _ROUND)


def _chosen(
    source: GraphProto, pairs: Iterable[tuple[NodeProto, int]], known: Mapping[str, TensorFacts]
) -> set[int]:
    """The nodes of an emulated graph that compute in FP32 in `source`, by position."""
    makers = {name: node for node in source.node for name in node.output}
    found = set()
    for node, position in pairs:
        operands = [known[name].dtype for name in node.input[:2] if name in known]
        quantized = any(_is_dequantized(name, makers) for name in node.input[:2])
        if len(operands) < 2 or set(operands) != {TensorProto.FLOAT} or quantized:
            continue
        if not is_depthwise(node, known[node.input[1]].shape or ()):
            found.add(position)
    return found


def _is_dequantized(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """True if a DequantizeLinear makes the tensor, through views and Casts."""
    node = makers.get(name)
    while node is not None and node.op_type in LAYOUTS | {"Cast"}:
        node = makers.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"


def _rewrite(graph: GraphProto, positions: set[int]) -> None:
    """Round both operands of the nodes; each tensor once."""
    nodes: list[NodeProto] = []
    rounded: dict[str, str] = {}
    for index, node in enumerate(graph.node):
        if index in positions:
            for operand in (0, 1):
                node.input[operand] = _rounded(node.input[operand], rounded, nodes)
        nodes.append(node)
    refill(graph.node, nodes)


def _rounded(name: str, known: dict[str, str], nodes: list[NodeProto]) -> str:
    if name not in known:
        known[name] = f"{DOMAIN}/{name}"
        nodes.append(helper.make_node("Round", [name], [known[name]], domain=DOMAIN))
    return known[name]
