"""Warns of images that are scaled in another way than the model's first layers expect, and of constant data.

The commonest cause of "TensorRT lost accuracy" is data that was prepared differently than in training. None
of this is certain, so all findings are warnings, and no warning proves nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
from onnx import TensorProto

from rewriter.ir.graph import GraphView
from rewriter.ir.graph.match import other_operand
from rewriter.ir.graph.ops import SCALING
from rewriter.ir.model import Array, Model
from rewriter.ir.model.tensors import FLOATS
from rewriter.runtime.inputs import Samples

SPREAD = 20.0
"""Accepted distance from mean 0 in deviations, and from deviation 1 as a factor. Dark or flat images have a
deviation of 0.2; a forgotten or doubled division by 255 gives 255 or 0.004, so both sides have room."""

WIDE = 20.0  # larger values are pixels of 0..255: neither of 0..1, nor normalised

SAMPLES = 8  # the number of samples that are examined

STEPS = 12
"""Most nodes that an input is followed through: Cast, Transpose, Div, Sub, Div and some Identities."""


def data_warnings(model: Model, samples: Samples) -> tuple[str, ...]:
    """Conversions of the user's data, and its conflicts with the model; () for random data."""
    reasons = conflicts(model, samples) if samples.source.real else ()
    texts = (f"the data may be prepared in another way than the model expects: {why}" for why in reasons)
    return (*(f"inputs: {note}" for note in samples.notes), *texts)


def conflicts(model: Model, samples: Iterable[Mapping[str, Array]]) -> Iterator[str]:
    """Sentences about inputs of floats or bytes; the first `SAMPLES` are examined, one at a time."""
    ports = [p for p in model.signature.inputs if p.dtype in FLOATS | {TensorProto.UINT8}]
    figures: dict[str, list[Array]] = {port.name: [] for port in ports}
    ranks = {port.name: len(port.shape or ()) for port in ports}
    for sample in islice(samples, SAMPLES):
        for name, rows in figures.items():
            values = np.asarray(sample[name], np.float64)
            values = values[np.isfinite(values)]  # masks may hold -inf
            if values.size > 16:
                rows.append(np.array([values.min(), values.max(), values.mean(), values.std()]))
    graph = GraphView(model, model.proto.graph, {})  # without facts, which need a shape inference
    for name, rows in figures.items():
        if rows and all(low == high for low, high, *_ in rows):
            if len(model.signature.inputs) == 1:  # the states of a stream start with zeros
                yield (
                    f"input {name!r}: all values are {rows[0][0] + 0.0:g}; "
                    "measure on real data: constants hide faults and cause others"
                )
        elif rows and ranks[name] > 2 and (first := _normalization(graph, name)) is not None:
            yield from _scale_conflict(name, *first, np.array(rows))


def _normalization(graph: GraphView, name: str) -> tuple[float, float, str] | None:
    """Mean factor and offset that scale an image before its first layer with weights, and a text on them."""
    if "mask" in name.lower():
        return None
    operators, factor, offset = list[str](), np.ones(1), np.zeros(1)
    for _ in range(STEPS):
        node = graph.only_consumer(name)
        if node is None:
            break
        if node.op_type not in ("Cast", "Identity", "Transpose"):
            other = other_operand(node, name) if node.op_type in SCALING | {"Add", "Sub"} else None
            constant = graph.constant(other) if other else None
            if constant is None or constant.size not in (1, 3, 4):
                break
            value, first = constant.astype(np.float64).reshape(-1), node.input[0] == name
            if node.op_type == "Div":
                if not (first and np.all(value)):
                    break
                value = 1.0 / value
            if node.op_type in SCALING:
                factor, offset = factor * value, offset * value
            elif node.op_type == "Add":
                offset = offset + value
            else:
                factor, offset = (factor, offset - value) if first else (-factor, value - offset)
            operators.append(node.op_type)
        name = node.output[0]
    shown = [", ".join(f"{value:.4g}" for value in part.tolist()) for part in (factor, offset)]
    text = (
        f"the model normalises this input itself ({' and '.join(operators)}: x * ({shown[0]}) + ({shown[1]}))"
    )
    return (float(factor.mean()), float(offset.mean()), text) if operators else None


def _scale_conflict(name: str, factor: float, offset: float, text: str, rows: Array) -> Iterator[str]:
    """The sentence about data that is far from mean 0 and deviation 1 after the model's own constants.

    Args:
        rows: Smallest and largest value, mean and deviation of each sample.
    """
    low, high = float(rows[:, 0].min()), float(rows[:, 1].max())
    mean, deviation = (float(v) for v in rows[:, 2:].mean(axis=0))
    centre, width = mean * factor + offset, deviation * abs(factor)
    if abs(centre) <= SPREAD and 1.0 / SPREAD <= width <= SPREAD:
        return
    if width < 1.0 and low >= -WIDE and high <= WIDE:
        hint = "was the data divided by 255, or normalised, already?"
    else:
        hint = "must the data be divided by 255 first?" if high > WIDE else "prepare the data as for training"
    span = f"values {low:.3g}..{high:.3g} give mean {centre:.3g} and deviation {width:.3g}"
    yield f"input {name!r}: {text}; {span} after it; {hint}"
