"""The main graph in parts that run one after the other, each from what those before it hand on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from math import prod

from onnx import GraphProto, NodeProto

from rewriter.data.ranges.binades import leading_to
from rewriter.graph import reads
from rewriter.rewriting.rounding.shapes import Shapes

_BYTES = 4
"""Of a number that is handed on: the model computes in FP32, and there are few others."""


@dataclass(frozen=True)
class Segment:
    """A part of the main graph.

    Attributes:
        nodes: In the graph's order.
        given: Tensors of earlier parts that are read here.
        later: Tensors, of here or handed on before, that later parts read.
    """

    nodes: tuple[NodeProto, ...]
    given: tuple[str, ...]
    later: tuple[str, ...]

    def size(self, shapes: Shapes) -> int | None:
        """Bytes that are handed on; None if a shape is not known."""
        known = [shapes.get(name) for name in self.later]
        sizes = [_BYTES * prod(shape) for shape in known if shape is not None]
        return sum(sizes) if len(sizes) == len(known) else None


def segment(
    graph: GraphProto, wanted: Collection[str], afterwards: Collection[str], held: AbstractSet[str]
) -> Segment:
    """What has to run for the tensors `wanted`, if those `held` are at hand.

    Args:
        afterwards: Tensors that later parts will be asked for.
    """
    nodes = leading_to(graph, wanted, held)
    computed = {name: None for node in nodes for name in node.output if name}
    given = (name for name in _named(nodes, wanted) if name in held and name not in computed)
    at_hand = computed.keys() | held
    rest = leading_to(graph, afterwards, at_hand)
    later = (name for name in _named(rest, afterwards) if name in at_hand)
    return Segment(tuple(nodes), tuple(dict.fromkeys(given)), tuple(dict.fromkeys(later)))


def _named(nodes: Collection[NodeProto], wanted: Collection[str]) -> Iterator[str]:
    return chain(chain.from_iterable(map(reads, nodes)), wanted)
