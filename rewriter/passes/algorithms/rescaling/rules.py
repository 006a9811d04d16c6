"""Rule of each operator: the linear equations between the exponents of its inputs and outputs.

If the inputs of an operator are multiplied by powers of two, its outputs are, too, and no bit of a
significand changes. An operator without a rule allows no exponent but 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.model import STANDARD_DOMAINS

Slot = int
"""An input or output of a node: input i is i, output j is ~j (its bitwise complement)."""

OUT: Slot = ~0

Equation = tuple[tuple[Slot, int], ...]
"""Slots with integer coefficients: the sum of coefficient times exponent is 0.

An equation with an absent input, or with a tensor that is no float, is ignored.
"""


@dataclass(frozen=True)
class Relations:
    """Equations of one node. A slot that none of them mentions has exponent 0.

    Attributes:
        free: Slots of any exponent: the results do not depend on their scale.
        epsilon: True if the attribute `epsilon` is added to squares of input 0 and scales with them.
    """

    equations: tuple[Equation, ...] = ()
    free: frozenset[Slot] = frozenset()
    epsilon: bool = False


Rule = Callable[[GraphEditor, NodeProto], Relations | None]
"""Returns the relations of a node; None if all its exponents have to be 0."""


def relations(graph: GraphEditor, node: NodeProto) -> Relations | None:
    """Returns the equations of a node; None if all its exponents have to be 0."""
    rule = RULES.get(node.op_type) if node.domain in STANDARD_DOMAINS else None
    return rule(graph, node) if rule else None


def _tied(*slots: Slot) -> tuple[Equation, ...]:
    """Equations that give all slots one exponent."""
    return tuple(((slots[0], 1), (slot, -1)) for slot in slots[1:])


def _outputs(node: NodeProto) -> list[Slot]:
    return [~index for index in range(len(node.output))]


def _same(*inputs: Slot) -> Rule:
    """Returns a rule: the named inputs, where present, and all outputs have one exponent."""
    return lambda graph, node: Relations(_tied(OUT, *inputs, *_outputs(node)[1:]))


def _fixed(*equations: Equation, free: tuple[Slot, ...] = ()) -> Rule:
    """Returns the rule of an operator whose relations are the same for all its nodes."""
    return lambda graph, node: Relations(equations, frozenset(free))


def _unless(refuses: Callable[[NodeProto], bool], *slots: Slot) -> Rule:
    """Returns a rule: these slots have one exponent, and nodes that `refuses` is true for allow none."""
    return lambda graph, node: None if refuses(node) else Relations(_tied(*slots))


def _pow(graph: GraphEditor, node: NodeProto) -> Relations | None:
    """Powers 1, 2 and 3 are products; others are computed through a logarithm, which rounds."""
    exponent = graph.scalar(node.input[1])
    if exponent not in (1.0, 2.0, 3.0):
        return None
    return Relations((((OUT, 1), (0, -int(exponent))),))


def _normalised(_: GraphEditor, node: NodeProto) -> Relations | None:
    """The input may have any exponent if epsilon follows; scale and bias set the output's."""
    if any(node.output[1:]):
        return None  # mean and standard deviation of LayerNormalization
    return Relations((((OUT, 1), (1, -1)), ((OUT, 1), (2, -1))), frozenset({0}), epsilon=True)


def _batch_norm(_: GraphEditor, node: NodeProto) -> Relations | None:
    """(x - mean) * scale / sqrt(var + epsilon) + bias: the scale takes up the factor, the variance stays."""
    if any(node.output[1:]) or attribute(node, "training_mode", 0):
        return None
    return Relations((((OUT, 1), (0, -1), (1, -1)), ((OUT, 1), (2, -1)), ((0, 1), (3, -1))))


_FIRST = (
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Gather GatherElements GatherND Split Expand "
    "Tile Relu LeakyRelu PRelu Abs Neg Dropout MaxPool AveragePool GlobalMaxPool GlobalAveragePool ReduceSum "
    "ReduceMean ReduceMax ReduceMin ReduceL1 ReduceL2 CumSum DepthToSpace SpaceToDepth Cast Trilu Compress "
    "ReverseSequence GridSample RoiAlign"
)
"""Operators whose outputs are values of the first input, or sums and averages of them."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_FIRST.split(), _same(0)),
    **dict.fromkeys(
        "Concat Add Sub Sum Mean Max Min".split(),
        lambda _, node: Relations(_tied(*_outputs(node), *range(len(node.input)))),
    ),
    **dict.fromkeys(
        "Equal Less Greater LessOrEqual GreaterOrEqual".split(),
        lambda _, node: Relations(_tied(*range(len(node.input)))),
    ),
    # their results do not depend on a positive factor
    **dict.fromkeys("Shape Size IsNaN IsInf Sign LpNormalization".split(), _fixed(free=(0,))),
    **dict.fromkeys(
        "Mul MatMul Einsum".split(),
        lambda _, node: Relations((((OUT, 1), *((index, -1) for index in range(len(node.input)))),)),
    ),
    # a product, and a bias that scales with the result
    **dict.fromkeys(
        "Conv ConvTranspose Gemm".split(), _fixed(((OUT, 1), (0, -1), (1, -1)), ((OUT, 1), (2, -1)))
    ),
    **{f"{kind}Normalization": _normalised for kind in ("Layer", "RMS", "Instance", "Group")},
    **dict.fromkeys(
        "ScatterElements ScatterND".split(),
        _unless(lambda node: attribute(node, "reduction") == "mul", OUT, 0, 2),
    ),
    "BatchNormalization": _batch_norm,
    # x / scale is rounded to an integer: if both scale together, no integer changes
    "QuantizeLinear": _fixed(*_tied(0, 1)),
    "DequantizeLinear": _same(1),
    "Where": _same(1, 2),
    "Pad": _unless(lambda node: bool(attribute(node, "value")), OUT, 0, 2),
    "Clip": _unless(lambda node: bool(node.attribute), OUT, 0, 1, 2),  # opset 6 has the bounds as attributes
    "Resize": _unless(
        lambda node: attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize", OUT, 0
    ),
    "Div": _fixed(((OUT, 1), (0, -1), (1, 1))),
    "Sqrt": _fixed(((OUT, 2), (0, -1))),
    "Reciprocal": _fixed(((OUT, 1), (0, 1))),
    "ReduceSumSquare": _fixed(((OUT, 1), (0, -2))),
    "Pow": _pow,
}
"""By operator of the default domain."""
