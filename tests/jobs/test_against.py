"""Quantised networks, judged by their own rounding, and against the model before quantisation."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import flat
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
from paths import MODELS
from typer.testing import CliRunner

import rewriter
from rewriter.base.errors import UsageError
from rewriter.cli import app
from rewriter.report.results import FixResult, VerifyResult

TYPES = {
    "int8": (QuantType.QInt8, CalibrationMethod.MinMax),
    "fp8": (QuantType.QFLOAT8E4M3FN, CalibrationMethod.Distribution),
}
RIGHT = ["resnet int8", "resnet fp8", "bert int8"]


class Samples(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.left = [dict(np.load(MODELS / f"{name}.npz"))]

    def get_next(self) -> dict[str, np.ndarray] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.left.pop() if self.left else None


@cache
def folder() -> Path:
    path = tempfile.mkdtemp(prefix="quantised-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@cache
def quantised(which: str) -> Path:
    """A network of models/, quantised by ONNX Runtime: products alone, weights by channel in INT8."""
    name, kind = which.split()
    path, (dtype, method) = folder() / f"{name}.{kind}.onnx", TYPES[kind]
    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
    quantize_static(
        MODELS / f"{name}.onnx",
        path,
        Samples(name),
        activation_type=dtype,
        weight_type=dtype,
        per_channel=kind == "int8",
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        calibrate_method=method,
        extra_options=options,
    )
    return path


def given(which: str) -> tuple[Path, Path]:
    """The samples of a network, and the network before quantisation."""
    name = which.split()[0]
    return MODELS / f"{name}.npz", MODELS / f"{name}.onnx"


@cache
def fixed(which: str) -> FixResult:
    inputs, against = given(which)
    path = quantised(which)
    return rewriter.fix(path, path.with_suffix(".fixed.onnx"), inputs=inputs, against=against, build=False)


def verified(which: str, other: Path, *, origin: bool = True) -> VerifyResult:
    inputs, against = given(which)
    judge = against if origin else None
    return rewriter.verify(quantised(which), other, inputs=inputs, build=False, against=judge)


@pytest.mark.parametrize("which", RIGHT)
def test_a_right_result_is_as_far_from_the_float_model_as_the_original(which: str) -> None:
    result = fixed(which)
    assert result.verified and result.output is not None
    (output,) = (o for o in result.checks[-1].outputs if not o.of)
    own = output.allowance
    assert own is not None and own.reason == "as-original" and own.usual == 0.005
    assert own.measured > 0.005 and output.relative_l2 == pytest.approx(own.measured, rel=0.5)
    again = verified(which, result.output)
    (same,) = (o for o in again.checks[0].outputs if not o.of)
    assert again.passed and same.relative_l2 == pytest.approx(output.relative_l2) and same.allowance == own
    kinds = {gap.kind for gap in result.gaps}
    assert ("original" in kinds) is (max(own.measured, output.relative_l2) > 0.1), "no use is never green"
    assert kinds == {gap.kind for gap in again.gaps}


def wrong_scale(path: Path, factor: float) -> Path:
    """A file whose fourth quarter of activations begins with another scale."""
    model = onnx.load(path)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] not in constants]
    node = nodes[3 * len(nodes) // 4]
    scale = numpy_helper.to_array(constants[node.input[1]])
    array = np.asarray(scale * factor).astype(scale.dtype)
    model.graph.initializer.append(numpy_helper.from_array(array, "another"))
    node.input[1] = "another"
    onnx.save(model, path.with_suffix(".wrong.onnx"))
    return path.with_suffix(".wrong.onnx")


def test_an_error_that_flips_of_buckets_would_explain_fails_against_the_float_model() -> None:
    output = fixed("resnet int8").output
    assert output is not None
    wrong = wrong_scale(output, 1.1)
    assert verified("resnet int8", wrong, origin=False).passed
    assert not verified("resnet int8", wrong).passed


@pytest.mark.parametrize("which", RIGHT)
@pytest.mark.parametrize("origin", [True, False])
def test_a_wrong_result_fails(which: str, origin: bool) -> None:
    output = fixed(which).output
    assert output is not None
    assert not verified(which, wrong_scale(output, 1.7), origin=origin).passed


def test_one_limit_for_scan_fix_and_verify_whatever_passes() -> None:
    """Plain FP16 is beyond 0.005 and right, the result is closer: both are held to what rounding does."""
    path, (inputs, _) = quantised("resnet int8"), given("resnet int8")
    found = rewriter.scan(path, inputs=inputs)
    result = rewriter.fix(path, path.with_suffix(".alone.onnx"), inputs=inputs, build=False)
    assert result.output is not None and found.plain is not None and found.plain.passed
    assert not found.reaches("error")
    again = verified("resnet int8", result.output, origin=False)
    limits = [check.outputs[0].tolerance for check in (found.plain, result.checks[-1], again.checks[0])]
    limits.append(result.before[0].tolerance)
    assert limits == pytest.approx([limits[0]] * 4) and 0.01 < limits[0] <= 0.1


def test_the_next_command_has_the_model_and_the_report_both_errors(tmp_path: Path) -> None:
    path, (inputs, against) = quantised("resnet int8"), given("resnet int8")
    words = ["fix", str(path), "-o", str(tmp_path / "f.onnx"), "--inputs", str(inputs), "--no-build"]
    shown = flat(CliRunner().invoke(app, [*words, "--against", str(against)]).output)
    assert f"--inputs {inputs} --against {against}" in shown
    assert "since the original itself has 0.02" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": MODELS / "bert.onnx"}, "is not a version of"),
        ({"against": MODELS / "none.onnx"}, "none.onnx"),
        ({"metric": "top-1", "tolerance": 0.9}, "it judges by relative L2, not by top-1"),
    ],
)
def test_another_model_or_metric_is_refused(options: dict[str, Any], message: str) -> None:
    path, (inputs, against) = quantised("resnet int8"), given("resnet int8")
    for verb in (rewriter.fix, lambda file, **more: rewriter.verify(file, file, **more)):
        with pytest.raises(rewriter.RewriterError, match=message):
            verb(path, inputs=inputs, **{"against": against, **options})


def test_a_model_of_another_kind_makes_nothing_green() -> None:
    """Its names and shapes are the same: the original is far from it, and nothing proves the result."""
    output = fixed("resnet int8").output
    assert output is not None
    inputs, _ = given("resnet int8")
    result = rewriter.verify(
        quantised("resnet int8"), output, inputs=inputs, build=False, against=MODELS / "swin.onnx"
    )
    assert result.passed and not result.proven
    assert any(gap.kind == "original" and "an accurate original: it has" in gap.reason for gap in result.gaps)


def test_inputs_and_outputs_of_another_shape_are_refused(tmp_path: Path) -> None:
    other = onnx.load(MODELS / "resnet.onnx")
    name = other.graph.output[0].name
    other.graph.node[-1].output[0] = "inner"
    other.graph.node.append(onnx.helper.make_node("Transpose", ["inner"], [name], perm=[1, 0]))
    other.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    onnx.save(other, tmp_path / "turned.onnx")
    inputs, _ = given("resnet int8")
    with pytest.raises(UsageError, match=f"its output {name} has the shape"):
        rewriter.fix(quantised("resnet int8"), inputs=inputs, against=tmp_path / "turned.onnx", build=False)
    port = other.graph.input[0].type.tensor_type.shape.dim[-1]
    port.dim_value = 2 * port.dim_value
    onnx.save(other, tmp_path / "wide.onnx")
    with pytest.raises(UsageError, match="it does not run on the samples"):
        rewriter.fix(quantised("resnet int8"), inputs=inputs, against=tmp_path / "wide.onnx", build=False)
