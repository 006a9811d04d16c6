"""Hazard rules about what is no numeric fault of the model: data it was not made for, a wrong reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rewriter.graph import label
from rewriter.hazards.survey import Hazard, Survey

DEVIATIONS = 50.0
"""Standard deviations from the mean, both as a BatchNormalization learned them: no data is that far out."""


def outside_statistics(survey: Survey) -> Iterator[Hazard]:
    """Activations far from the mean and variance that a BatchNormalization recorded in training."""
    for node in survey.nodes:
        if node.op_type != "BatchNormalization" or len(node.input) < 5:
            continue
        mean, variance = (survey.graph.constant(survey.source(t)) for t in node.input[3:5])
        measured = survey.range(node.input[0])
        if mean is None or variance is None or measured is None or not mean.size:
            continue
        spread = DEVIATIONS * np.sqrt(np.maximum(variance.astype(np.float64), 0.0))
        low, high = float(np.min(mean - spread)), float(np.max(mean + spread))
        if measured.low < low or measured.high > high:
            text = f"{label(node)} was trained on [{low:.3g}, {high:.3g}] and gets {measured}"
            yield Hazard(node, "outside-statistics", text, node.input[0], measured)


def fp16_reference(survey: Survey) -> Iterator[Hazard]:
    """A model in FP16 already: what ONNX Runtime's CPU makes of it is no reference.

    Seen in https://github.com/NVIDIA/TensorRT/issues/4355
    """
    if survey.mixed and survey.graph.is_main and survey.nodes:
        reason = "the model computes in FP16 or BF16 already"
        yield Hazard(survey.nodes[0], "fp16-reference", reason)
