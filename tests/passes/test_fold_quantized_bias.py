"""fold-quantized-bias: bit-equal to DequantizeLinear on ONNX Runtime, and weights stay."""

import numpy as np
from graphs import apply, run, with_weights
from hypothesis import given
from hypothesis import strategies as st

from rewriter.passes.fold_quantized_bias import FoldQuantizedBias

int32 = st.integers(-(2**31), 2**31 - 1)
scales = st.floats(2.0**-40, 2.0**20, width=32)


@given(st.lists(st.tuples(int32, scales), min_size=1, max_size=9))
def test_every_int32_and_scale_is_bit_equal(pairs: list[tuple[int, float]]) -> None:
    n, (q, s) = len(pairs), zip(*pairs, strict=True)
    source = with_weights(
        f"g (float[{n}] x, int32[{n}] q, float[{n}] s) => (float[{n}] y) "
        "{ b = DequantizeLinear<axis = 0>(q, s) y = Mul(x, b) }",
        {"q": np.array(q, np.int32), "s": np.array(s, np.float32)},
    )
    result, _ = apply(FoldQuantizedBias(), source)
    feeds = {"x": np.ones(len(pairs), np.float32)}
    np.testing.assert_array_equal(run(result, feeds)[0], run(source, feeds)[0])
