"""Ranges that grow with a dynamic axis are those at the end of the profile, beyond the samples."""

import numpy as np
import pytest
from graphs import with_weights

import rewriter
from rewriter.ir.model import Array
from rewriter.runtime.emulation import emulation, reference
from rewriter.verification.expected import run_all

WEIGHT = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
GROWING = {
    "a sum and its root": "b = Abs(a) s = ReduceSum<keepdims = 0>(b, axis) t = Sqrt(s) y = MatMul(t, w)",
    "a sum of squares": "s = ReduceSumSquare<axes = [1], keepdims = 0>(a) t = Sqrt(s) y = MatMul(t, w)",
    "a running sum": """b = Abs(a) one = Constant<value = int64 {1}>() c = CumSum(b, one) l = Log(c)
        y = ReduceMax<axes = [1], keepdims = 0>(l)""",
    "a product over the axis": """b = Abs(a) t = Transpose<perm = [0, 2, 1]>(b) c = MatMul(t, b) l = Log(c)
        y = ReduceMax<axes = [1], keepdims = 0>(l)""",
}
BOUNDED = {
    "a small sum": """c = Constant<value_float = 0.001>() d = Mul(a, c)
        s = ReduceL1<axes = [1], keepdims = 0>(d) y = MatMul(s, w)""",
    "a mean": "b = Abs(a) s = ReduceMean<axes = [1], keepdims = 0>(b) y = MatMul(s, w)",
    "attention": """t = Transpose<perm = [0, 2, 1]>(x) c = MatMul(x, t) p = Softmax(c) v = MatMul(p, a)
        y = ReduceMax<axes = [1], keepdims = 0>(v)""",
    "embedded positions": """z = Constant<value = int64 {0}>() o = Constant<value = int64 {1}>() h = Shape(x)
        l = Gather(h, o) r = Range(z, l, o) seven = Constant<value = int64 {7}>() k = Min(r, seven)
        e = Gather(w, k) q = Add(a, e) y = ReduceMax<axes = [1], keepdims = 0>(q)""",
    "a sum over features": """two = Constant<value = int64[1] {2}>() b = Abs(a) s = ReduceSum(b, two)
        q = Mul(a, s) y = ReduceMax<axes = [1], keepdims = 0>(q)""",
}


def fixed(body: str, *, most: int) -> tuple[rewriter.FixResult, Array]:
    """`fix` with a sample of 50 steps and a profile up to `most`, and an input of so many steps."""
    text = f"""g (float[b,l,8] x, float[8,8] w) => (float[b,8] y) <int64[1] axis = {{1}}> {{
        a = MatMul(x, w) {body} }}"""
    proto = with_weights(text, {"w": WEIGHT}).whole()
    steps = 5 * np.random.default_rng(1).standard_normal((1, most, 8)).astype(np.float32)
    result = rewriter.fix(
        proto,
        inputs=[{"x": steps[:, :50]}],
        build=False,
        engine="emulation",
        min_shapes={"x": (1, 1, 8)},
        max_shapes={"x": (1, most, 8)},
    )
    return result, steps


@pytest.mark.parametrize("case", GROWING)
def test_what_grows_with_the_axis_is_in_range_at_the_profiles_end(case: str) -> None:
    result, steps = fixed(GROWING[case], most=20000)
    assert result.verified
    assert any(cause.kind == "overflow" for cause in result.causes)
    assert "x at 1x50x8 of up to 1x20000x8" in result.ending
    (expected,) = run_all(reference(result.model), [{"x": steps}])
    (actual,) = run_all(emulation(result.model), [{"x": steps}])
    assert np.abs(actual["y"] - expected["y"]).max() < 0.01 * np.abs(expected["y"]).max()


@pytest.mark.parametrize("case", BOUNDED)
def test_what_does_not_grow_is_as_measured(case: str) -> None:
    result, _ = fixed(BOUNDED[case], most=20000)
    assert result.verified
    assert not any(cause.kind == "overflow" for cause in result.causes)


def test_samples_as_long_as_the_profile_are_as_measured() -> None:
    result, _ = fixed(GROWING["a sum and its root"], most=50)
    assert not any(cause.kind == "overflow" for cause in result.causes)
    assert "of up to" not in result.ending
