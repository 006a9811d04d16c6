"""fold-quantized-bias: bit-equal to DequantizeLinear on ONNX Runtime, and weights stay."""

import numpy as np
from graphs import apply, graph, run
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from rewriter.ir.model import Model
from rewriter.passes.fold_quantized_bias import FoldQuantizedBias

int32 = st.integers(-(2**31), 2**31 - 1)
scales = st.floats(2.0**-40, 2.0**20, width=32)


def _only_bias(data: list[int], scale: list[float], opset: int = 17) -> Model:
    body = f"""g (float[{len(data)}] x) => (float[{len(data)}] y) {{
        b = DequantizeLinear<axis = 0>(q, s) y = Mul(x, b) }}"""
    source = graph(body.replace("y) {", "y) <int32[1] q = {0}, float[1] s = {1}> {"), opset=opset)
    del source.proto.graph.initializer[:]
    q, s = np.array(data, np.int32), np.array(scale, np.float32)
    source.proto.graph.initializer.extend([numpy_helper.from_array(q, "q"), numpy_helper.from_array(s, "s")])
    return source


@given(st.lists(st.tuples(int32, scales), min_size=1, max_size=9))
def test_every_int32_and_scale_is_bit_equal(pairs: list[tuple[int, float]]) -> None:
    source = _only_bias([q for q, _ in pairs], [s for _, s in pairs])
    result, _ = apply(FoldQuantizedBias(), source)
    feeds = {"x": np.ones(len(pairs), np.float32)}
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])
