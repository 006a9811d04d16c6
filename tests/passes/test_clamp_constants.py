"""clamp-constants: masks that become finite in FP16, masks that stay, and results that do not change."""

import numpy as np
from graphs import apply, graph, run
from hypothesis import given
from hypothesis import strategies as st
from tables import values

from rewriter.ir.model import Array, Model
from rewriter.passes.clamp_constants import ClampConstants

FLT_MAX = float(np.finfo(np.float32).max)


def _attention(body: str, outputs: str = "float[2,4,4] p", opset: int = 17) -> Model:
    return graph(f"g (float[2,4,4] s, int64[2,1,4] m, bool[2,1,4] b) => ({outputs}) {body}", opset=opset)


def _feeds(seed: int = 0, scale: float = 10.0) -> dict[str, Array]:
    """Scores, and masks that leave the first two of four keys open."""
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((2, 4, 4)) * scale).astype(np.float32)
    mask = np.broadcast_to(np.array([1, 1, 0, 0], np.int64), (2, 1, 4))
    return {"s": scores, "m": mask.copy(), "b": mask.astype(bool)}


@values
def test_rows_that_are_masked_as_a_whole(body: str, equal: bool) -> None:
    before = _attention(f"<float v = {{-3.4028235e38}}, float z = {{0.0}}> {body}")
    after, report = apply(ClampConstants(), before)
    assert "relies on no row being masked as a whole" in report.changes[0].what
    feeds = _feeds() | {"b": np.zeros((2, 1, 4), bool)}
    uniform = np.full((2, 4, 4), 0.25, np.float32)
    np.testing.assert_array_equal(run(before, feeds)[0], uniform)
    assert np.array_equal(run(after, feeds)[0], uniform) is equal


@given(
    st.sampled_from([-FLT_MAX, -1e12, -1e9, -65504.0]),
    st.floats(0.0, 8000.0, width=32),
    st.integers(0, 2**32 - 1),
)
def test_no_score_within_the_stated_range_shows_the_difference(value: float, reach: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.uniform(-reach, reach, (2, 4, 4)).astype(np.float32)
    open_ = rng.random((2, 1, 4)) < 0.5
    open_[..., rng.integers(4)] = True
    for body in (
        "{ x = Where(b, s, v) p = Softmax(x) }",
        "{ w = Where(b, z, v) x = Add(s, w) p = Softmax(x) }",
    ):
        before = _attention(f"<float v = {{{value:.9g}}}, float z = {{0.0}}> {body}")
        after, _ = apply(ClampConstants(), before)
        feeds = {"s": scores, "b": open_, "m": open_.astype(np.int64)}
        np.testing.assert_array_equal(run(before, feeds)[0], run(after, feeds)[0])
