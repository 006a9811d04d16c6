"""Models with random weights, and activations whose channels go together, for compensate-rounding."""

from __future__ import annotations

import numpy as np
import onnx.parser
from graphs import apply, run
from onnx import numpy_helper

from rewriter.base import Calibration, Context
from rewriter.model import Array, Model, load
from rewriter.passes.compensate_rounding import CompensateRounding
from rewriter.pipeline.driver import PassResult

Feeds = dict[str, Array]


def related(*shape: int, seed: int = 0, axis: int = -1) -> Array:
    """Activations whose channels go together, as those of networks do: four causes and a little noise."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).standard_normal((4, shape[axis]))
    size = list(np.delete(shape, axis))
    values = rng.standard_normal((*size, 4)) @ mixing + 0.1 * rng.standard_normal((*size, shape[axis])) + 0.5
    return np.moveaxis(values, -1, axis).astype(np.float32)


def smooth(*shape: int, seed: int = 0, axis: int = 1) -> Array:
    """Images whose neighbouring points go together: a level for each channel, and a little noise."""
    rng = np.random.default_rng(seed)
    level = rng.standard_normal((*shape[: axis + 1], *(1 for _ in shape[axis + 1 :])))
    return (level + 0.1 * rng.standard_normal(shape)).astype(np.float32)


def weighted(text: str, **shapes: tuple[int, ...]) -> Model:
    """A graph with random initializers of those shapes."""
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        value = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return load(proto)


def compensated(
    source: Model, *samples: Feeds, real: bool = True, **context: object
) -> tuple[Model, PassResult]:
    given_ = Calibration(list(samples), real)
    return apply(CompensateRounding(), source, Context(calibration=given_, **context))  # type: ignore[arg-type]


def weights(source: Model) -> dict[str, Array]:
    return {t.name: source.array(t) for t in source.proto.graph.initializer}


def on_grid(value: Array, kind: type = np.float16) -> bool:
    return bool(np.array_equal(value.astype(kind).astype(np.float32), value))


def error(source: Model, other: Model, feeds: Feeds) -> float:
    return float(
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(run(source, feeds), run(other, feeds), strict=True)))
    )


def to_nearest(source: Model) -> Model:
    rounded = source.copy()
    for stored in rounded.proto.graph.initializer:
        value = source.array(stored).astype(np.float16).astype(np.float32)
        stored.CopyFrom(rounded.detached_tensor(stored.name, value))
    return rounded


MATMUL = "g (float[1,96,48] x) => (float[1,96,24] y) { y = MatMul(x, w) }"
