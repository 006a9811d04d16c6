"""Models with random weights."""

from __future__ import annotations

import numpy as np
import onnx.parser
from onnx import numpy_helper

from rewriter.ir.model import Array, Model, load


def weighted(text: str, **shapes: tuple[int, ...]) -> Model:
    """A graph with random initializers of those shapes."""
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>\n' + text)
    rng = np.random.default_rng(7)
    for name, shape in shapes.items():
        value = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return load(proto)


def weights(source: Model) -> dict[str, Array]:
    return {t.name: source.array(t) for t in source.proto.graph.initializer}
