"""Rule of each operator: the linear equations between the exponents of its inputs and outputs.

If the inputs of an operator are multiplied by powers of two, its outputs are, too, and no bit of a
significand changes. An operator without a rule allows no exponent but 0.
"""

from __future__ import annotations

import re
from collections import Counter

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.model import STANDARD_DOMAINS

Slot = int
"""An input or output of a node: input i is i, output j is ~j (its bitwise complement)."""

NORMS = frozenset(f"{kind}Normalization" for kind in ("Layer", "RMS", "Instance", "Group"))
"""Operators that add the attribute `epsilon` to squares of their input, and divide by the root."""

_TABLE = {
    # the outputs are values of the first input, or sums and averages of them
    "k = k0": "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Gather GatherElements GatherND "
    "Split Expand Tile Relu LeakyRelu PRelu Abs Neg Dropout MaxPool AveragePool GlobalMaxPool "
    "GlobalAveragePool ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 ReduceL2 CumSum DepthToSpace "
    "SpaceToDepth Cast Trilu Compress ReverseSequence GridSample RoiAlign Resize",
    "k = k0 = k2": "ScatterElements ScatterND Pad",
    "k = k0 = k1 = k2": "Clip",
    "k = k1 = k2": "Where",
    "k = k0 = ...": "Concat Add Sub Sum Mean Max Min",
    "k = k0 + ...": "Mul MatMul Einsum",
    "k = k0 + k1 = k2": "Conv ConvTranspose Gemm",
    "k = k0 - k1": "Div",
    "k = -k0": "Reciprocal",
    "2k = k0": "Sqrt",
    "k = 2k0": "ReduceSumSquare",
    "k = k0 * k1": "Pow",
    # x / scale is rounded to an integer: if both scale together, no integer changes
    "k0 = k1": "QuantizeLinear Equal Less Greater LessOrEqual GreaterOrEqual",
    "k = k1": "DequantizeLinear",
    # the results do not depend on a positive factor
    "k0 = k0": "Shape Size IsNaN IsInf Sign LpNormalization",
    "k0 = k0, k = k1 = k2": " ".join(NORMS),
    # (x - mean) * scale / sqrt(var + epsilon) + bias: the scale takes up the factor, the variance stays
    "k = k0 + k1 = k2, k0 = k3": "BatchNormalization",
}
"""Operators of the default domain by rule: k is the exponent of every output, k0 the exponent of input 0."""

RULES = {op: rule for rule, ops in _TABLE.items() for op in ops.split()}


def equations(graph: GraphEditor, node: NodeProto) -> list[Counter[Slot]] | None:
    """The equations of a node; None if all its exponents have to be 0.

    Returns:
        Coefficients by slot: the sum of coefficient times exponent is 0. An equation with an absent input, or
        with a tensor that is no float, is to be ignored; a slot that none mentions has exponent 0.
    """
    if node.domain not in STANDARD_DOMAINS or node.op_type not in RULES or _is_inexact(graph, node):
        return None
    rule = RULES[node.op_type]
    if node.op_type == "Pow":
        rule = f"k = {graph.scalar(node.input[1]):.0f}k0"
    if rule.endswith("..."):
        rule = "k = " + rule[-5:-3].join(f"k{index}" for index in range(len(node.input)))
    result = []
    for chain in rule.split(","):
        first, *others = chain.split("=")
        for other in others:
            result.append(_side(first))
            result[-1].subtract(_side(other))
    return result + [Counter({~0: 1, ~index: -1}) for index in range(1, len(node.output))]


def _side(text: str) -> Counter[Slot]:
    """The coefficients of one side of an equation, such as `2k` or `k0 - k1`."""
    terms: Counter[Slot] = Counter()
    for sign, factor, index in re.findall(r"(-?) ?(\d*)k(\d*)", text):
        terms[int(index) if index else ~0] += int(f"{sign}{factor or 1}")
    return terms


def _is_inexact(graph: GraphEditor, node: NodeProto) -> bool:
    """True for a form of its operator that the rule does not hold for."""
    match node.op_type:
        case "Clip":
            return bool(node.attribute)  # opset 6 has the bounds as attributes
        case "Pad":
            return bool(attribute(node, "value"))
        case "Resize":
            return bool(attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize")
        case "ScatterElements" | "ScatterND":
            return bool(attribute(node, "reduction") == "mul")
        case "Pow":  # 1, 2 and 3 are products; others are computed through a logarithm, which rounds
            return graph.scalar(node.input[1]) not in (1.0, 2.0, 3.0)
    norm = node.op_type in NORMS or node.op_type == "BatchNormalization"
    return norm and (any(node.output[1:]) or bool(attribute(node, "training_mode", 0)))
