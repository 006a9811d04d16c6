"""Hazard rules about what converters leave behind: roundings in FP32, and integers beyond 32 bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.graph import attribute, casts_to, label
from rewriter.hazards.kinds import Severity
from rewriter.hazards.survey import VIEWS, Hazard, Survey
from rewriter.patterns.split_parts import is_made

NATIVE_INT64 = (9,)
"""From TensorRT 9.0 on INT64 is a type of its own; before, the parser clamps to INT32 (its change log)."""

LOWER: dict[int, str] = {TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16"}


def cast_pairs(survey: Survey) -> Iterator[Hazard]:
    """An FP32 tensor that is cast to a lower type and back: it is rounded there, and may overflow there.

    Converters to FP16 leave such pairs round what they keep in FP32, and optimisers that take them for
    nothing change results: https://github.com/microsoft/onnxruntime/issues/20346. TensorRT-RTX 1.6.1 was
    measured to keep them.
    """
    for node in survey.graph.nodes:
        to = attribute(node, "to", 0) if node.op_type == "Cast" else 0
        if to not in LOWER or survey.graph.dtype(node.input[0]) != TensorProto.FLOAT:
            continue
        back = next(
            (r for r in survey.graph.consumers(node.output[0]) if casts_to(r, TensorProto.FLOAT)), None
        )
        if back is not None and not _splits(survey, back):
            measured = survey.range(node.input[0])
            beyond = to == TensorProto.FLOAT16 and measured is not None and measured.absmax > 65504.0
            severity: Severity | None = "error" if beyond else None
            reason = f"{label(node)} rounds {node.input[0]} to {LOWER[to]}, and {label(back)} goes back"
            yield Hazard(node, "cast-pair", reason, node.input[0], measured, severity)


def _splits(survey: Survey, back: NodeProto) -> bool:
    """Whether the pass split-products alone reads what is rounded: it takes the rest along."""
    readers = survey.graph.consumers(back.output[0])
    return bool(readers) and all(map(is_made, readers))


def wide_integers(survey: Survey) -> Iterator[Hazard]:
    """INT64 constants beyond INT32, which TensorRT before 9.0 clamps.

    Where Slice reads them they say "as far as it goes", clamped or not.
    """
    target = survey.request.target
    if target.library != "tensorrt" or (target.version and target.version >= NATIVE_INT64):
        return
    span = np.iinfo(np.int32)
    severity: Severity | None = "error" if target.version else None
    for node in survey.graph.nodes:
        for tensor in filter(None, node.input):
            value = survey.graph.constant(tensor)
            if value is None or value.dtype != np.int64 or not value.size or _clamps(survey, node):
                continue
            if value.max() > span.max or value.min() < span.min:
                widest = value.reshape(-1)[np.argmax(np.abs(value.astype(np.float64)))]
                reason = f"{tensor} holds {widest}: TensorRT before 9.0 clamps INT64 to INT32"
                yield Hazard(node, "wide-integer", reason, tensor, severity=severity)


def _clamps(survey: Survey, node: NodeProto) -> bool:
    """Whether the node, or all that read its view of the constant, are Slices."""
    if node.op_type in VIEWS - {"Slice"}:
        readers = [reader for out in node.output for reader in survey.graph.consumers(out)]
        return bool(readers) and all(reader.op_type == "Slice" for reader in readers)
    return node.op_type == "Slice"
