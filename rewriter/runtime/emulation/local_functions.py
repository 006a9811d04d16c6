"""Replaces nodes of an emulation by calls of local functions."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import onnx.parser
from onnx import GraphProto, NodeProto

from rewriter.ir.model import Model, walk_graphs, walk_nodes

FIRST_OPSET, _LEAST_IR = 13, 8
"""The operators as the functions use them; local functions."""


def paired(
    given: Model, emulated: Model, operators: AbstractSet[str]
) -> Iterator[tuple[int, GraphProto, list[tuple[NodeProto, int]]]]:
    """The nodes of some operators in both models, graph by graph, inner graphs before their owners.

    Args:
        emulated: The result of `retype` on `given`, with the same nodes of these operators.

    Yields:
        Index of the scope, graph of `emulated`, and each node of `given` with its position in that graph.
        Nothing below `FIRST_OPSET`.
    """
    if emulated.opset < FIRST_OPSET:
        return
    pairs = zip(walk_graphs(given.proto.graph), walk_graphs(emulated.proto.graph), strict=True)
    for scope, (source, target) in reversed(list(enumerate(pairs))):
        originals = [n for n in source.node if n.op_type in operators]
        copies = [i for i, n in enumerate(target.node) if n.op_type in operators]
        yield scope, target, list(zip(originals, copies, strict=True))


def declare(model: Model, domain: str, *texts: str) -> None:
    """Add local functions to a model that calls them; `texts` have OPSET where its operator set belongs."""
    proto = model.proto
    if not any(node.domain == domain for node in walk_nodes(proto.graph)):
        return
    proto.ir_version = max(proto.ir_version, _LEAST_IR)
    proto.opset_import.add(domain=domain, version=1)
    for text in texts:
        proto.functions.append(onnx.parser.parse_function(text.replace("OPSET", str(model.opset))))
