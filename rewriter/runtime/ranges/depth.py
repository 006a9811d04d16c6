"""Ranges in the order of the network's depth, as reports draw them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from rewriter.ir.graph import display_name, reads
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.plan import Range, node_key
from rewriter.runtime.ranges.reductions import Key


@dataclass(frozen=True, slots=True)
class TensorAtDepth:
    """One measured tensor and its place in the network."""

    # index among the nodes with measured results, in graph order; bodies of branches and loops follow their
    # graph. A constant has the depth of the first node that reads it
    depth: int
    tensor: str  # its name; `node`, `op`: its producer, or the reader of a constant
    node: str
    op: str
    key: str
    range: Range
    constant: bool = False


def along_depth(model: Model, ranges: Mapping[Key, Range]) -> tuple[TensorAtDepth, ...]:
    """Returns every tensor of the model that has a range, in the order of its graphs and nodes."""
    found: list[TensorAtDepth] = []
    depth = 0
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        constants = {tensor.name for tensor in graph.initializer}
        constants.update(node.output[0] for node in graph.node if node.op_type == "Constant")
        for node in graph.node:
            if node.op_type != "Constant":
                tensors = list(_of_node(scope, node, depth, constants, ranges))
                found.extend(tensors)
                depth += any(not tensor.constant for tensor in tensors)
    return tuple(found)


def _of_node(
    scope: int, node: NodeProto, depth: int, constants: set[str], ranges: Mapping[Key, Range]
) -> Iterator[TensorAtDepth]:
    """The node's results, and the constants that no earlier node reads, which leave `constants`."""
    name, key = display_name(node), node_key(scope, node)
    for output in node.output:
        if (scope, output) in ranges:
            yield TensorAtDepth(depth, output, name, node.op_type, key, ranges[scope, output])
    for tensor in dict.fromkeys(reads(node)):
        if tensor in constants and (scope, tensor) in ranges:
            constants.discard(tensor)
            yield TensorAtDepth(depth, tensor, name, node.op_type, key, ranges[scope, tensor], constant=True)
