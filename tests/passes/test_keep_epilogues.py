"""keep-epilogues: norms and Transposes that get a view, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, ops, random_feeds, run

from rewriter.model import Model
from rewriter.passes.keep_epilogues import KeepEpilogues

WEIGHTS = """float[4,4] w = {1,2,3,4, 5,6,7,8, 9,1,2,3, 4,5,6,7}, float[4] b = {1,2,3,4}, int64[1] i = {0}"""
NORM = "n = LayerNormalization<axis = -1, epsilon = 0.001>(s, b, b)"


def _model(body: str, outputs: str = "float[B,3,4] y", opset: int = 17) -> Model:
    return graph(f"g (float[B,3,4] x) => ({outputs}) <{WEIGHTS}> {{ {body} }}", opset=opset)


SEPARATED = [
    pytest.param("m = MatMul(x, w) s = Add(m, x) NORM y = Relu(n)", id="a residual sum"),
    pytest.param(
        "m = MatMul(x, w) a = Add(m, b) g = Sigmoid(a) s = Mul(a, g) NORM y = Relu(n)", id="elementwise"
    ),
    pytest.param("s = MatMul(x, w) NORM y = Add(n, s)", id="the product itself"),
    pytest.param(
        "m = MatMul(x, w) s = Add(m, x) y = LayerNormalization<axis = 2>(s, b)", id="an axis from the front"
    ),
    pytest.param(
        "m = MatMul(x, w) s = Add(m, x) y = LayerNormalization(s, b)", id="no attributes, and an output"
    ),
    pytest.param("m = MatMul(x, w) a = Add(m, b) y = Transpose<perm = [1,0,2]>(a)", id="a Transpose"),
    pytest.param("m = MatMul(x, w) a = Add(m, b) y = Transpose(a)", id="a Transpose of all axes"),
    pytest.param(
        "m = MatMul(x, w) s = Add(m, x) NORM k = MatMul(n, w) t = Add(k, n) y = LayerNormalization(t, b)",
        id="norms after the sums",
    ),
]


@pytest.mark.parametrize("body", SEPARATED)
def test_views_stand_round_norms(body: str) -> None:
    source = _model(body.replace("NORM", NORM))
    result, report = apply(KeepEpilogues(), source)
    norms = ops(source).count("LayerNormalization")
    lifted = norms + ops(source).count("Transpose")
    assert len(report.changes) == lifted
    assert ops(result).count("Unsqueeze") == ops(result).count("Squeeze") == lifted
    assert [v.name for v in result.proto.graph.output] == ["y"]
    feeds = random_feeds(source)
    np.testing.assert_array_equal(run(result, feeds), run(source, feeds))
    again, report = apply(KeepEpilogues(), result)
    assert again is result
    assert not report.changes


def test_rms_norm_too() -> None:
    source = _model("m = MatMul(x, w) s = Add(m, x) y = RMSNormalization<axis = -1>(s, b)", opset=23)
    result, _ = apply(KeepEpilogues(), source)
    assert ops(result) == ["MatMul", "Add", "Unsqueeze", "RMSNormalization", "Squeeze"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("s = Neg(x) NORM y = Relu(n)", id="no product before it"),
        pytest.param(
            "s = Neg(x) y = Transpose<perm = [0,2,1]>(s)", id="a Transpose with no product before it"
        ),
        pytest.param(
            "m = MatMul(x, w) u = Unsqueeze(m, i) s = Squeeze(u, i) NORM y = Relu(n)",
            id="a view stands there",
        ),
        pytest.param(
            "k = Transpose<perm = [0,2,1]>(x) m = MatMul(x, k) s = MatMul(m, x) NORM y = Relu(n)",
            id="no weight",
        ),
        pytest.param("m = MatMul(x, w) s = Add(m, x) y = Softmax(s)", id="no norm"),
    ],
)
def test_skipped(body: str) -> None:
    source = _model(body.replace("NORM", NORM))
    assert apply(KeepEpilogues(), source)[0] is source


def test_a_norm_whose_mean_is_read_is_declined() -> None:
    body = "m = MatMul(x, w) s = Add(m, x) n, mean = LayerNormalization<axis = -1>(s, b) y = Sub(n, mean)"
    source = _model(body)
    result, report = apply(KeepEpilogues(), source)
    assert result is source
    (refusal,) = report.refusals
    assert "its other result mean is read" in refusal.reason


TRANSPOSED = "m = MatMul(x, w) a = Add(m, b) y = Transpose(a)"


def test_below_opset_13_views_have_no_axes_as_inputs() -> None:
    source = _model(TRANSPOSED, opset=12)
    result, report = apply(KeepEpilogues(), source)
    assert result is source
    assert "needs opset 13, the model has 12" in report.refusals[0].reason


@pytest.mark.parametrize(("axes", "refused"), [(7, False), (8, True)])
def test_a_tensor_of_as_many_axes_as_tensorrt_has_gets_no_view(axes: int, refused: bool) -> None:
    ones = "1," * (axes - 2)
    source = graph(f"g (float[{ones}3,4] x) => (float[4,3,{ones[:-1]}] y) <{WEIGHTS}> {{ {TRANSPOSED} }}")
    result, report = apply(KeepEpilogues(), source)
    assert (result is source) == bool(report.refusals) == refused
    assert not refused or "has 8 axes" in report.refusals[0].reason
