"""fuse-layer-norm: replaces a LayerNorm written in small operators by LayerNormalization."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rewriter.ir.graph import GraphEditor
from rewriter.ir.patterns.norms import Norm, find_norms
from rewriter.ir.patterns.norms.affine import NormalizedAxes, unrepeated, weight
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires


@dataclass(frozen=True)
class FuseLayerNorm(GraphPass):
    """The squares inside a decomposed LayerNorm overflow FP16; the operator computes in FP32 inside.

    A variance as E[x^2] - E[x]^2, which Flax and Keras 3 write, becomes the operator, too: that subtracts
    the mean first, so that no digits cancel. Sums in another order move x - mean by 2^-24 |mean|, which
    matters only where |mean| is far larger than the deviation (docs/accuracy.md#decomposed-norms).

    Declines:
        - a norm with an inner tensor that is used elsewhere or is a graph output
        - means over different axes, sums that are not means
        - an epsilon outside the root or as a lower bound, or more than one epsilon
        - a constant scale that varies along other axes, or that would add an axis
        - axes of unknown size without a scale; computed axes; float64
        - axes that are not the last ones, such as LayerNorm2d over axis 1 of NCHW: the norm stays one FP32
          island, as Transposes around the operator cost more than they save in a whole network (NAFNet)
        - a residual Add or a Mul by a computed modulation after the norm: they stay after the operator
    """

    requires = Requires(opset=17)  # from there on it has LayerNormalization
    exactness = Exactness(1e-4, "FP32 sums in another order: at most 4.3e-5 measured (models/vit_massive)")
    example = """
        -g (float[2,8,64] x, float[64] scale, float[64] bias) => (float[2,8,64] y)
        -<float two = {2.0}, float epsilon = {0.00001}> {
        -    mean = ReduceMean <axes = [-1]> (x)
        -    d = Sub(x, mean)
        -    square = Pow(d, two)
        -    variance = ReduceMean <axes = [-1]> (square)
        -    shifted = Add(variance, epsilon)
        -    deviation = Sqrt(shifted)
        -    normal = Div(d, deviation)
        -    scaled = Mul(normal, scale)
        -    y = Add(scaled, bias)
        +g (float[2,8,64] x, float[64] scale, float[64] bias) => (float[2,8,64] y) {
        +    y = LayerNormalization <axis = -1, epsilon = 0.00001> (x, scale, bias)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for norm in find_norms(graph):
            if norm.kind != "layer-norm":
                continue
            normalized = NormalizedAxes(norm.axes, graph.shape(norm.input))
            reason = _reason_against(graph, norm, normalized) or _fuse(graph, norm, normalized)
            what = f"{len(norm.nodes)} nodes became LayerNormalization"
            yield Refusal(norm.name, reason) if reason else Change(norm.name, what)


def _reason_against(graph: GraphEditor, norm: Norm, normalized: NormalizedAxes) -> str | None:
    if norm.blocked:
        return f"stays decomposed, as one unit: {norm.blocked}"
    if normalized.trailing:
        return None
    if normalized.rank is None:
        return f"it normalises axes {list(norm.axes)} of a tensor of unknown rank"
    axes = f"axes {list(norm.axes)} of {normalized.rank}, not the last ones"
    return f"it normalises {axes}: it stays decomposed, to be one FP32 island"


def _fuse(graph: GraphEditor, norm: Norm, normalized: NormalizedAxes) -> str | None:
    """Replaces the norm; returns the reason against it.

    The operator's scale and bias have exactly the shape of the normalised axes (bias may be left out, scale
    may not). `epsilon` is an FP32 attribute: it holds the value of an FP16, BF16 or FP32 constant exactly.
    """
    parts: list[str] = []
    if norm.scale is None:
        sizes = [size for size in normalized.sizes if size is not None]
        if len(sizes) < len(norm.axes):
            return "it has no scale, and a scale of ones needs the sizes of its axes, which are not known"
        parts.append(graph.add_constant(f"{norm.output}/scale", np.ones(sizes), like=norm.input))
    for tensor in filter(None, (norm.scale, norm.bias)):
        part = _shaped(graph, tensor, normalized)
        if part is None:
            return f"{tensor} is broadcast along an axis whose size is not known"
        parts.append(part)
    inputs, axis = [norm.input, *parts], -len(norm.axes)
    node = graph.make("LayerNormalization", inputs, [norm.output], axis=axis, epsilon=norm.epsilon)
    graph.replace_producer(norm.output, node)
    return None


def _shaped(graph: GraphEditor, tensor: str, normalized: NormalizedAxes) -> str | None:
    """A scale or bias with exactly the shape of the normalised axes; None if that is not known."""
    constant = weight(graph, tensor)
    if constant is None:
        return tensor
    value, rank = unrepeated(constant[0], normalized), normalized.rank or len(normalized.numbers)
    own = ((1,) * (rank - value.ndim) + value.shape)[-len(normalized.numbers) :]
    sizes = [d if s is None and d > 1 else s for d, s in zip(own, normalized.sizes, strict=True)]
    target = [s for s in sizes if s is not None]
    if len(target) < len(sizes):
        return None
    if list(constant[0].shape) == target:
        return tensor
    return graph.add_constant(f"{tensor}/normalised", np.broadcast_to(value.reshape(own), target).copy())
