"""fuse-rms-norm: RMSNormalization where the opset has it, and one named unit everywhere else."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, model, ops, random_feeds, run
from onnx.reference import ReferenceEvaluator
from paths import MODELS
from written_norms import NORMALIZE, POWER, RMS_NORMS, build, units

from rewriter.base import Context
from rewriter.graph import attribute
from rewriter.model import Model, load
from rewriter.passes.fuse_rms_norm import FuseRmsNorm

NEW = Context(opset=23)

SINGLE = 1e-6
"""Relative L2 error of one norm of normal data: 2^-24 = 6e-8 for each of some ten roundings."""


def newest(body: str, inputs: str = "float[2,4,8] x, float[8] s", output: str = "float[2,4,8] y") -> Model:
    """The body in opset 23, where reductions take their axes as an input."""
    return build(
        body.replace("<axes = [-1]>(x)", "(x, last)").replace("<axes = [-1]>(q)", "(q, last)"),
        inputs,
        output,
        23,
    )


def assert_close(before: Model, after: Model) -> None:
    feeds = random_feeds(before)
    (a,), (b,) = run(before, feeds), run(after, feeds)
    assert np.linalg.norm(a - b) <= SINGLE * np.linalg.norm(a)


def test_the_example() -> None:
    before, after = model(FuseRmsNorm.before), model(FuseRmsNorm.after)
    result, report = apply(FuseRmsNorm(), before, NEW)
    assert ops(result) == ops(after)
    (node,), (wanted,) = result.proto.graph.node, after.proto.graph.node
    assert (node.input, node.output) == (wanted.input, wanted.output)
    assert [attribute(node, k) for k in ("axis", "epsilon")] == [-1, float(np.float32(1e-6))]
    assert [(c.node, c.what) for c in report.changes] == [("Mul(y)", "7 nodes became RMSNormalization")]
    assert_close(before, result)


@pytest.mark.parametrize("body", RMS_NORMS)
def test_every_way_to_write_it_becomes_the_operator(body: str) -> None:
    before = newest(body)
    result, report = apply(FuseRmsNorm(), before, NEW)
    assert [op for op in ops(result) if op != "Cast"] == ["RMSNormalization"]
    assert not report.refusals
    assert_close(before, result)
    again, second = apply(FuseRmsNorm(), result, NEW)
    assert again.same_as(result)
    assert not second.changes


def test_the_reference_implementation_agrees() -> None:
    before = model(FuseRmsNorm.before)
    result, _ = apply(FuseRmsNorm(), before, NEW)
    feeds = random_feeds(before, scale=100.0)
    (a,), (b,) = run(before, feeds), ReferenceEvaluator(result.whole()).run(None, feeds)
    assert np.linalg.norm(a - b) <= SINGLE * np.linalg.norm(a)


def test_a_missing_scale_becomes_ones() -> None:
    before = newest(f"{POWER} y = Div(x, r)")
    result, _ = apply(FuseRmsNorm(), before, NEW)
    (node,) = result.proto.graph.node
    (scale,) = result.proto.graph.initializer
    assert node.input[1] == scale.name
    assert np.array_equal(result.array(scale), np.ones(8, np.float32))
    assert_close(before, result)


def test_an_add_after_the_norm_stays_as_the_operator_has_no_bias() -> None:
    before = newest(
        f"{POWER} n = Div(x, r) w = Mul(n, s) y = Add(w, b)", "float[2,4,8] x, float[8] s, float[8] b"
    )
    result, _ = apply(FuseRmsNorm(), before, NEW)
    assert ops(result) == ["RMSNormalization", "Add"]
    assert_close(before, result)


REFUSED = [
    pytest.param(
        f"{POWER} y = Div(x, r)",
        "float[2,4,8] x",
        "float[2,4,8] y",
        Context(),
        "needs opset 23, the run allows 17",
        id="an older target",
    ),
    pytest.param(
        f"{POWER} n = Div(x, r) y = Mul(n, s) z = Relu(q)",
        "float[2,4,8] x, float[8] s",
        "float[2,4,8] y, float[2,4,8] z",
        NEW,
        "q inside it is also used by Relu(z)",
        id="squares used elsewhere",
    ),
    pytest.param(
        f"{POWER} y = Div(x, r)",
        "float[2,4,8] x",
        "float[2,4,8] y, float[2,4,1] v",
        NEW,
        "v inside it is a graph output",
        id="the mean square is an output",
    ),
    pytest.param(
        f"{POWER} y = Div(x, r)".replace("<axes = [-1]>(q)", "(q, first)"),
        "float[2,4,8] x",
        "float[2,4,8] y",
        NEW,
        "it normalises axes [1], not the last ones",
        id="the channel axis",
    ),
    pytest.param(
        f"{POWER} y = Div(x, r)",
        "float[2,4,k] x",
        "float[2,4,k] y",
        NEW,
        "a scale of ones needs the sizes",
        id="no scale and no size",
    ),
]


@pytest.mark.parametrize(("body", "inputs", "output", "context", "reason"), REFUSED)
def test_it_says_why_it_stays(body: str, inputs: str, output: str, context: Context, reason: str) -> None:
    before = newest(f"first = Constant<value_ints = [1]>() {body}", inputs, output)
    result, report = apply(FuseRmsNorm(), before, context)
    assert result.same_as(before)
    (refusal,) = report.refusals
    assert reason in refusal.reason
    assert refusal.reason.endswith("nodes stay one unit, to be one FP32 island")
    assert refusal.node == units(before)[0].name


def test_an_older_model_has_no_such_operator() -> None:
    _, report = apply(FuseRmsNorm(), build(f"{POWER} y = Div(x, r)"), NEW)
    (refusal,) = report.refusals
    assert refusal.node == "Div(y)"
    assert refusal.reason == "it needs opset 23, the model has 17: run upgrade-opset"


@pytest.mark.parametrize(("body", "size"), NORMALIZE)
def test_an_l2_normalisation_is_never_an_operator(body: str, size: int) -> None:
    before = newest(body)
    result, report = apply(FuseRmsNorm(), before, NEW)
    assert result.same_as(before)
    (refusal,) = report.refusals
    assert "divides by the root of a sum" in refusal.reason
    assert f"its {size} nodes stay one unit" in refusal.reason


@pytest.mark.parametrize(("case", "count"), [("t5_encoder", 5), ("llama_block", 5), ("if_loop", 1)])
def test_real_exports(case: str, count: int) -> None:
    proto = onnx.version_converter.convert_version(onnx.load(MODELS / f"{case}.onnx"), 23)
    proto.ir_version = 11
    before = load(proto)
    result, report = apply(FuseRmsNorm(), before, NEW)
    assert len(report.changes) == count
    with np.load(MODELS / f"{case}.npz") as sample:
        feeds = dict(sample)
    for a, b in zip(run(before, feeds), run(result, feeds), strict=True):
        assert np.linalg.norm(a - b) <= FuseRmsNorm.exactness.tolerance * np.linalg.norm(a)
    _, report = apply(FuseRmsNorm(), before)
    assert len(report.refusals) == count
