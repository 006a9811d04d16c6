"""Hazard rules about where model and data come from: converters, other data, a lower-precision original."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.survey import LARGEST, Survey
from rewriter.ir.graph import attribute, casts_to, label
from rewriter.ir.graph.ops import VIEWS
from rewriter.ir.model.schemas import SHORT_NAMES

NATIVE_INT64 = (9,)
"""From TensorRT 9.0 on INT64 is a type of its own; before, the parser clamps to INT32 (its change log)."""

DEVIATIONS = 50.0
"""Standard deviations from the mean of a BatchNormalization, both as trained: no data is that far out."""


def cast_pairs(survey: Survey) -> Iterator[Hazard]:
    """FP32 tensors that are cast to a lower type and back: they are rounded there, and may overflow.

    Converters to FP16 leave such pairs around nodes that they keep in FP32. Optimisers that remove the
    pairs change results: https://github.com/microsoft/onnxruntime/issues/20346. TensorRT-RTX 1.6.1 keeps
    them (measured).
    """
    for node in survey.graph.nodes:
        to = attribute(node, "to", 0) if node.op_type == "Cast" else 0
        if to not in LARGEST or survey.graph.dtype(node.input[0]) != TensorProto.FLOAT:
            continue
        readers = survey.graph.consumers(node.output[0])
        back = next((r for r in readers if casts_to(r, TensorProto.FLOAT)), None)
        if back is None:
            continue
        measured = survey.range(node.input[0])
        beyond = to == TensorProto.FLOAT16 and measured is not None and measured.absmax > LARGEST[to]
        reason = (
            f"{label(node)} rounds {node.input[0]} to {SHORT_NAMES[to].upper()}, and {label(back)} goes back"
        )
        yield survey.hazard(node, "cast-pair", reason, node.input[0], "error" if beyond else None)


def wide_integers(survey: Survey) -> Iterator[Hazard]:
    """INT64 constants beyond INT32, which TensorRT before 9.0 clamps.

    Constants that only Slice reads are left out: clamped or not, they mean "to the end".
    """
    target = survey.request.target
    if target.library != "tensorrt" or (target.version and target.version >= NATIVE_INT64):
        return
    span = np.iinfo(np.int32)
    severity: Severity | None = "error" if target.version else None
    for node in survey.graph.nodes:
        for tensor in filter(None, node.input):
            value = survey.graph.constant(tensor)
            if value is None or value.dtype != np.int64 or not value.size or _feeds_slice(survey, node):
                continue
            if value.max() > span.max or value.min() < span.min:
                widest = value.reshape(-1)[np.argmax(np.abs(value.astype(np.float64)))]
                reason = f"{tensor} holds {widest}: TensorRT before 9.0 clamps INT64 to INT32"
                yield Hazard(node, "wide-integer", reason, tensor, severity=severity)


def _feeds_slice(survey: Survey, node: NodeProto) -> bool:
    """True if the node, or every reader of its view of a constant, is a Slice."""
    if node.op_type in VIEWS - {"Slice"}:
        readers = [reader for out in node.output for reader in survey.graph.consumers(out)]
        return bool(readers) and all(reader.op_type == "Slice" for reader in readers)
    return node.op_type == "Slice"


def outside_statistics(survey: Survey) -> Iterator[Hazard]:
    """Activations far from the mean and variance that a BatchNormalization recorded in training."""
    for node in survey.nodes:
        if node.op_type != "BatchNormalization" or len(node.input) < 5:
            continue
        mean, variance = (survey.constant(t) for t in node.input[3:5])
        measured = survey.range(node.input[0])
        if mean is None or variance is None or measured is None or not mean.size:
            continue
        spread = DEVIATIONS * np.sqrt(np.maximum(variance.astype(np.float64), 0.0))
        low, high = float(np.min(mean - spread)), float(np.max(mean + spread))
        if measured.low < low or measured.high > high:
            reason = f"{label(node)} was trained on [{low:.3g}, {high:.3g}] and gets {measured}"
            yield survey.hazard(node, "outside-statistics", reason, node.input[0])


def fp16_reference(survey: Survey) -> Iterator[Hazard]:
    """Models in FP16 already: their results on ONNX Runtime's CPU are no reference.

    Seen in https://github.com/NVIDIA/TensorRT/issues/4355
    """
    if survey.mixed and survey.graph.is_main and survey.nodes:
        yield Hazard(survey.nodes[0], "fp16-reference", "the model computes in FP16 or BF16 already")
