"""clamp-constants: replaces the huge numbers of attention masks by numbers that FP16 can hold."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import numpy_helper

from rewriter.ir.graph import GraphEditor, display_name
from rewriter.ir.graph.match import produced
from rewriter.ir.model import Array
from rewriter.ir.patterns.masks import FP16_MAX, Use, extreme, huge_uses, obstacle, widened
from rewriter.passes.base import Clamped, Context, Event, Exactness, GraphPass, Refusal

MASK = 16384.0  # magnitude of a clamped mask constant; the docstring of `ClampConstants` derives it


@dataclass(frozen=True)
class ClampConstants(GraphPass):
    """Masks hold FLT_MAX, 1e12 or infinity; in FP16 all of them are infinite, and 0 * inf is NaN.

    Users met it as NaN in an FP16 engine (NVIDIA/TensorRT#2466).

    A constant becomes -16384 = -2^14 if Softmax is all that it reaches: through Add, Where, a product
    with an integer mask (of 0 and 1), and operators that only move values. Masked entries stay exactly 0 for
    scores within +-8140: FP32's exp is 0 below -103.98 = ln(2^-150). The sum of mask and score is finite in
    FP16 for scores within +-49000, and within half of its range, the plan's head-room, above -16368.

    A row that is masked as a whole by Add was uniform (FLT_MAX absorbs every score) or NaN (infinity). It
    becomes the Softmax of the masked scores. Models do not use such rows; for a computed mask the report says
    that the change relies on their absence.

    Declines:
        - a constant that reaches a graph output or an operator that is not part of masking
        - a constant mask that masks a whole row
        - a constant with NaN, with huge values of both signs, or beside other large values
    """

    exactness = Exactness(0.0, "exp(x) is 0 in FP32 below -103.98, half of its smallest number 2^-149")
    example = """
         g (float[2,6,6] score, int64[2,1,6] mask) => (float[2,6,6] p)
        -<float one = {1.0}, float lowest = {-3.4028235e38}> {
        +<float one = {1.0}, float low = {-16384.0}> {
             open = Cast<to = 1>(mask)
             shut = Sub(one, open)
        -    bias = Mul(shut, lowest)
        +    bias = Mul(shut, low)
             masked = Add(score, bias)
             p = Softmax<axis = -1>(masked)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        clamped: dict[str, str] = {}
        # All uses are judged before the first change: masks that are added up affect one another.
        for use, reason in [(use, obstacle(graph, use)) for use in huge_uses(graph)]:
            yield _clamp(graph, use, reason, clamped)


def _clamp(graph: GraphEditor, use: Use, reason: str | None, clamped: dict[str, str]) -> Event:
    before, after = extreme(use.value), extreme(_tamed(use.value))
    if reason:
        return Refusal(display_name(use.node), f"{before:.4g} stays: {reason}")
    tensor = use.node.input[use.index]
    if tensor not in clamped:
        clamped[tensor] = _clamped(graph, tensor, use.value)
    graph.set_input(use.node, use.index, clamped[tensor])
    graph.erase_if_dead(tensor)
    note = "; relies on no row being masked as a whole" if use.relies else ""
    return Clamped(display_name(use.node), f"{before:.4g} became {after:.4g}{note}", before, after)


def _tamed(value: Array) -> Array:
    """Returns `value` with its huge entries replaced by +-MASK, in its own type."""
    wide = widened(value)
    return np.where(np.abs(wide) >= FP16_MAX, np.copysign(MASK, wide), wide).astype(value.dtype)


def _clamped(graph: GraphEditor, tensor: str, value: Array) -> str:
    """Adds the clamped constant and returns its name."""
    base, node = f"{tensor}/clamped", produced(graph, tensor, "ConstantOfShape")
    if node is None:
        return graph.add_constant(base, _tamed(value))
    out = graph.tensor(base, like=tensor)
    fill = numpy_helper.from_array(_tamed(value))
    graph.insert(graph.make("ConstantOfShape", node.input, [out], name=base, value=fill), before=node)
    return out
