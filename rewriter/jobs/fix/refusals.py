"""Models that nothing can be done about, refused before anything is measured."""

from __future__ import annotations

from rewriter.errors import UnbuildableError
from rewriter.graph import label
from rewriter.graph.ops import DYNAMIC_INT8
from rewriter.model import Model, walk_graphs

LISTED = 3
"""Nodes that a refusal names."""


def refuse_dynamic_int8(model: Model) -> None:
    """Refuses operators of dynamic INT8 quantisation: TensorRT has no importer for any of them.

    Raises:
        UnbuildableError: the model has such nodes; it names them, and what to do instead.
    """
    found = [node for g in walk_graphs(model.proto.graph) for node in g.node if node.op_type in DYNAMIC_INT8]
    if not found:
        return
    counts = {op: sum(node.op_type == op for node in found) for op in {node.op_type: 0 for node in found}}
    ops = ", ".join(f"{count} {op}" for op, count in counts.items())
    names = ", ".join(f"{label(node)} ({node.op_type})" for node in found[:LISTED])
    more = f", and {len(found) - LISTED} more" if len(found) > LISTED else ""
    raise UnbuildableError(
        f"it is quantised dynamically to INT8 ({ops}), which TensorRT does not build: {names}{more}",
        where=str(model.path) if model.path else "the model",
        hint="take the FP32 model that it was made from; for INT8, quantise that one statically, as Q/DQ "
        "nodes (onnxruntime.quantization.quantize_static with QuantFormat.QDQ)",
    )
