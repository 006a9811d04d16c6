"""Replaces nodes of an emulation: by calls of local functions, and divisions by constants by products.

TensorRT multiplies by the reciprocal of a constant, rounded to FP16. It divides exactly where nothing but the
graph's output reads the quotient (one H200, TensorRT-RTX 1.6.1; docs/accuracy.md#rounded-reciprocals).
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import numpy as np
import onnx.parser
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from rewriter.ir.graph import open_graphs
from rewriter.ir.graph.node_list import spelled_out
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.target.fusion import rounded_reciprocal


def paired(
    original: Model, emulated: Model, operators: AbstractSet[str]
) -> Iterator[tuple[int, GraphProto, list[tuple[NodeProto, int]]]]:
    """The nodes of some operators in both models, graph by graph, inner graphs before their owners.

    Yields the index of the scope, the graph of `emulated`, which `retype` made of `original`, and each node
    of `original` with its position in that graph.
    """
    pairs = zip(walk_graphs(original.proto.graph), walk_graphs(emulated.proto.graph), strict=True)
    for scope, (source, target) in reversed(list(enumerate(pairs))):
        originals = [n for n in source.node if n.op_type in operators]
        copies = [i for i, n in enumerate(target.node) if n.op_type in operators]
        yield scope, target, list(zip(originals, copies, strict=True))


def declare(model: Model, domain: str, *texts: str) -> None:
    """Add local functions (`spelled_out`) to a model that calls them; OPSET in a text is its operator set."""
    proto = model.proto
    if not any(node.domain == domain for node in walk_nodes(proto.graph)):
        return
    proto.ir_version = max(proto.ir_version, 8)  # the first that has local functions
    proto.opset_import.add(domain=domain, version=1)
    for text in texts:
        proto.functions.append(
            onnx.parser.parse_function(spelled_out(text).replace("OPSET", str(model.opset)))
        )


def multiply_by_reciprocals(emulated: Model, original: Model) -> None:
    """Turn the FP16 divisions of `original` by constants into products in `emulated`, made by `retype`."""
    every = list(paired(original, emulated, frozenset({"Div"})))
    graphs = open_graphs(original) if any(pairs for *_, pairs in every) else []
    for scope, graph, pairs in every if graphs else ():
        source = graphs[scope]
        read = _computed_with(source.graph)
        for node, position in pairs:
            if source.dtype(node.output[0]) != TensorProto.FLOAT16 or node.output[0] not in read:
                continue
            divisor = source.scalar(node.input[1])
            factor = None if divisor is None else rounded_reciprocal(divisor)
            if factor is not None:
                product, name = graph.node[position], f"{node.output[0]}/reciprocal"
                value = np.full(source.value(node.input[1]).shape, factor, np.float32)  # it broadcasts alike
                graph.initializer.append(numpy_helper.from_array(value, name))
                product.op_type, product.input[1] = "Mul", name


def _computed_with(graph: GraphProto) -> set[str]:
    """The tensors that a node reads, apart from Casts whose results are only outputs."""
    read: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type != "Cast" or node.output[0] in read:
            read.update(node.input)
    return read
