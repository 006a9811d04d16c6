"""The formulas of decomposed normalisations, as exporters write them."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, is_op
from rewriter.ir.graph.ops import SCALING
from rewriter.ir.patterns.norms.language import (
    Bindings,
    Pattern,
    broadcast,
    cancelling,
    const,
    guarded,
    mean,
    named,
    op,
    scaled_by,
    self_product,
    var,
)


def square(x: Pattern, *, wide: bool = True) -> Pattern:
    return op("Pow", x, const(2.0), wide=wide) | self_product(x, wide=wide)


def mean_square(x: Pattern) -> Pattern:
    return mean("power", square(x)) | mean("power", x, ("ReduceSumSquare",))


def root(power: Pattern) -> Pattern:
    inside = guarded(power, "inside")
    return op("Sqrt", inside) | op("Pow", inside, const(0.5))


@dataclass(frozen=True)
class Root:
    """The root of a power, with epsilon inside or outside, and one over it in the shape of the statistic."""

    deviation: Pattern
    inverse: Pattern

    @classmethod
    def of(cls, power: Pattern, norm: Pattern) -> Root:
        """The root of `power`, or `norm` itself."""
        plain = norm | root(power)
        deviation = guarded(
            plain | scaled_by(guarded(plain, "outside"), fault="its root is scaled"), "outside"
        )
        inverse = (
            op("Reciprocal", deviation)
            | op("Div", const(1.0), deviation)
            | op("Pow", guarded(power, "inside"), const(-0.5))
        )
        return cls(broadcast("power", deviation), broadcast("power", inverse))


def over(numerator: Pattern, divisor: Root) -> Pattern:
    return op("Div", numerator, divisor.deviation) | op("Mul", numerator, divisor.inverse)


def times_scaled(numerator: Pattern, divisor: Root) -> Pattern:
    """The numerator times the scaled inverse, as Flax and Haiku write it: x * (rsqrt(v) * scale)."""
    return op("Mul", numerator, op("Mul", divisor.inverse, SCALE, wide=True), wide=True)


def as_batch_norm(divisor: Root) -> Pattern:
    """The form of tf.nn.batch_normalization and Keras: x * f + (bias - mean * f), f = rsqrt(v) * scale."""
    factor = named("factor", op("Mul", divisor.inverse, SCALE, wide=True) | divisor.inverse)
    average = broadcast("mean", MEAN)
    product = op("Mul", average, var("factor"), wide=True)
    negative = op("Mul", op("Neg", average), var("factor"), wide=True) | op("Neg", product)
    shift = op("Sub", BIAS, product, wide=True) | negative | op("Add", BIAS, negative, wide=True)
    scaled = op("Mul", X, factor, wide=True)
    return op("Add", scaled, shift) | op("Sub", scaled, product)


def l2(x: Pattern) -> Pattern:
    return mean("power", x, ("ReduceL2",), scaled=False)


X, SCALE, BIAS = var("x"), var("scale"), var("bias")
MEAN = mean("mean", X)
CENTRED = op("Sub", X, broadcast("mean", MEAN), wide=True)
CANCELLING = cancelling(mean_square(X), square(MEAN, wide=False))
"""E[x^2] - E[x]^2, as Flax and Keras 3 write it, which saves them a pass over the data."""
VARIANCE = mean_square(CENTRED) | CANCELLING
NUMERATOR = CENTRED | op("Mul", CENTRED, SCALE, wide=True)  # some multiply before they divide
DEVIATION, LENGTH = Root.of(VARIANCE, l2(CENTRED)), Root.of(mean_square(X), l2(X))

ROOTS = ("Sqrt", "Pow", "ReduceL2")  # each formula has one of them

LAYER_NORM = over(NUMERATOR, DEVIATION) | times_scaled(CENTRED, DEVIATION)
SHIFTED_NORM = as_batch_norm(DEVIATION)
RMS_NORM = over(X, LENGTH) | times_scaled(X, LENGTH)
"""An RMSNorm, or an L2 normalisation if the squares are summed."""
SCALED_NORM = LAYER_NORM | RMS_NORM


def match(graph: GraphEditor, node: NodeProto) -> Bindings | None:
    """The formula of the normalisation that ends in the Div, Mul, Add or Sub `node`, if it is one."""
    if is_op(node, *SCALING):
        formula = SCALED_NORM
    elif is_op(node, "Add", "Sub"):
        formula = SHIFTED_NORM
    else:
        return None
    return next(formula.match(Bindings(graph), node.output[0]), None)
