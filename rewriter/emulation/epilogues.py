"""Which FP16 products TensorRT sums in FP32, and does not round, because of what reads them.

Measured on one H200 with TensorRT-RTX 1.6.1, strongly typed: a MatMul by a constant weight whose result goes
through a Cast to FP32 into an FP32 Add gave a relative error of 2.07e-4 after the final rounding at depths of
768, 3072 and 4096: FP32 sums, and a product that was never FP16. Projections of one tensor by several
weights (Q, K and V) gave 1.1e-3 with and without it, and Conv 7.3e-4 and 1.73e-3 (depths 576 and 4096):
FP16 sums.
Where the Cast is the output, sums beyond 65504 did not overflow; whether it is rounded was not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto, TensorProto

from rewriter.edits import attribute
from rewriter.facts import Facts
from rewriter.model import Model, walk_graphs

_PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True)
class Epilogues:
    """Results of FP16 products, each as the index of its scope and its name.

    Attributes:
        summed: Of those with FP32 sums.
        exact: Of those that are not rounded, either.
    """

    summed: AbstractSet[tuple[int, str]] = field(default_factory=frozenset)
    exact: AbstractSet[tuple[int, str]] = field(default_factory=frozenset)


def find_epilogues(model: Model, facts: Facts) -> Epilogues:
    """The products of a model that has its types already."""
    summed: set[tuple[int, str]] = set()
    exact: set[tuple[int, str]] = set()
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        outputs = {value.name for value in graph.output}
        weights = _constants(graph)
        known = facts.main | facts.scopes[scope]
        for node in graph.node:
            result = known.get(node.output[0]) if node.output else None
            if node.op_type not in _PRODUCTS or result is None or result.dtype != TensorProto.FLOAT16:
                continue
            name, casts = node.output[0], readers.get(node.output[0], [])
            if not casts or name in outputs or not all(map(_widens, casts)):
                continue
            widened = [cast.output[0] for cast in casts]
            if all(t in outputs and not readers.get(t) for t in widened):
                summed.add((scope, name))
            elif _is_added(widened, readers, outputs) and _stands_alone(node, readers, weights):
                summed.add((scope, name))
                exact.add((scope, name))
    return Epilogues(summed, exact)


def _constants(graph: GraphProto) -> set[str]:
    made = {node.output[0] for node in graph.node if node.op_type == "Constant"}
    return made | {tensor.name for tensor in graph.initializer}


def _widens(node: NodeProto) -> bool:
    return node.op_type == "Cast" and attribute(node, "to") == TensorProto.FLOAT


def _is_added(widened: Sequence[str], readers: dict[str, list[NodeProto]], outputs: set[str]) -> bool:
    found = [node for name in widened for node in readers.get(name, ())]
    return bool(found) and outputs.isdisjoint(widened) and all(node.op_type == "Add" for node in found)


def _stands_alone(node: NodeProto, readers: dict[str, list[NodeProto]], weights: set[str]) -> bool:
    """Whether it is the only product of what it reads with a constant weight."""
    data = [name for name in node.input[:2] if name not in weights]
    return len(data) == 1 and sum(_projects(other, weights) for other in readers[data[0]]) == 1


def _projects(node: NodeProto, weights: set[str]) -> bool:
    return node.op_type in _PRODUCTS and any(name in weights for name in node.input[:2])
