"""Engines are run at the ends of their profile, with data of the samples, and judged row by row."""

from typing import Any

import numpy as np
import pytest
from emulated_engine import use_emulation, use_onnxruntime
from graphs import graph

import rewriter
from rewriter.report.remarks import worded
from rewriter.runtime.inputs.sizes import at_shapes
from rewriter.verification import profile_check
from rewriter.verification.profile_check import by_rows, ends

BATCHES = "g (float[b,4] x) => (float[b,4] y) { a = Sigmoid(x) c = Mul(a, x) y = Tanh(c) }"
SUM = """g ({0}[b,l,8] x) => ({0}[b,8] y) <int64[1] axis = {{1}}> {{
    a = Abs(x) s = ReduceSum<keepdims = 0>(a, axis) y = Sqrt(s) }}"""


def test_the_rows_of_all_samples_follow_each_other_and_lengths_repeat() -> None:
    samples = [
        {"x": np.array([[1, 2]]), "n": np.array(7)},
        {"x": np.array([[3, 4], [5, 6]]), "n": np.array(7)},
    ]
    feeds = at_shapes(samples, {"x": (4, 3)})
    assert feeds["x"].tolist() == [[1, 2, 1], [3, 4, 3], [5, 6, 5], [1, 2, 1]] and feeds["n"] == 7
    assert at_shapes(samples, {"x": (1, 1)})["x"].tolist() == [[1]]


def test_shapes_that_a_sample_has_and_those_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, span = [{"x": np.zeros((2, 5))}], ((1, 5), (2, 5), (8, 500))
    assert list(ends({"x": span}, samples)) == [{"x": (1, 5)}, {"x": (8, 500)}]
    monkeypatch.setattr(profile_check, "MOST_ELEMENTS", 1000)
    assert list(ends({"x": span}, samples)) == [{"x": (1, 5)}]


def test_rows_are_judged_one_by_one_where_all_outputs_have_them() -> None:
    outputs = {"y": np.arange(200).reshape(100, 2), "z": np.zeros((100, 1))}
    rows = by_rows(outputs, 100)
    assert len(rows) == 64 and rows[0]["y"].tolist() == [[0, 1]] and rows[-1]["y"].tolist() == [[198, 199]]
    assert len(by_rows({**outputs, "n": np.zeros(3)}, 100)) == 1


def data(length: int = 100) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"x": (50 + rng.standard_normal((2, length, 8))).astype("f")} for _ in range(3)]


def profile(most: int) -> dict[str, Any]:
    return {
        "min_shapes": {"x": (1, 1, 8)},
        "opt_shapes": {"x": (2, 100, 8)},
        "max_shapes": {"x": (4, most, 8)},
    }


@pytest.mark.parametrize(("most", "right"), [(300, True), (4000, False)])
def test_a_sum_that_overflows_at_the_end(most: int, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum is 5,000 at 100 steps, 15,000 at 300, and 200,000 at 4,000, which FP16 does not hold."""
    use_emulation(monkeypatch)
    original, plain = graph(SUM.format("float")), graph(SUM.format("float16"))
    result = rewriter.verify(original, plain, inputs=data(), **profile(most))
    run, check = (next(c for c in result.checks if c.name == name) for name in ("run", "profile"))
    assert run.passed and check.passed is right and result.passed is right
    assert f"x at 1x1x8 and x at 4x{most}x8" in worded(check).summary
    fixed = rewriter.fix(original, inputs=data(), **profile(most))
    assert fixed.verified and f"and with x at 1x1x8 and x at 4x{most}x8" in str(fixed)


def test_the_profile_that_is_proposed_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    use_onnxruntime(monkeypatch)
    samples = [{"x": np.random.default_rng(i).standard_normal((2, 4)).astype("f")} for i in range(2)]
    result = rewriter.fix(graph(BATCHES), tmp_path / "o.onnx", inputs=samples)
    assert result.verified and "on 2 samples and with x at 1x4 and x at 4x4" in result.ending
