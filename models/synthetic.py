"""Graphs of any size for timing passes: chains of MatMul, Add, Relu, Mul and decomposed LayerNorms on small tensors."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models.common import Built, rng_for

WIDTH = 16
ROWS = 4


class Chain:
    """Builds a graph node by node; every value is named by a number."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.numbers = rng, itertools.count()
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, array: np.ndarray) -> str:
        """Adds an initializer; returns its name."""
        name = f"w{next(self.numbers)}"
        self.weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        """Adds a node; returns the name of its output."""
        name = f"t{next(self.numbers)}"
        self.nodes.append(
            helper.make_node(kind, list(inputs), [name], name=f"{kind}_{len(self.nodes)}", **attributes)
        )
        return name


def block(chain: Chain, x: str, norm: bool) -> str:
    """A residual block of 7 nodes, after the 9 of a decomposed LayerNorm if `norm`; all values have unit variance."""
    start, rng = x, chain.rng
    if norm:
        mean = chain.op("ReduceMean", x, axes=[-1], keepdims=1)
        centred = chain.op("Sub", x, mean)
        square = chain.op("Pow", centred, chain.weight(np.array(2.0)))
        variance = chain.op("ReduceMean", square, axes=[-1], keepdims=1)
        deviation = chain.op("Sqrt", chain.op("Add", variance, chain.weight(np.array(1e-5))))
        normed = chain.op("Div", centred, deviation)
        x = chain.op(
            "Add",
            chain.op("Mul", normed, chain.weight(rng.uniform(0.5, 1.5, WIDTH))),
            chain.weight(0.1 * rng.standard_normal(WIDTH)),
        )
    up = chain.op("MatMul", x, chain.weight(rng.standard_normal((WIDTH, WIDTH)) * WIDTH**-0.5))
    active = chain.op("Relu", chain.op("Add", up, chain.weight(0.1 * rng.standard_normal(WIDTH))))
    down = chain.op("MatMul", active, chain.weight(rng.standard_normal((WIDTH, WIDTH)) * WIDTH**-0.5))
    scaled = chain.op("Mul", down, chain.weight(rng.uniform(0.2, 0.4, WIDTH)))
    # The stream shrinks and the branch is small, so that rounding does not grow over thousands of blocks.
    return chain.op("Add", chain.op("Mul", start, chain.weight(np.array(0.7))), scaled)


def synthetic(nodes: int) -> Built:
    """A graph of `nodes` nodes at opset 17, x float32 [4, 16] to y of the same shape; every third block has a norm."""
    chain, x = Chain(rng_for("synthetic")), "x"
    for number in itertools.count():
        if len(chain.nodes) + 16 > nodes:
            break
        x = block(chain, x, norm=number % 3 == 0)
    while len(chain.nodes) < nodes - 1:
        x = chain.op("Relu" if len(chain.nodes) % 2 else "Tanh", x)
    chain.nodes.append(helper.make_node("Identity", [x], ["y"], name="last"))
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(chain.nodes, "synthetic", value[:1], value[1:], chain.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Built(
        model,
        lambda index: {
            "x": rng_for("synthetic_sample", index).standard_normal((ROWS, WIDTH)).astype(np.float32)
        },
    )
