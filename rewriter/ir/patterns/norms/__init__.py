"""Finds decomposed normalisations: LayerNorm, RMSNorm and L2 normalisation in small operators.

`find_norms` also finds those that cannot become one operator. Their squares overflow FP16 long before
their input does, so the planner needs each of them as a unit. The formulas are as exporters write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, display_name, is_op
from rewriter.ir.graph.ops import SCALING
from rewriter.ir.patterns.norms.affine import Affine, NormalizedAxes, follow
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
from rewriter.ir.patterns.values import exposed, is_harmless, origins, positive, transparent

Kind = Literal["layer-norm", "rms-norm", "l2-normalize"]


@dataclass(frozen=True)
class Norm:
    """One decomposed normalisation."""

    # `layer-norm` subtracts a mean, `rms-norm` does not, `l2-normalize` divides by a sum, not a mean
    kind: Kind
    input: str  # the tensor that is normalised; of the same type as `output` where one exists
    output: str
    # in order, from the front if the rank is known; () if they are computed, or all of an unknown rank
    axes: tuple[int, ...]
    epsilon: float  # as read from the constant, whatever its type; 0.0 if there is none
    # scale, bias: tensors of the affine part; only a `layer-norm` has a bias
    scale: str | None
    bias: str | None
    nodes: tuple[NodeProto, ...]  # all nodes in graph order, without Constants; they have to be in one island
    cancels: bool  # its variance is E[x^2] - E[x]^2, whose digits cancel where |mean| exceeds the deviation
    blocked: str | None  # why it must not become one operator; None if it may

    @property
    def name(self) -> str:
        """Its name in messages: the name of its last node."""
        return display_name(self.nodes[-1])


def find_norms(graph: GraphEditor) -> list[Norm]:
    """The decomposed normalisations of one graph, in graph order; subgraphs have editors of their own."""
    nodes = graph.nodes if not graph.operators.isdisjoint(ROOTS) else []  # none after fusion, as a rule
    order = {id(node): index for index, node in enumerate(nodes)}
    matches = ((node, match(graph, node)) for node in nodes)
    return [_norm(formula, node.output[0], order) for node, formula in matches if formula is not None]


def _norm(formula: Bindings, output: str, order: dict[int, int]) -> Norm:
    graph, sources = formula.graph, formula.tensors["x"]
    power, means = formula.moments["power"][0], formula.moments.get("mean", ())
    kind: Kind = "layer-norm" if means else "l2-normalize" if power.total else "rms-norm"
    rank = graph.rank(sources[0])
    normalized = NormalizedAxes(positive(power.axes, rank) or (), graph.shape(sources[0]))
    scale, bias = (next(iter(formula.tensors.get(name, ())), None) for name in ("scale", "bias"))
    affine = Affine(output, scale, bias)
    follow(graph, affine, normalized, sources[0], biased=kind == "layer-norm")
    source = _input(graph, sources, affine)
    unit = {id(n): n for n in (*formula.nodes, *affine.nodes)}
    faults = dict.fromkeys((*formula.faults, *_faults(formula, kind)))
    reasons = [*faults, *_reasons(graph, affine, source, unit)]
    for node in (*affine.views, *_between(graph, sources, source)):
        if not exposed(graph, node, unit):
            unit[id(node)] = node
    epsilons = sorted(formula.epsilons, key=lambda epsilon: epsilon.side == "outside")
    return Norm(
        kind=kind,
        input=source,
        output=affine.output,
        axes=normalized.numbers,
        epsilon=epsilons[-1].value if epsilons else 0.0,
        scale=affine.scale,
        bias=affine.bias,
        nodes=tuple(sorted(unit.values(), key=lambda n: order[id(n)])),
        cancels=formula.cancels,
        blocked="; ".join(reasons) or None,
    )


def _faults(formula: Bindings, kind: Kind) -> Iterator[str]:
    """Reasons in the formula not to replace it by one operator."""
    source, means = formula.tensors["x"][0], formula.moments.get("mean", ())
    power = formula.moments["power"][0]
    if not power.total and any(epsilon.side == "outside" for epsilon in formula.epsilons):
        yield "its epsilon is outside the root"
    if not all(mean.is_mean for mean in means):
        yield "the subtracted value is not the mean"
    axes = {positive(moment.axes, formula.graph.rank(source)) for moment in (power, *means)}
    if means and (len(axes) > 1 or None in axes):
        yield "its two means run over different axes"
    if not all(is_harmless(formula.graph, node, source) for node in formula.expanded):
        yield "a statistic is expanded inside it"
    if kind != "l2-normalize" and not power.is_mean:
        yield "the squares are not divided by their number, as a mean would be"
    if power.axes is None:
        yield "its axes are computed"


def _reasons(graph: GraphEditor, affine: Affine, source: str, unit: dict[int, NodeProto]) -> Iterator[str]:
    """Reasons around the formula not to replace it."""
    if affine.blocked:
        yield affine.blocked
    if graph.dtype(affine.output) == TensorProto.DOUBLE:
        yield "it computes in float64, which the operator would not (run demote-float64 before)"
    elif graph.dtype(source) != graph.dtype(affine.output):
        yield f"{source} and {affine.output} have different types"
    inner = (exposed(graph, n, unit) for n in unit.values() if affine.output not in n.output)
    yield from islice(filter(None, inner), 1)


def _input(graph: GraphEditor, sources: Sequence[str], affine: Affine) -> str:
    """The last tensor before the pattern that all its parts read, and that has the output's type.

    Where parts read x through Casts of their own, it is the input of the Casts.
    """
    chains = [list(origins(graph, s)) for s in sources]
    common = [t for t in chains[0] if all(t in chain for chain in chains)]
    alike = (t for t in [*common, *chains[0]] if graph.dtype(t) == graph.dtype(affine.output))
    return next(alike, common[0] if common else sources[0])


def _between(graph: GraphEditor, sources: Sequence[str], source: str) -> list[NodeProto]:
    """Identities and Casts between the input and the pattern, the last ones first."""
    nodes: list[NodeProto] = []
    for tensor in sources:
        for name in origins(graph, tensor):
            node = graph.producer(name)
            if name == source or node is None or not transparent(graph, node):
                break
            nodes.append(node)
    return nodes


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
        scaled = scaled_by(guarded(plain, "outside"), fault="its root is scaled")
        deviation = guarded(plain | scaled, "outside")
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
