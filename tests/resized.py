"""What the tests of postpone-resize share: small graphs with Resizes and pointwise Convs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from graphs import keeps_results
from onnx import numpy_helper

from rewriter.ir.model import Model, load
from rewriter.passes.postpone_resize import PostponeResize

TWICE = "float[4] twice = {1, 1, 2, 2}, float[4] four = {1, 1, 4, 4}, float[4] same = {1, 1, 1, 1}"
INPUTS = "float[1,4,8,8] a, float[1,6,4,4] b, float[1,5,2,2] c"
LINEAR = 'Resize<mode = "linear">'


def model(
    body: str, inputs: str = INPUTS, output: str = "y", *, constants: str = TWICE, opset: int = 17
) -> Model:
    """A graph with random FP32 weights: w of 15 channels, v of 6, u of 10, all to 3; t of 6 to 8; bias."""
    rng = np.random.default_rng(0)
    shapes = {"w": (3, 15, 1, 1), "v": (3, 6, 1, 1), "u": (3, 10, 1, 1), "t": (8, 6, 1, 1), "bias": (3,)}
    weights = ", ".join(f"float[{','.join(map(str, s))}] {n}" for n, s in shapes.items())
    header = f'<ir_version: 8, opset_import: ["" : {opset}]>'
    source = onnx.parser.parse_model(f"{header} g ({inputs}, {weights}) => ({output}) <{constants}> {body}")
    kept = [port for port in source.graph.input if port.name not in shapes]
    del source.graph.input[:]
    source.graph.input.extend(kept)
    read = {name for node in source.graph.node for name in node.input}
    source.graph.initializer.extend(
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
        if name in read
    )
    return load(onnx.shape_inference.infer_shapes(source, data_prop=True))


def holds(before: Model, after: Model) -> None:
    keeps_results(before, after, PostponeResize(work=0))


SHAPED = f"""{{
    n = Shape(b)
    zero = Constant<value_ints = [0]>()
    two = Constant<value_ints = [2]>()
    head = Slice(n, zero, two)
    sizes = Concat<axis = 0>(head, s)
    p = {LINEAR}(b, , , sizes)
    y = Conv(p, v, bias)
}}"""
