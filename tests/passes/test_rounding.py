"""mixed-precision{rounding=unbiased}: the outputs of products keep their mean."""

import graphs
import ml_dtypes
import numpy as np
import pytest
from onnx import numpy_helper
from tables import values

import rewriter
from rewriter.ir.model import Array
from rewriter.ir.plan import Plan
from rewriter.passes.algorithms.rounding import unbiased
from rewriter.passes.mixed_precision import lowered
from rewriter.runtime.emulation import reference
from rewriter.verification.expected import run_all

TEXT = """
    g (float[2,16,9,9] x) => (float[2,8,9,9] c, float[2,12] p, float[2,5] q, float[2,12] r, float[2,12] s,
        float[2,16,9,5] t, float[2] u) {
        c = Conv<group = 2, pads = [1, 1, 1, 1]>(x, cw, cb) f = Flatten(x) m = MatMul(f, mw)
        p = Add(m, mb) q = Gemm<transB = 1>(f, gw, gb) r = MatMul(f, shared) s = MatMul(f, shared)
        t = MatMul(x, batch) u = MatMul(f, vector) }"""
SHAPES = {"cw": (8, 8, 3, 3), "cb": (8,), "mw": (1296, 12), "mb": (12,), "gw": (5, 1296), "gb": (5,)}
SHARED = {"shared": (1296, 12), "batch": (2, 16, 9, 5), "vector": (1296,)}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
def test_the_constant_vanishes_and_no_weight_moves_by_more_than_one_unit(dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(0)
    given = rng.standard_normal((40, 300)).astype(np.float32)
    given[:, ::7] = 0.0
    means, lost, nearest = rng.random((1, 300)), rng.standard_normal(40) * 1e-3, given.astype(dtype)
    stored = unbiased(given, nearest, means, 1.0, lost)

    def constant(rounded: Array) -> float:
        return float(np.abs(lost + ((given - rounded.astype(np.float64)) * means).sum(axis=1)).mean())

    wide = stored.astype(np.float64)
    assert constant(stored) < constant(nearest) / 8
    assert (np.abs(given - wide) <= 2 * np.abs(given - nearest.astype(np.float64)).max()).all()
    assert (stored[given == 0] == 0).all()
    assert np.square(given - wide).sum() < 1.05 * np.square(given - nearest.astype(np.float64)).sum()
    exact = nearest.astype(np.float32)
    assert (unbiased(exact, nearest, means, 1.0, np.zeros(1)) == nearest).all()


def test_outputs_keep_their_mean_over_the_samples() -> None:
    source, rng = graphs.weighted(TEXT, **SHAPES, **SHARED), np.random.default_rng(1)
    feeds = [{"x": rng.random((2, 16, 9, 9), np.float32)} for _ in range(4)]
    exact = run_all(source, feeds)
    bias: dict[str, dict[str, float]] = {}
    for rounding in ("nearest", "unbiased"):
        passes = f"mixed-precision{{rounding={rounding}}}"
        fixed = rewriter.fix(source, inputs=feeds, passes=passes, verify=False).model
        outputs = run_all(reference(fixed), feeds)  # the weights are rounded, and nothing else
        errors = {
            name: np.stack([o[name] - e[name] for o, e in zip(outputs, exact, strict=True)])
            for name in exact[0]
        }
        axes = {name: tuple(a for a in range(e.ndim) if a != 2) for name, e in errors.items()}
        bias[rounding] = {name: float(np.abs(e.mean(axis=axes[name])).mean()) for name, e in errors.items()}
    nearest, kept = bias["nearest"], bias["unbiased"]
    assert kept["c"] < nearest["c"] / 2  # zeros around the border are in no mean
    assert kept["p"] < nearest["p"] / 4 and kept["q"] < nearest["q"] / 4
    # two nodes read the weight; it is no matrix
    assert all(kept[name] == nearest[name] for name in ("r", "s", "t", "u"))


@values
def test_the_lower_bound_of_a_divisor_stays_above_zero(body: str, raised: bool) -> None:
    source = graphs.graph(
        f"""g (float[2,4] x) => (float[N,M] y) <float e = {{1e-12}}, int64[2] d = {{2, 4}}> {{
            m = ReduceL2<axes = [1]>(x) {body} }}"""
    )
    low = lowered(source, Plan("fp16"))
    (bound,) = (numpy_helper.to_array(t) for t in low.proto.graph.initializer if t.name == "e")
    assert bound == np.float16(2.0**-14 if raised else 0.0)


def test_a_row_of_zeros_has_no_direction_in_fp16() -> None:
    source = graphs.graph(
        """g (float[2,4] x) => (float[2,4] y) <float e = {1e-12}> {
            m = ReduceL2<axes = [1]>(x) c = Clip(m, e) y = Div(x, c) }"""
    )
    x = np.array([[0, 0, 0, 0], [3, 0, 4, 0]], np.float32)
    (result,) = run_all(lowered(source, Plan("fp16")), [{"x": x}])
    assert result["y"] == pytest.approx(np.array([[0, 0, 0, 0], [0.6, 0, 0.8, 0]]), abs=1e-3)
