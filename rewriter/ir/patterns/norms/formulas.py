"""The formulas of decomposed normalisations, as exporters write them."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, is_op
from rewriter.ir.graph.ops import SCALING
from rewriter.ir.patterns.norms.language import (
    Bindings,
    Broadcast,
    Cancelling,
    Const,
    Guarded,
    Mean,
    Named,
    Op,
    Pattern,
    Scaled,
    SelfProduct,
    Var,
)


def square(x: Pattern, *, wide: bool = True) -> Pattern:
    return Op("Pow", x, Const(2.0), wide=wide) | SelfProduct(x, wide)


def mean_square(x: Pattern) -> Pattern:
    return Mean("power", square(x)) | Mean("power", x, ("ReduceSumSquare",))


def root(power: Pattern) -> Pattern:
    inside = Guarded(power, "inside")
    return Op("Sqrt", inside) | Op("Pow", inside, Const(0.5))


@dataclass(frozen=True)
class Root:
    """The root of a power, as the formulas divide by it: with epsilon inside or outside the root.

    Attributes:
        deviation: The root itself.
        inverse: One over it, with the shape of the statistic.
    """

    deviation: Pattern
    inverse: Pattern

    @classmethod
    def of(cls, power: Pattern, norm: Pattern) -> Root:
        """The root of `power`, or `norm` itself."""
        plain = norm | root(power)
        deviation = Guarded(plain | Scaled(Guarded(plain, "outside"), fault="its root is scaled"), "outside")
        inverse = (
            Op("Reciprocal", deviation)
            | Op("Div", Const(1.0), deviation)
            | Op("Pow", Guarded(power, "inside"), Const(-0.5))
        )
        return cls(Broadcast("power", deviation), Broadcast("power", inverse))


def over(numerator: Pattern, divisor: Root) -> Pattern:
    return Op("Div", numerator, divisor.deviation) | Op("Mul", numerator, divisor.inverse)


def times_scaled(numerator: Pattern, divisor: Root) -> Pattern:
    """The numerator times the scaled inverse, as Flax and Haiku write it: x * (rsqrt(v) * scale)."""
    return Op("Mul", numerator, Op("Mul", divisor.inverse, SCALE, wide=True), wide=True)


def as_batch_norm(divisor: Root) -> Pattern:
    """The form of tf.nn.batch_normalization and Keras: x * f + (bias - mean * f), f = rsqrt(v) * scale."""
    factor = Named("factor", Op("Mul", divisor.inverse, SCALE, wide=True) | divisor.inverse)
    mean = Broadcast("mean", MEAN)
    product = Op("Mul", mean, Var("factor"), wide=True)
    negative = Op("Mul", Op("Neg", mean), Var("factor"), wide=True) | Op("Neg", product)
    shift = Op("Sub", BIAS, product, wide=True) | negative | Op("Add", BIAS, negative, wide=True)
    scaled = Op("Mul", X, factor, wide=True)
    return Op("Add", scaled, shift) | Op("Sub", scaled, product)


def l2(x: Pattern) -> Pattern:
    return Mean("power", x, ("ReduceL2",), scaled=False)


X, SCALE, BIAS = Var("x"), Var("scale"), Var("bias")
MEAN = Mean("mean", X)
CENTRED = Op("Sub", X, Broadcast("mean", MEAN), wide=True)
CANCELLING = Cancelling(mean_square(X), square(MEAN, wide=False))
"""E[x^2] - E[x]^2, as Flax and Keras 3 write it, which saves them a pass over the data."""
VARIANCE = mean_square(CENTRED) | CANCELLING
NUMERATOR = CENTRED | Op("Mul", CENTRED, SCALE, wide=True)  # some multiply before they divide
DEVIATION, LENGTH = Root.of(VARIANCE, l2(CENTRED)), Root.of(mean_square(X), l2(X))

LAYER_NORM = over(NUMERATOR, DEVIATION) | times_scaled(CENTRED, DEVIATION)
SHIFTED_NORM = as_batch_norm(DEVIATION)
RMS_NORM = over(X, LENGTH) | times_scaled(X, LENGTH)
"""It is an L2 normalisation where the squares are summed."""


def match(graph: GraphEditor, node: NodeProto) -> Bindings | None:
    """The formula of the normalisation that ends in the Div, Mul, Add or Sub `node`, if it is one."""
    if is_op(node, *SCALING):
        formula = LAYER_NORM | RMS_NORM
    elif is_op(node, "Add", "Sub"):
        formula = SHIFTED_NORM
    else:
        return None
    return next(formula.match(Bindings(graph), node.output[0]), None)
