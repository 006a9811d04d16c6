"""Models that nothing can be done about, refused before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewriter.errors import ModelError, UnbuildableError
from rewriter.graph import label
from rewriter.graph.ops import DYNAMIC_INT8
from rewriter.model import Array, Model, walk_graphs
from rewriter.verification.expected import Expected
from rewriter.verification.not_finite import first_nan, nan_outputs

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


def nan_warnings(model: Model, judging: Sequence[Mapping[str, Array]], expected: Expected) -> list[str]:
    """Returns what to say of an original that gives NaN on finite inputs.

    Raises:
        ModelError: an output is NaN throughout, so that nothing can be verified.
    """
    shares = nan_outputs(expected.exact)
    if not shares:
        return []
    started = first_nan(model, judging)
    where = f", first in {started}" if started else ""
    outputs = ", ".join(f"{name} ({share:.3g} of it)" for name, share in shares.items())
    text = f"the original itself gives NaN on these inputs: {outputs}{where}"
    if any(share == 1.0 for share in shares.values()):
        raise ModelError(
            text,
            where=str(model.path) if model.path else "the model",
            hint="there is nothing to verify against: is the data prepared as in training, and is the export "
            "right? ONNX Runtime shows the same",
        )
    return [f"{text}; only the other elements are verified"]
