"""The emulation against the arithmetic that it stands for: numpy's float16 and ml_dtypes' bfloat16."""

from collections.abc import Callable

import graphs
import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto
from tables import values

from rewriter.ir.model import Array, Model
from rewriter.runtime.emulation import emulation, reference

HALF = np.dtype(np.float16)
BRAIN = np.dtype(ml_dtypes.bfloat16)


def emulated(source: Model, feeds: dict[str, Array]) -> list[Array]:
    return graphs.run(emulation(source), feeds)


def referred(source: Model, feeds: dict[str, Array]) -> list[Array]:
    return graphs.run(reference(source), feeds)


def low_model(body: str, low: str) -> Model:
    """A graph from FP32 a and b of 64 elements to FP32 y, in FP16 or BF16 between."""
    text = f"""
        g (float[64] a, float[64] b) => (float[64] y) {{
            x = Cast<to = {10 if low == "float16" else 16}>(a)
            w = Cast<to = {10 if low == "float16" else 16}>(b)
            {body}
            y = Cast<to = 1>(r) }}"""
    return graphs.graph(text, opset=22, ir=10)


def wide_and_normal() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    wide = (rng.standard_normal(64) * 10.0 ** rng.uniform(-8, 4.6, 64)).astype(np.float32)
    return {"a": wide, "b": rng.standard_normal(64).astype(np.float32)}


OPERATORS: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "Add": ("r = Add(x, w)", lambda x, w: x + w),
    "Sub": ("r = Sub(x, w)", lambda x, w: x - w),
    "Mul": ("r = Mul(x, w)", lambda x, w: x * w),
    "Div": ("r = Div(x, w)", lambda x, w: x / w),
    "square": ("r = Mul(x, x)", lambda x, w: x * x),
    "two steps": ("m = Mul(x, w)\n r = Add(m, x)", lambda x, w: x * w + x),
    "square root of a square": ("m = Mul(x, x)\n r = Sqrt(m)", lambda x, w: np.sqrt(x * x)),
    "Abs": ("r = Abs(x)", lambda x, w: np.abs(x)),
    "Relu and Neg": ("m = Relu(x)\n r = Neg(m)", lambda x, w: -np.maximum(x, x.dtype.type(0))),
    "Where": ("c = Less(x, w)\n r = Where(c, x, w)", lambda x, w: np.where(x < w, x, w)),
    "Sqrt of Abs": ("m = Abs(x)\n r = Sqrt(m)", lambda x, w: np.sqrt(np.abs(x))),
    "Reciprocal": ("r = Reciprocal(w)", lambda x, w: w.dtype.type(1) / w),
}


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_rounds_as_the_type_itself(name: str, low: str) -> None:
    body, compute = OPERATORS[name]
    feeds = wide_and_normal()
    dtype = HALF if low == "float16" else BRAIN
    with np.errstate(all="ignore"):
        expected = compute(feeds["a"].astype(dtype), feeds["b"].astype(dtype)).astype(np.float32)
    if low == "float16" and "square" in name:
        assert np.isinf(expected).any(), "the values reach beyond FP16"
    np.testing.assert_array_equal(emulated(low_model(body, low), feeds)[0], expected)


NORM = """
    g (float16[2,4] x) => (float16[2,4] y) {
        s = Mul(x, x) m = ReduceMean<axes = [1]>(s) d = Sqrt(m) y = Div(x, d) }"""


def test_finite_garbage_shows() -> None:
    """x / sqrt(mean(x^2)) of 300: FP16 gives x / inf = 0, which ONNX Runtime's FP16 kernels would hide."""
    source = graphs.graph(NORM)
    x = np.full((2, 4), 300, np.float16)
    np.testing.assert_array_equal(emulated(source, {"x": x})[0], np.zeros((2, 4), np.float32))
    np.testing.assert_allclose(referred(source, {"x": x})[0], np.ones((2, 4)), rtol=1e-6)


def test_the_reference_has_fp32_tensors_and_outputs_only() -> None:
    made = reference(graphs.graph(NORM))
    types = {name: found.dtype for name, found in made.facts().main.items()}
    assert {name for name, dtype in types.items() if dtype == TensorProto.FLOAT16} == {"x"}
    assert made.signature.outputs[0].dtype == TensorProto.FLOAT


@values
def test_a_model_that_is_all_fp32_is_its_own_reference(dtype: str, body: str, same: bool) -> None:
    source = graphs.graph(f"g ({dtype}[2] x) => ({dtype}[2] y) {{ {body} }}")
    assert (reference(source) is source) == same


def test_fp32_parts_of_a_mixed_model_are_not_rounded() -> None:
    source = graphs.graph("""
        g (float[1] x) => (float[1] y) {
            a = Mul(x, x) h = Cast<to = 10>(a) b = Neg(h) y = Cast<to = 1>(b) }""")
    made = emulation(source)
    assert graphs.ops(made) == ["Mul", "Cast", "Cast", "Neg", "Cast"], "one pair; the last writes the output"
    x = np.asarray([1.0 + 2.0**-12], np.float32)
    expected = -((x * x).astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(emulated(source, {"x": x})[0], expected)


def test_values_that_are_only_moved_are_not_rounded_again() -> None:
    source = graphs.graph("""
        g (float16[2,3] x) => (float16[3,2] y) {
            a = Transpose<perm = [1, 0]>(x) y = Relu(a) }""")
    made = emulation(source)
    assert graphs.ops(made).count("Cast") == 1, "the input's own, to FP32"


def test_a_loop_rounds_at_every_iteration() -> None:
    source = graphs.graph("""
        g (int64 n, bool c, float16[1] x, float16[1] d) => (float16[1] y) {
            y = Loop(n, c, x) <
                body = b (int64 i, bool ci, float16[1] s) => (bool co, float16[1] t) {
                    co = Identity(ci) t = Add(s, d)
                }
            >
        }""")
    step = np.asarray([0.75], np.float16)  # 1024 + 0.75 rounds to 1025
    state = np.asarray([1024], np.float16)
    feeds = {"n": np.asarray(5), "c": np.asarray(True), "x": state, "d": step}
    found = emulated(source, feeds)[0]
    for _ in range(5):
        state = state + step
    assert found[0] == state[0] == 1029.0
    assert referred(source, feeds)[0][0] == 1027.75
