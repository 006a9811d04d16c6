"""The formulas of decomposed normalisations, as exporters write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnx import NodeProto

from rewriter.graph import GraphEditor, is_op
from rewriter.graph.ops import SCALING
from rewriter.patterns.norms.language import (
    Bindings,
    Broadcast,
    Const,
    Guarded,
    Mean,
    Op,
    Pattern,
    Scaled,
    SelfProduct,
    Var,
)
from rewriter.patterns.norms.values import positive

Kind = Literal["layer-norm", "rms-norm", "l2-normalize"]


def square(x: Pattern, *, wide: bool = True) -> Pattern:
    return Op("Pow", x, Const(2.0), wide=wide) | SelfProduct(x, wide)


def mean_square(x: Pattern) -> Pattern:
    return Mean("power", square(x)) | Mean("power", x, ("ReduceSumSquare",))


def root(power: Pattern) -> Pattern:
    inside = Guarded(power, "inside")
    return Op("Sqrt", inside) | Op("Pow", inside, Const(0.5))


def over(numerator: Pattern, power: Pattern, norm: Pattern) -> Pattern:
    """The numerator over the root of `power`, or over `norm`, with epsilon inside or outside the root."""
    plain = norm | root(power)
    deviation = Guarded(plain | Scaled(Guarded(plain, "outside"), fault="its root is scaled"), "outside")
    inverse = (
        Op("Reciprocal", deviation)
        | Op("Div", Const(1.0), deviation)
        | Op("Pow", Guarded(power, "inside"), Const(-0.5))
    )
    divided = Op("Div", numerator, Broadcast("power", deviation))
    return divided | Op("Mul", numerator, Broadcast("power", inverse))


def l2(x: Pattern) -> Pattern:
    return Mean("power", x, ("ReduceL2",), scaled=False)


X, SCALE = Var("x"), Var("scale")
MEAN = Mean("mean", X)
CENTRED = Op("Sub", X, Broadcast("mean", MEAN), wide=True)
VARIANCE = mean_square(CENTRED) | Op(
    "Sub",
    mean_square(X),
    square(MEAN, wide=False),
    fault="the variance is E[x^2] - E[x]^2: a fused kernel would not cancel digits as it does",
)
NUMERATOR = CENTRED | Op("Mul", CENTRED, SCALE, wide=True)  # some multiply before they divide

LAYER_NORM = over(NUMERATOR, VARIANCE, l2(CENTRED))
RMS_NORM = over(X, mean_square(X), l2(X))
"""It is an L2 normalisation where the squares are summed."""


@dataclass(frozen=True)
class Core:
    """A normalisation without its affine part.

    Attributes:
        sources: The tensor that is normalised, as each part of the formula reads it; they hold the
            same values, though Casts may give them different types. The numerator's comes first.
        output: Output of the normalising Div or Mul.
        axes: As written in the model; None if they are computed, () for all.
        epsilon: Value of the constant; 0.0 if there is none.
        scale: A factor of the numerator that is applied before the division, if there is one.
        nodes: All nodes of the formula.
        faults: Reasons not to replace it by one operator.
    """

    kind: Kind
    sources: tuple[str, ...]
    output: str
    axes: tuple[int, ...] | None
    epsilon: float
    scale: str | None
    nodes: tuple[NodeProto, ...]
    faults: tuple[str, ...]


def match(graph: GraphEditor, node: NodeProto) -> Core | None:
    """The normalisation that ends in the Div or Mul `node`, if it is one."""
    if not is_op(node, *SCALING):
        return None
    found = next((LAYER_NORM | RMS_NORM).match(Bindings(graph), node.output[0]), None)
    return None if found is None else _core(found, node.output[0])


def _core(found: Bindings, output: str) -> Core:
    sources, scales = found.tensors["x"], found.tensors.get("scale", ())
    power, means = found.moments["power"][0], found.moments.get("mean", ())
    kind: Kind = "layer-norm" if means else "l2-normalize" if power.total else "rms-norm"
    outside = [e.value for e in found.epsilons if e.place == "outside"]
    inside = [e.value for e in found.epsilons if e.place == "inside"]
    rank = found.graph.rank(sources[0])
    axes = {positive(moment.axes, rank) for moment in (power, *means)}
    wrong = {
        "its epsilon is outside the root": outside and not power.total,
        "what is subtracted is not the mean": not all(mean.is_mean for mean in means),
        "its two means run over different axes": means and (len(axes) > 1 or None in axes),
        "the squares are not divided by their number, as a mean would be": (
            kind != "l2-normalize" and not power.is_mean
        ),
    }
    return Core(
        kind,
        sources,
        output,
        power.axes,
        epsilon=(outside or inside or [0.0])[-1],
        scale=scales[0] if scales else None,
        nodes=found.nodes,
        faults=tuple(dict.fromkeys((*found.faults, *(reason for reason, holds in wrong.items() if holds)))),
    )
