"""TF32 in an emulation: the arithmetic of FP32 matrix products on Tensor Cores, unless TF32 is switched off.

Operands are rounded or cut off to 11 significant bits, as FP16 has them, with the exponents of FP32; sums are
FP32. So an FP32 island around such a node has the range and the sums of FP32, but weights of 11 bits.
`operands_of` names the nodes that run in FP32 all the same. Nodes with dequantised operands are skipped,
because TensorRT runs them in INT8.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from rewriter.ir.graph.ops import LAYOUTS, TENSOR_CORE
from rewriter.ir.model import Array, Model, walk_graphs
from rewriter.ir.model.graphs import reads, replace_items
from rewriter.ir.model.tensors import TensorFacts, release
from rewriter.runtime.emulation.local_functions import declare, paired
from rewriter.target.fusion import Operands, operands_of

DOMAIN = "rewriter.tf32"

FIRST_OPSET = 9  # Where and Sign exist from it on; 9 of 21 trained networks came in 9 to 12

SPLITTER = 2.0**13 + 1.0
"""T. J. Dekker (1971): with c = x * (2^13 + 1), c - (c - x) is x rounded to 24 - 13 = 11 bits."""

LARGEST = 3.0e34
"""Beyond it, x * (2^13 + 1) may be infinite: such numbers, infinities and NaN are not rounded."""

BELOW = 1.0 - 2.0**-11
"""A number of 11 bits times this is exact in FP32, and lies nearest to its lower neighbour of 11 bits."""

_ROUND = f"""
    <opset_import: ["" : OPSET], domain: "{DOMAIN}">
    Round (x) => (y) {{
        c = Mul (x, {SPLITTER:.1f})
        y = Where (Less (Abs (x), {LARGEST:.1e}), Sub (c, Sub (c, x)), x)
    }}"""

_CUT_OFF = f"""
    <opset_import: ["" : OPSET, "{DOMAIN}" : 1], domain: "{DOMAIN}">
    CutOff (x) => (y) {{
        size = Abs (x)
        rounded = {DOMAIN}.Round (size)
        previous = {DOMAIN}.Round (Mul (rounded, {BELOW!r}))
        y = Mul (Where (Greater (rounded, size), previous, rounded), Sign (x))
    }}"""


def round_to_tf32(emulated: Model, original: Model, graph_bytes: float = math.inf) -> None:
    """Round the operands of the matrix products that `original` computes in FP32, in `emulated`.

    Operands that were FP16 keep every bit. Below `FIRST_OPSET` nothing is rounded. Weights are rounded here,
    larger ones (`graph_bytes`) in the graph: ONNX Runtime loads many nodes without inputs slowly.
    """
    if emulated.opset < FIRST_OPSET:
        return
    graphs, facts = list(walk_graphs(original.proto.graph)), original.facts()
    for scope, graph, pairs in paired(original, emulated, TENSOR_CORE):
        chosen = _chosen(graphs[scope], pairs, facts.main | facts.scopes[scope])
        if chosen:
            rounded = _round_weights(emulated, graph, chosen, graph_bytes) if scope == 0 else set[str]()
            _rewrite(graph, chosen, rounded)
    declare(emulated, DOMAIN, _ROUND, _CUT_OFF)


def _chosen(
    source: GraphProto, pairs: Iterable[tuple[NodeProto, int]], rounded: Mapping[str, TensorFacts]
) -> dict[int, Operands]:
    """The nodes that compute in TF32 in `source`, by position in the emulated graph, with their operands."""
    makers = {name: node for node in source.node for name in node.output}
    chosen: dict[int, Operands] = {}
    for node, position in pairs:
        operands = [rounded[name] for name in node.input[:2] if name in rounded]
        quantized = any(_is_dequantized(name, makers) for name in node.input[:2])
        if len(operands) < 2 or {o.dtype for o in operands} != {TensorProto.FLOAT} or quantized:
            continue
        treated = operands_of(node, *(operand.shape or () for operand in operands))
        if treated != "fp32":
            chosen[position] = treated
    return chosen


def _is_dequantized(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """True if a DequantizeLinear makes the tensor, through views and Casts."""
    node = makers.get(name)
    while node is not None and node.op_type in LAYOUTS | {"Cast"}:
        node = makers.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"


def _round_weights(
    model: Model, graph: GraphProto, chosen: Mapping[int, Operands], graph_bytes: float
) -> set[str]:
    """Round weights that are only read as operands, and in one way; returns their names."""
    uses, rounded = defaultdict[str, set[str]](set), set[str]()
    for index, node in enumerate(graph.node):
        operands = node.input[:2] if index in chosen else ()
        for name in operands:
            uses[name].add(chosen[index])
        for name in node.input[2:] if operands else reads(node):
            uses[name].add("as it is")
    for value in graph.output:
        uses[value.name].add("as it is")
    for tensor in graph.initializer:
        ways = uses[tensor.name]
        if ways != {"nearest"} and ways != {"truncated"}:
            continue
        weight = model.array(tensor)
        if weight.nbytes < graph_bytes:
            result = _nearest(weight) if ways == {"nearest"} else _cut_off(weight)
            tensor.CopyFrom(model.detached_tensor(tensor.name, result))
            rounded.add(tensor.name)
        release(weight)
    return rounded


def _nearest(x: Array) -> Array:
    """As `_ROUND`, bit for bit."""
    with np.errstate(all="ignore"):
        c = x * np.float32(SPLITTER)
        result: Array = np.where(np.abs(x) < np.float32(LARGEST), c - (c - x), x)
    return result


def _cut_off(x: Array) -> Array:
    """As `_CUT_OFF`, bit for bit."""
    size, rounded = np.abs(x), _nearest(np.abs(x))
    result: Array = np.where(rounded > size, _nearest(rounded * np.float32(BELOW)), rounded) * np.sign(x)
    return result


def _rewrite(graph: GraphProto, chosen: Mapping[int, Operands], done: AbstractSet[str]) -> None:
    """Round both operands of the nodes but those `done`; each tensor once in each way."""
    nodes: list[NodeProto] = []
    rounded: dict[tuple[str, str], str] = {}
    for index, node in enumerate(graph.node):
        if index in chosen:
            function = "Round" if chosen[index] == "nearest" else "CutOff"
            for operand in (0, 1):
                name = node.input[operand]
                if name in done:
                    continue
                if (name, function) not in rounded:
                    result = rounded[name, function] = f"{DOMAIN}/{function}/{name}"
                    nodes.append(helper.make_node(function, [name], [result], domain=DOMAIN))
                node.input[operand] = rounded[name, function]
        nodes.append(node)
    replace_items(graph.node, nodes)
