"""What `fix` refuses or reports before it measures anything: dynamic INT8, and NaN in data and model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph
from needs import needs_rtx
from tables import values
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import InputsError, ModelError, UnbuildableError, UsageError
from rewriter.cli import app
from rewriter.ir.model import Array, load
from rewriter.jobs.fix.refusals import refuse_unknown_names, refuse_unknown_operators
from rewriter.runtime.engines.build import BuildOptions, BuildReport, build

DYNAMIC = """
    g (float[2,4] x) => (float[2,3] y) <int8[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, int8 zero = {0}> {
        [quantize] q, s, z = DynamicQuantizeLinear(x) [product] i = MatMulInteger(q, w, z, zero)
        f = Cast<to = 1>(i)
        y = Mul(f, s) }"""


def test_an_operator_of_others_that_the_model_lacks_is_no_error() -> None:
    model = load(graph("g (float[4] x) => (float[4] y) { y = LayerNormalization(x, x) }"))
    refuse_unknown_operators(model, ["Softmax", "SkipLayerNormalization", "GroupNorm"], "keep-fp32-op")


@values
def test_a_pattern_that_fits_nothing_is_named_before_any_work(pattern: str, near: str) -> None:
    source = graph('g (float[4] x) => (float[4] y) { ["/decoder/head/mul"] a = Mul(x, x) y = Relu(a) }')
    with pytest.raises(UsageError, match="no node has the name") as caught:
        rewriter.fix(source, keep_fp32=["*/mul", pattern])
    assert pattern in caught.value.what and near in caught.value.hint


@pytest.mark.parametrize("pattern", ["a", "*/mul", "/head/mul/Cast", "*/Split"])
def test_names_of_outputs_and_those_that_passes_make_are_patterns(pattern: str) -> None:
    source = graph('g (float[4] x) => (float[4] y) { ["/head/mul"] a = Mul(x, x) y = Relu(a) }')
    refuse_unknown_names(source, [pattern])


LOG = "g (float[4] x) => (float[4] y) { a = Neg(x) [spectrum] b = Log(a) y = Abs(b) }"


@needs_rtx
def test_tensorrt_builds_no_dynamic_int8(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.onnx"
    onnx.save(graph(DYNAMIC).whole(), path)
    report = build(path, BuildOptions(), timeout_s=120)
    assert isinstance(report, BuildReport) and not report.parsed


def test_dynamic_int8_is_named_before_any_work(tmp_path: Path) -> None:
    path, out = tmp_path / "dynamic.onnx", tmp_path / "out.onnx"
    onnx.save(graph(DYNAMIC).whole(), path)
    stages: list[str] = []
    with pytest.raises(UnbuildableError, match="1 DynamicQuantizeLinear, 1 MatMulInteger") as caught:
        rewriter.fix(path, out, progress=lambda stage, done, total: stages.append(stage))
    assert "quantize (DynamicQuantizeLinear), product (MatMulInteger)" in caught.value.what
    assert "quantize_static" in str(caught.value.hint)
    assert len(stages) == 1 and stages[0].startswith("1 of ") and not out.exists()
    shown = CliRunner().invoke(app, ["fix", str(path), "-o", str(out)])
    assert shown.exit_code == 3


SHIFTED = """
    g (float[2,4] x) => (float[2,4] y) <float s = {0.1}, ZERO> {
        [quantize] q = QuantizeLinear(x, s, z) [back] d = DequantizeLinear(q, s, z) y = Relu(d) }"""


@needs_rtx
@pytest.mark.parametrize("zero", ["uint8 z = {128}", "int8 z = {3}"])
def test_zero_points_are_named_before_any_work_and_tensorrt_builds_none(tmp_path: Path, zero: str) -> None:
    path = tmp_path / "shifted.onnx"
    onnx.save(graph(SHIFTED.replace("ZERO", zero)).whole(), path)
    report = build(path, BuildOptions(), timeout_s=120)
    assert isinstance(report, BuildReport) and not report.parsed
    with pytest.raises(UnbuildableError, match="1 QuantizeLinear, 1 DequantizeLinear") as caught:
        rewriter.fix(path)
    assert "quantize (QuantizeLinear), back (DequantizeLinear)" in caught.value.what
    assert "ActivationSymmetric" in str(caught.value.hint)


@pytest.mark.parametrize("zero", ["(x, s, z)", "(x, s)"], ids=["of UINT8", "none, which is UINT8"])
def test_uint8_is_refused_which_tensorrt_takes_for_int8(zero: str) -> None:
    text = SHIFTED.replace("ZERO", "uint8 z = {0}").replace("(x, s, z)", zero)
    with pytest.raises(
        UnbuildableError, match=r"quantised to UINT8 \(1 QuantizeLinear\).*: quantize"
    ) as caught:
        rewriter.fix(graph(text))
    assert "QInt8" in str(caught.value.hint)


def test_symmetric_quantisation_is_no_reason_to_refuse() -> None:
    source = graph(SHIFTED.replace("ZERO", "int8 z = {0}")).whole()
    assert rewriter.fix(source, inputs={"x": np.ones((2, 4), np.float32)}).verified


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_data_that_is_not_finite_is_an_error_that_names_the_element(tmp_path: Path, value: float) -> None:
    good, bad = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    bad[1, 2] = value
    np.savez(tmp_path / "0.npz", x=good)
    np.savez(tmp_path / "1.npz", x=bad)
    source = graph("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }").whole()
    with pytest.raises(InputsError) as caught:
        rewriter.fix(source, inputs=tmp_path)
    text = str(caught.value)
    assert f"{tmp_path / '1.npz'}: input 'x': element [1, 2] of sample 1 is {value}" in text


def test_a_mask_of_minus_infinity_is_data() -> None:
    source = graph(
        "g (float[1,3] x, float[3] mask) => (float[1,3] y) { s = Add(x, mask) y = Softmax(s) }"
    ).whole()
    data: dict[str, Array] = {"x": np.ones((1, 3), np.float32), "mask": np.array([0, 0, -np.inf], np.float32)}
    assert rewriter.fix(source, inputs=data, build=False).verified
    with pytest.raises(InputsError, match="is nan"):
        rewriter.fix(source, inputs=data | {"mask": np.array([0, 0, np.nan], np.float32)}, build=False)


def test_an_original_that_gives_nan_is_named_with_its_first_node() -> None:
    with pytest.raises(ModelError, match=r"itself gives NaN or infinity .* first in spectrum \(Log\)"):
        rewriter.fix(graph(LOG).whole(), inputs={"x": np.ones(4, np.float32)}, build=False)
    with pytest.raises(ModelError, match="itself gives NaN"):
        rewriter.verify(graph(LOG).whole(), graph(LOG).whole(), inputs={"x": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"first in spectrum \(Log\)"):
        rewriter.fix(graph(LOG).whole(), inputs={"x": np.zeros(4, np.float32)}, build=False)
    part = {"x": np.array([-1.0, -2.0, -3.0, 1.0], np.float32)}
    result = rewriter.fix(graph(LOG).whole(), inputs=part, build=False)
    assert any("y (0.25 of it), first in spectrum (Log)" in text for text in result.warnings)
