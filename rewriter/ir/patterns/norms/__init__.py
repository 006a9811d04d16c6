"""Finds decomposed normalisations: LayerNorm, RMSNorm and L2 normalisation in small operators.

`find_norms` also finds those that cannot become one operator. Their squares overflow FP16 long before
their input does, so the planner needs each of them as a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.ir.base import Refusal
from rewriter.ir.graph import GraphEditor, label
from rewriter.ir.patterns.norms.affine import Affine, Frame, Tail, follow, unrepeated, weight
from rewriter.ir.patterns.norms.formulas import Core, Kind, match
from rewriter.ir.patterns.values import exposed, origins, positive, transparent

__all__ = ["Frame", "Kind", "Norm", "find_norms"]


@dataclass(frozen=True)
class Norm:
    """One decomposed normalisation.

    Attributes:
        kind: `layer-norm` subtracts a mean, `rms-norm` does not, `l2-normalize` divides by a sum
            of squares instead of their mean.
        input: The tensor that is normalised; of the same type as `output` where one exists.
        output: Output of the last node.
        axes: The normalised axes in order, counted from the front if the rank is known; () if they
            are computed, or all axes of a tensor of unknown rank.
        epsilon: As read from the constant, whatever its type; 0.0 if there is none.
        scale, bias: Tensors of the affine part; only a `layer-norm` has a bias.
        nodes: All nodes in graph order, without Constants; they have to be in one island.
        cancels: Its variance is E[x^2] - E[x]^2, whose digits cancel where |mean| exceeds the deviation.
        blocked: Why it must not become one operator; None if it may.
        remark: Why the next operator is not its scale or bias, where it looks like one.
    """

    kind: Kind
    input: str
    output: str
    axes: tuple[int, ...]
    epsilon: float
    scale: str | None
    bias: str | None
    nodes: tuple[NodeProto, ...]
    cancels: bool
    blocked: str | None
    remark: Refusal | None = None

    @property
    def name(self) -> str:
        """Its name in messages: that of its last node."""
        return label(self.nodes[-1])


def find_norms(graph: GraphEditor) -> list[Norm]:
    """The decomposed normalisations of one graph, in graph order; subgraphs have editors of their own."""
    nodes = graph.nodes
    order = {id(node): index for index, node in enumerate(nodes)}
    cores = (match(graph, node) for node in nodes)
    return [_norm(graph, core, order) for core in cores if core is not None]


def _norm(graph: GraphEditor, core: Core, order: dict[int, int]) -> Norm:
    shape = graph.shape(core.sources[0])
    axes = positive(core.axes, None if shape is None else len(shape)) or ()
    frame = Frame(axes, shape)
    known = Affine(core.scale, core.bias, biased=core.kind == "layer-norm")
    tail = follow(graph, core.output, frame, _outer_types(graph, core), known)
    source = _input(graph, core, tail)
    unit = {id(n): n for n in (*core.nodes, *tail.nodes)}
    blocked = _blocked(graph, core, tail, source, unit)
    for node in (*tail.views, *_between(graph, core.sources, source)):
        if not exposed(graph, node, unit):
            unit[id(node)] = node
    nodes = tuple(sorted(unit.values(), key=lambda n: order[id(n)]))
    return Norm(
        kind=core.kind,
        input=source,
        output=tail.output,
        axes=axes,
        epsilon=core.epsilon,
        scale=tail.scale,
        bias=tail.bias,
        nodes=nodes,
        cancels=core.cancels,
        blocked=blocked,
        remark=tail.remark,
    )


def _outer_types(graph: GraphEditor, core: Core) -> frozenset[int]:
    own = graph.dtype(core.output)
    types = (graph.dtype(t) for t in origins(graph, core.sources[0]))
    return frozenset(t for t in types if t is not None and t != own)


def _input(graph: GraphEditor, core: Core, tail: Tail) -> str:
    """The last tensor before the pattern that all its parts read, and that has the output's type.

    Where parts read x through Casts of their own, it is the input of the Casts.
    """
    chains = [list(origins(graph, s)) for s in core.sources]
    common = [t for t in chains[0] if all(t in chain for chain in chains)]
    alike = (t for t in [*common, *chains[0]] if graph.dtype(t) == graph.dtype(tail.output))
    return next(alike, common[0] if common else core.sources[0])


def _between(graph: GraphEditor, sources: tuple[str, ...], source: str) -> list[NodeProto]:
    """Identities and Casts between the input and the pattern, the last ones first."""
    found: list[NodeProto] = []
    for tensor in sources:
        for name in origins(graph, tensor):
            node = graph.producer(name)
            if name == source or node is None or not transparent(graph, node):
                break
            found.append(node)
    return found


def _blocked(
    graph: GraphEditor, core: Core, tail: Tail, source: str, unit: dict[int, NodeProto]
) -> str | None:
    reasons = list(core.faults)
    if tail.blocked:
        reasons.append(tail.blocked)
    if core.axes is None:
        reasons.append("its axes are computed")
    if graph.dtype(tail.output) == TensorProto.DOUBLE:
        reasons.append("it computes in float64, which the operator would not (run drop-double before)")
    elif graph.dtype(source) != graph.dtype(tail.output):
        reasons.append(f"{source} and {tail.output} have different types")
    inner = [n for n in unit.values() if tail.output not in n.output]
    kept = next((reason for node in inner if (reason := exposed(graph, node, unit))), None)
    if kept:
        reasons.append(kept)
    return "; ".join(reasons) or None


class _UnknownSizeError(Exception):
    """The operator cannot be written, as a normalised axis has no known size."""


def frame(graph: GraphEditor, norm: Norm) -> Frame:
    """The axes of a norm and what is known of their sizes."""
    return Frame(norm.axes, graph.shape(norm.input))


def replace(graph: GraphEditor, norm: Norm) -> str | None:
    """Replaces `norm`, whose axes are the last ones, by LayerNormalization.

    The operator normalises over the axes from `axis` to the last, its scale and bias have exactly
    the shape of those axes (bias may be left out, scale may not), and `epsilon` is an FP32
    attribute: it holds the value of an FP16, BF16 or FP32 constant exactly.

    Returns:
        The reason against it, with the graph unchanged; None if it was done.
    """
    where = frame(graph, norm)
    try:
        parts = [_ones(graph, norm, where) if norm.scale is None else _shaped(graph, norm.scale, where)]
        if norm.bias is not None:
            parts.append(_shaped(graph, norm.bias, where))
    except _UnknownSizeError as error:
        return str(error)
    inputs, axis = [norm.input, *parts], -len(norm.axes)
    node = graph.make("LayerNormalization", inputs, [norm.output], axis=axis, epsilon=norm.epsilon)
    graph.substitute(norm.output, node)
    return None


def _ones(graph: GraphEditor, norm: Norm, where: Frame) -> str:
    sizes = [s for s in where.sizes if s is not None]
    if len(sizes) != len(where.axes):
        raise _UnknownSizeError(
            "it has no scale, and a scale of ones needs the sizes of its axes, which are not known"
        )
    return graph.add_constant(f"{norm.output}/scale", np.ones(sizes), like=norm.input)


def _shaped(graph: GraphEditor, tensor: str, where: Frame) -> str:
    """A scale or bias with exactly the shape of the normalised axes: `tensor` itself if it has it."""
    known = weight(graph, tensor)
    if known is None:
        return tensor
    value, rank = unrepeated(known[0], where), where.rank or len(where.axes)
    whole = (1,) * (rank - value.ndim) + value.shape
    own = [whole[a] for a in where.axes]
    sizes = [d if s is None and d > 1 else s for d, s in zip(own, where.sizes, strict=True)]
    target = [s for s in sizes if s is not None]
    if len(target) != len(sizes):
        raise _UnknownSizeError(f"{tensor} is broadcast along an axis whose size is not known")
    if list(known[0].shape) == target:
        return tensor
    return graph.add_constant(f"{tensor}/normalised", np.broadcast_to(value.reshape(own), target).copy())
