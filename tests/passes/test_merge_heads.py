"""merge-projections where results are split into attention's heads: one Reshape, and a Split by heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, ops, random_feeds, run, with_constants
from hypothesis import given
from hypothesis import strategies as st
from needs import needs_rtx
from onnx import helper, numpy_helper
from paths import MODELS

from rewriter.ir.base import Context
from rewriter.ir.model import Array, Model, facts, load
from rewriter.jobs.fix import api
from rewriter.passes.merge_projections import MergeProjections
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import parse
from rewriter.runtime.ranges import measure
from rewriter.runtime.ranges.merged import merged_ranges

WEIGHTS = {"a": (8, 8), "b": (8, 4), "c": (8,), "e": (8, 12)}


def _model(
    body: str,
    outputs: str = "float[1,3,4,2] q, float[1,3,2,2] k",
    *,
    x: str = "float[1,3,8] x",
    constants: str = "",
    opset: int = 17,
) -> Model:
    """A graph that projects `x` by random weights: `a` to 8 columns, `b` to 4, `e` to 12."""
    held = f"<{constants}>" if constants else ""
    return with_constants(f"{held} {body}", WEIGHTS, x, outputs, opset=opset)


def _holds(before: Model, after: Model, feeds: dict[str, Array] | None = None) -> None:
    """The very results but for the order of sums, same signature, and nothing left to do."""
    assert after.signature == before.signature
    onnx.checker.check_model(after.whole(), full_check=True)
    feeds = feeds or random_feeds(before)
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))
    assert not apply(MergeProjections(), after)[1].changes


def _scaled(factor: str, scale: str = "Mul(m, f)", outputs: str = "", **options: Any) -> Model:
    """Q times a factor before its Reshape, as Whisper and BART write it."""
    body = f"{{ m = MatMul(x, a) p = {scale} q = Reshape(p, s) n = MatMul(x, b) k = Reshape(n, t) }}"
    targets = f"int64[4] s = {{1,3,4,2}}, int64[4] t = {{1,3,2,2}}, {factor}"
    return _model(body, f"float[1,3,4,2] q, float[1,3,2,2] k{outputs}", constants=targets, **options)


def test_ranges_come_from_the_parts_through_a_scale() -> None:
    before = _scaled("float f = {-0.3}")
    feeds = [random_feeds(before)]
    after, _ = apply(MergeProjections(), before)
    found = merged_ranges(
        after, measure(before, feeds, facts.infer(before)), {"merge-projections"}, facts.infer(after)
    )
    ran = measure(after, feeds, facts.infer(after))
    assert found is not None and ran.keys() <= found.keys()
    for node in after.proto.graph.node[1:4]:  # the product's own range leaves room for the bias
        for name in node.output:
            for of in ("low", "high"):
                assert getattr(found[0, name], of) == pytest.approx(getattr(ran[0, name], of), rel=1e-5)


def test_values_lost_to_a_zero_get_no_ranges() -> None:
    before = _scaled("float f = {0}")
    after, _ = apply(MergeProjections(), before)
    known = measure(before, [random_feeds(before)], facts.infer(before))
    assert merged_ranges(after, known, {"merge-projections"}, facts.infer(after)) is None


ATTENTION = """{
    m = MatMul(x, a)
    scaled = Mul(m, f)
    u = Reshape(scaled, s)
    q = Transpose<perm = [0, 2, 1, 3]>(u)
    n = MatMul(x, a)
    biased = Add(n, c)
    v = Reshape(biased, t)
    k = Transpose<perm = [0, 2, 3, 1]>(v)
    scores = MatMul(q, k)
    y = Softmax(scores)
}"""


@needs_rtx
@pytest.mark.parametrize("x", ["float[1,3,8] x", "float[b,l,8] x"], ids=["fixed shape", "dynamic shape"])
def test_tensorrt_builds_heads_with_a_scale(x: str) -> None:
    before = _model(
        ATTENTION,
        "float[n,4,o,p] y",
        x=x,
        constants="float f = {0.3}, int64[4] s = {0,0,-1,2}, int64[4] t = {0,-1,4,2}",
    )
    feeds = [{"x": np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)}]
    passes = "merge-projections,mixed-precision{epilogues=true},clean-casts"
    result = api.fix(before.whole(), passes=passes, inputs=feeds)
    assert ops(load(result.proto)).count("Reshape") == 1
    assert result.verdict is not None and result.verdict.passed
    assert next(check for check in result.verdict.checks if check.name == "build").passed


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Model, dict[str, Array]]:
    """Products cut into 1 to 4 heads each, with targets that write, keep or count the axes before them."""
    batch, length, size = (draw(st.integers(1, 3)) for _ in range(3))
    named = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, held, outputs = [], [], []
    for i in range(draw(st.integers(2, 4))):
        heads = draw(st.integers(1, 4))
        target = draw(
            st.sampled_from(
                [[batch, length], [0, 0], [0, -1], [-1, 0], [-1, length], [batch, -1], [length, batch]]
            )
        )
        target = [*target, -1 if -1 not in target and draw(st.booleans()) else heads, size]
        held.append(
            numpy_helper.from_array(rng.standard_normal((5, heads * size)).astype(np.float32), f"w{i}")
        )
        held.append(numpy_helper.from_array(np.asarray(target, np.int64), f"t{i}"))
        nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Reshape", [f"m{i}", f"t{i}"], [f"y{i}"]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", 1, [None] * 4))
    x = helper.make_tensor_value_info("x", 1, ["b", "l", 5] if named else [batch, length, 5])
    made = helper.make_graph(nodes, "g", [x], outputs, held)
    source = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    return source, {"x": rng.standard_normal((batch, length, 5)).astype(np.float32)}


@given(attentions())
def test_any_heads_keep_their_results(case: tuple[Model, dict[str, Array]]) -> None:
    before, feeds = case
    after, report = apply(MergeProjections(), before)
    assert len(report.changes) == 1
    _holds(before, after, feeds)


GROUPS = {"vit": 12, "bert": 2, "swin": 4, "t5_encoder": 2, "llama_block": 2}
"""Groups with heads in the case models: all but a Llama's gate and up."""


@pytest.mark.parametrize("name", GROUPS)
def test_all_heads_of_a_case_are_found(name: str) -> None:
    """Their targets are computed as exported; `simplify` folds them."""
    steps = parse("upgrade-opset,simplify,merge-projections")
    _, reports = Driver().run(load(MODELS / f"{name}.onnx"), steps, Context())
    assert sum("heads" in change.what for change in reports[-1].changes) == GROUPS[name]
