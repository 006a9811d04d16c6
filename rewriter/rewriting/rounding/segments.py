"""Parts of the main graph that run one after another, and the shapes of their tensors for one sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from math import prod

from onnx import GraphProto, NodeProto

from rewriter.data.ranges.binades import keep_only, leading_to
from rewriter.data.ranges.instrument import unused_prefix
from rewriter.data.ranges.reductions import Emitter, Names
from rewriter.engines.onnxruntime import Session
from rewriter.graph import reads
from rewriter.model import Array, Model
from rewriter.model.facts import at_sizes

Shapes = Mapping[str, tuple[int, ...]]

_BYTES = 4
"""Size of an element that is passed on: nearly all of them are FP32."""


@dataclass(frozen=True)
class Segment:
    """A part of the main graph.

    Attributes:
        nodes: In the graph's order.
        given: Tensors of earlier parts that these nodes read.
        later: Tensors, computed here or earlier, that later parts read.
    """

    nodes: tuple[NodeProto, ...]
    given: tuple[str, ...]
    later: tuple[str, ...]

    def size(self, shapes: Shapes) -> int | None:
        """Bytes that are passed on to later parts; None if a shape is unknown."""
        known = [shapes.get(name) for name in self.later]
        sizes = [_BYTES * prod(shape) for shape in known if shape is not None]
        return sum(sizes) if len(sizes) == len(known) else None


def segment(
    graph: GraphProto, wanted: Collection[str], afterwards: Collection[str], held: AbstractSet[str]
) -> Segment:
    """Returns the part that computes the tensors `wanted`, given those `held`.

    Args:
        afterwards: Tensors that later parts have to compute.
    """
    nodes = leading_to(graph, wanted, held)
    computed = {name: None for node in nodes for name in node.output if name}
    given = (name for name in _read_by(nodes, wanted) if name in held and name not in computed)
    available = computed.keys() | held
    rest = leading_to(graph, afterwards, available)
    later = (name for name in _read_by(rest, afterwards) if name in available)
    return Segment(tuple(nodes), tuple(dict.fromkeys(given)), tuple(dict.fromkeys(later)))


def _read_by(nodes: Collection[NodeProto], wanted: Collection[str]) -> Iterator[str]:
    return chain(chain.from_iterable(map(reads, nodes)), wanted)


def inferred_shapes(model: Model, feeds: Mapping[str, Array]) -> Shapes:
    """Shapes of the main graph's tensors, as far as shape inference derives them from a sample's."""
    found = at_sizes(model, feeds).main
    return {name: facts.sizes for name, facts in found.items() if facts.sizes is not None}


def shapes(model: Model, tensors: Collection[str], feeds: Mapping[str, Array]) -> Shapes:
    """Shapes of tensors of the main graph: inferred, or measured where they depend on values.

    Raises:
        NoKernelError, ArithmeticRunError: the sample does not run; the message names the node.
    """
    known = inferred_shapes(model, feeds)
    missing = [name for name in tensors if name not in known]
    if not missing:
        return known
    probe = model.copy()
    emit = emitter(probe)
    emit.nodes.extend(leading_to(probe.proto.graph, missing))
    names = [emit.add("Shape", [name]) for name in missing]
    keep_only(probe, emit.nodes, names)
    with Session(probe) as session:
        computed = session.run(feeds)
    return {**known, **{t: tuple(computed[name].tolist()) for t, name in zip(missing, names, strict=True)}}


def emitter(model: Model) -> Emitter:
    """Returns an emitter of new nodes for the main graph."""
    return Emitter(Names(unused_prefix(model.proto, "rows:"), model.opset), [])
