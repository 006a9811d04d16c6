"""Small models with external data that say which weights they belong to."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rewriter.ir.model import Model, load


def made(value: float) -> Model:
    """y = x + w, with a weight of 4 KiB that holds one value, and the value as the name of the graph."""
    weight = numpy_helper.from_array(np.full(1024, value, np.float32), "w")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1024]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"], "add")], str(value), ports[:1], ports[1:], [weight]
    )
    model = load(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)]))
    model.external = True
    return model


def foreign(path: Path, value: float, location: str) -> Path:
    """The model as another program saves it."""
    proto = made(value).whole()
    onnx.save(proto, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def value(path: Path) -> float:
    """The value of a model's weight, which has to be the one that its graph belongs to."""
    model = load(path)
    (only,) = np.unique(model.weights["w"])
    assert float(model.proto.graph.name) == only
    return float(only)
