"""fold-strides: any strided Conv, the case models, the presets, and `fix` with it."""

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, keeps_results, model_of, ops, with_constants
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import rewriter
from rewriter.ir.model import Array, Model
from rewriter.passes.fold_strides import FoldStrides


@st.composite
def convs(draw: st.DrawFn) -> Model:
    """A strided Conv of few channels whose windows overlap and whose strides divide the sizes."""
    strides = [draw(st.sampled_from([2, 4])) for _ in range(2)]
    kernel = [draw(st.integers(step + 1, 9)) for step in strides]
    sizes = [
        step * draw(st.integers(-(-size // step), 6)) for step, size in zip(strides, kernel, strict=True)
    ]
    pads = [draw(st.integers(0, kernel[axis % 2] - 1)) for axis in range(4)]
    auto = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    padding: dict[str, Any] = {"pads": pads} if auto == "NOTSET" else {"auto_pad": auto}
    read, out, batch = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights: dict[str, Array] = {"w": rng.standard_normal((out, read, *kernel))}
    if draw(st.booleans()):
        weights["b"] = rng.standard_normal(out)
    node = helper.make_node("Conv", ["x", *weights], ["y"], strides=strides, **padding)
    rows: int | str = batch if draw(st.booleans()) else "N"
    opset = draw(st.sampled_from([11, 13, 17, 22]))
    return model_of([node], {"x": [rows, read, *sizes]}, "y", weights, opset=opset)


@given(convs())
def test_any_strided_conv_keeps_its_results(before: Model) -> None:
    step = FoldStrides()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewriter.passes.fold_strides.LEAST_WINDOW", 1)
        after, report = apply(step, before)
    assert ops(after) == ["Reshape", "Transpose", "Reshape", "Conv"]
    assert len(report.changes) == 1
    keeps_results(before, after, step)


def _net(body: str, outputs: str, scales: dict[str, float]) -> onnx.ModelProto:
    shapes = {"w": (5, 3, 7, 7), "b": (5,), "turn": (2, 5, 1, 1)}
    source = with_constants(body, shapes, "float[N,3,8,12] x", outputs).whole()
    for tensor in source.graph.initializer:
        value = numpy_helper.to_array(tensor) * np.float32(scales.get(tensor.name, 1.0))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return source


def _samples(count: int) -> list[dict[str, Array]]:
    """Smooth images: neighbouring pixels go together."""
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((count, 2, 3, 8, 12)).cumsum(axis=3).cumsum(axis=4)
    return [{"x": image.astype(np.float32)} for image in noise / 10]


@pytest.mark.parametrize("passes", ["fold-strides,rescale", "rescale,fold-strides"])
def test_a_stem_that_overflows_is_rescaled(passes: str) -> None:
    """Its result leaves FP16; the Conv behind it takes the factor back."""
    source = _net(
        "{ c = Conv<strides = [2, 2], pads = [3, 3, 3, 3]>(x, w) y = Conv(c, turn) }",
        "float[N,2,4,6] y",
        {"w": 1e4, "turn": 1e-4},
    )
    result = rewriter.fix(source, passes=f"{passes},mixed-precision", inputs=_samples(1), build=False)
    assert result.verdict is not None and result.verdict.passed
    assert result.plan is not None
    assert {"overflow"}.isdisjoint(decision.rule for decision in result.plan.decisions)
    assert result.plan.exponents
