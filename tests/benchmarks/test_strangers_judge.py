"""The judge of drawn networks rounds as NumPy does, and compares masks as masks."""

import numpy as np
import pytest
from graphs import graph

from benchmarks import strangers_judge as judge


def test_every_tensor_of_plain_fp16_is_rounded() -> None:
    model = graph(
        "g (float[4] x) => (float[4] y) <float k = {0.1}> { a = Mul(x, k) b = Exp(a) y = Sub(b, a) }"
    )
    x = np.array([0.3, 7.7, 40.0, 90.0], np.float32)
    low = x.astype(np.float16) * np.float16(0.1)
    wide = np.exp(low.astype(np.float32)).astype(np.float16)
    expected = (wide.astype(np.float32) - low.astype(np.float32)).astype(np.float16)
    (found,) = judge.run(model.proto, {"x": x}, plain=True)
    assert found.tolist() == expected.astype(np.float32).tolist()
    (exact,) = judge.run(model.proto, {"x": x}, emulate=False)
    assert judge.errors([exact], [found], {})[0] == pytest.approx(1e-3, rel=3.0)


def test_states_of_an_lstm_are_rounded_at_each_step() -> None:
    """A cell that adds 0.46 at each step stays at 1024 in FP16: half of its last place is 0.5."""
    model = graph("""g (float[50,1,1] x) => (float[1,1,1] c)
        <float[1,4,1] w = {0,0,0,0}, float[1,4,1] r = {0,0,0,0}, float[1,8] b = {20,20,20,0.5,0,0,0,0},
         float[1,1,1] zero = {0}, float[1,1,1] start = {1024}> {
            y, h, c = LSTM<hidden_size = 1>(x, w, r, b, "", zero, start) }""")
    feeds = {"x": np.zeros((50, 1, 1), np.float32)}
    (exact,), (low,) = judge.run(model.proto, feeds, emulate=False), judge.run(model.proto, feeds, plain=True)
    assert exact.item() == pytest.approx(1024 + 50 * np.tanh(0.5), rel=1e-3) and low.item() == 1024


def test_masks_have_to_be_masks_in_both() -> None:
    exact = np.array([1.0, -3e38, -np.inf], np.float32)
    assert judge.errors([exact], [np.array([1.0, -np.inf, -65504.0])], {}) == [0.0]
    assert judge.errors([exact], [np.array([1.0, 3.0, -np.inf])], {}) == [judge.WRONG]
    parts = judge.errors([np.array([100.0, 1e-3])], [np.array([100.0, 2e-3])], {0: [(0, 1, 2)]})
    assert parts == pytest.approx([1e-5, 1.0], rel=0.01)
