"""`rewriter.emulate`: a session of ONNX Runtime that computes as an engine in reduced precision does."""

from pathlib import Path

import graphs
import numpy as np
import onnx
import onnxruntime
import pytest
from tables import values

import rewriter
from rewriter.ir.model import DETACH_BYTES, save
from rewriter.ir.plan import Precision
from rewriter.runtime.emulation import Accumulation

WIDE = graphs.graph("g (float[batch,4] x) => (float[batch,4] y) { square = Mul(x, x) y = Sqrt(square) }")
"""The square of 300 is beyond FP16."""


def test_types_of_the_file() -> None:
    source = graphs.graph(
        "g (float16[batch,4] x) => (float16[batch,4] y, float[batch,4] z) { s = Mul(x, x)"
        " y = Sqrt(s) z = Cast<to = 1>(s) }"
    )
    session = rewriter.emulate(source)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("x", "tensor(float16)", ["batch", 4])
    ]
    assert [o.type for o in session.get_outputs()] == ["tensor(float16)", "tensor(float)"]
    y, z = session.run(None, {"x": np.full((2, 4), 300, np.float16)})
    assert y.dtype == np.float16
    assert np.isinf(y).all() and np.isinf(z).all()


@pytest.mark.parametrize(("precision", "expected"), [(None, 300.0), ("fp32", 300.0), ("fp16", np.inf)])
def test_lowers_on_request(precision: Precision | None, expected: float) -> None:
    session = rewriter.emulate(WIDE, precision=precision)
    for batch in (1, 3):  # one session, any shape
        (y,) = session.run(["y"], {"x": np.full((batch, 4), 300, np.float32)})
        np.testing.assert_array_equal(y, np.full((batch, 4), expected, np.float32))


def test_a_file_by_every_way_to_run_it(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((64, DETACH_BYTES // 64)).astype(np.float16)
    rows, columns = weights.shape
    text = f"""g (float16[batch,{rows}] x, float16[{rows},{columns}] w) => (float16[batch,{columns}] y) {{
        y = MatMul(x, w) }}"""
    source = graphs.with_weights(text, {"w": weights})
    save(source, tmp_path / "model.onnx")
    session = rewriter.emulate(tmp_path / "model.onnx")
    assert isinstance(session, onnxruntime.InferenceSession)
    x = np.random.default_rng(1).standard_normal((2, rows)).astype(np.float16)
    expected = np.asarray(session.run(None, {"x": x})[0])
    exact = x.astype(np.float64) @ weights.astype(np.float64)
    assert 0 < np.linalg.norm(expected - exact) / np.linalg.norm(exact) < 2e-3
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected)
    (value,) = session.run_with_ort_values(["y"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(x)})
    np.testing.assert_array_equal(value.numpy(), expected)


def test_states_inside_a_recurrence() -> None:
    """A running mean as an RNN: in FP16 it stands still where a step is less than half of its last place."""
    weights = {"w": np.full((1, 1, 1), 1 / 1024, np.float16), "r": np.ones((1, 1, 1), np.float16)}
    source = graphs.with_weights(
        """g (float16[steps,1,1] x, float16[1,1,1] w, float16[1,1,1] r) => (float16[1,1,1] h) {
            every, h = RNN<hidden_size = 1, activations = ["Relu"]>(x, w, r) }""",
        weights,
    )
    (h,) = rewriter.emulate(source).run(None, {"x": np.ones((5000, 1, 1), np.float16)})
    assert h.item() == 2.0  # in FP32 it is 4.88


def test_a_mask_of_the_smallest_fp32_number_becomes_infinite() -> None:
    """As converters write it: transformers fills masks with it."""
    text = """g (int64[1] shape) => (float[n] y) {
        mask = ConstantOfShape<value = float[1] {-3.4e38}>(shape) y = Relu(mask) }"""
    (y,) = rewriter.emulate(graphs.graph(text), precision="fp16").run(None, {"shape": np.array([3])})
    np.testing.assert_array_equal(y, np.zeros(3, np.float32))


@values
def test_sums_are_of_the_type_that_verify_uses(notes: dict[str, str], expected: Accumulation) -> None:
    """For a file from elsewhere the target decides: FP16 sums are recorded of TensorRT-RTX."""
    weights = np.random.default_rng(0).standard_normal((1024, 64)).astype(np.float16)
    text = "g (float[64,1024] x, float16[1024,64] w) => (float[64,64] y) {"
    text += " a = Cast<to = 10>(x) m = MatMul(a, w) r = Relu(m) y = Cast<to = 1>(r) }"
    source = graphs.with_weights(text, {"w": weights})
    onnx.helper.set_model_props(source.proto, notes)
    inputs = {"x": np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)}
    (y,) = rewriter.emulate(source).run(None, inputs)
    by_type = {sums: rewriter.emulate(source, accumulation=sums).run(None, inputs)[0] for sums in SUMS}
    assert not np.array_equal(by_type["fp16"], by_type["fp32"])
    np.testing.assert_array_equal(y, by_type[expected])
    checked = rewriter.verify(source, source, inputs=inputs, build=False, engine="emulation").checks[0]
    assert ("sums in FP16" in checked.summary) is (expected == "fp16")


SUMS: tuple[Accumulation, ...] = ("fp16", "fp32")
