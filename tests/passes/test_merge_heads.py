"""merge-projections where results are split into attention's heads: one Reshape, and a Split by heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from graphs import apply, ops, random_feeds, run, with_constants
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_rtx
from onnx import helper, numpy_helper
from paths import MODELS

from rewriter.base import Context, Kept
from rewriter.data.ranges import measure
from rewriter.data.ranges.merged import merged_ranges
from rewriter.jobs.fix import api
from rewriter.model import Array, Model, facts, load
from rewriter.passes.merge_projections import MergeProjections
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import parse

MERGED = ["MatMul", "Add", "Split"]
CUT = ["MatMul", "Add", "Reshape", "Split"]
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


def _heads(first: str, second: str, **options: Any) -> Model:
    """Two products, each cut by a Reshape to the target that is written out."""
    targets = (
        f"int64[{first.count(',') + 1}] s = {{{first}}}, int64[{second.count(',') + 1}] t = {{{second}}}"
    )
    body = "{ m = MatMul(x, a) q = Reshape(m, s) n = MatMul(x, b) k = Reshape(n, t) }"
    return _model(body, constants=targets, **options)


def _holds(before: Model, after: Model, feeds: dict[str, Array] | None = None) -> None:
    """The very results but for the order of sums, same signature, and nothing left to do."""
    assert after.signature == before.signature
    onnx.checker.check_model(after.whole(), full_check=True)
    feeds = feeds or random_feeds(before)
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))
    assert not apply(MergeProjections(), after)[1].changes


def _target(model: Model) -> list[int]:
    """The shape that the one Reshape is told."""
    (view,) = (node for node in model.proto.graph.node if node.op_type == "Reshape")
    return next(
        numpy_helper.to_array(t).tolist() for t in model.proto.graph.initializer if t.name == view.input[1]
    )


NAMED = {"x": "float[b,l,8] x", "outputs": "float[c,m,4,2] q, float[d,n,2,2] k"}

TARGETS = [
    pytest.param("1,3,4,2", "1,3,2,2", {}, [1, 3, 6, 2], id="all written out"),
    pytest.param("1,3,-1,2", "1,3,-1,2", {}, [1, 3, 6, 2], id="heads by -1"),
    pytest.param("1,3,-1,2", "1,-1,2,2", {}, [1, 3, 6, 2], id="as Whisper: Q's heads by -1, K's length"),
    pytest.param("0,0,-1,2", "0,0,2,2", {}, [1, 3, 6, 2], id="kept axes of a known size"),
    pytest.param("0,0,4,2", "0,0,2,2", NAMED, [0, 0, 6, 2], id="kept axes of no known size"),
    pytest.param("0,0,-1,2", "0,0,-1,2", NAMED, [0, 0, 6, 2], id="kept axes, heads by -1"),
    pytest.param("0,0,4,-1", "0,0,2,-1", NAMED, [0, 0, 6, 2], id="kept axes, size by -1"),
    pytest.param("0,-1,4,2", "0,-1,2,2", NAMED, [0, -1, 6, 2], id="length by -1"),
    pytest.param("0,0,4,2", "0,-1,2,2", NAMED, [0, -1, 6, 2], id="one keeps what the other counts"),
    pytest.param("-1,0,4,2", "0,0,2,2", NAMED, [-1, 0, 6, 2], id="batch by -1"),
    pytest.param(
        "-1,3,4,2",
        "-1,3,2,2",
        {"x": "float[b,8] x", "outputs": "float[n,3,4,2] q, float[n,3,2,2] k"},
        [-1, 3, 6, 2],
        id="rows without a batch",
    ),
    pytest.param(
        "4,3,4,2",
        "4,3,2,2",
        {"x": "float[2,2,3,8] x", "outputs": "float[4,3,4,2] q, float[4,3,2,2] k"},
        [4, 3, 6, 2],
        id="windows become a batch",
    ),
]


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize(("first", "second", "options", "target"), TARGETS)
def test_one_reshape(first: str, second: str, options: dict[str, Any], target: list[int], opset: int) -> None:
    before = _heads(first, second, opset=opset, **options)
    after, report = apply(MergeProjections(), before)
    assert ops(after) == CUT
    assert _target(after) == target
    assert "12 columns in 6 heads" in report.changes[0].what
    split = after.proto.graph.node[-1]
    assert list(split.output) == ["q", "k"]
    rng = np.random.default_rng(2)
    for batch, length in ((2, 3), (1, 6)) if options is NAMED else ():
        _holds(before, after, {"x": rng.standard_normal((batch, length, 8)).astype(np.float32)})
    rows = (
        {"x": rng.standard_normal((6, 8)).astype(np.float32)} if "float[b,8] x" in options.values() else None
    )
    _holds(before, after, rows)


def test_names_and_sizes() -> None:
    after, _ = apply(MergeProjections(), _heads("1,3,4,2", "1,3,2,2"))
    name = "MatMul(m)/merged"
    assert [n.name for n in after.proto.graph.node] == [
        name,
        *(f"{name}/{o}" for o in ("Add", "Reshape", "Split")),
    ]
    assert {a.name: a.i for a in after.proto.graph.node[-1].attribute} == {"axis": -2}
    held = {
        t.name: numpy_helper.to_array(t).tolist() for t in after.proto.graph.initializer if t.data_type == 7
    }
    assert held == {f"{name}/shape": [1, 3, 6, 2], f"{name}/Split/sizes": [4, 2]}


def test_before_opset_13_the_heads_are_an_attribute() -> None:
    after, _ = apply(MergeProjections(), _heads("1,3,4,2", "1,3,2,2", opset=11))
    assert [list(a.ints) for a in after.proto.graph.node[-1].attribute if a.name == "split"] == [[4, 2]]


APART = [
    pytest.param(
        "1,3,4,2", "1,3,1,4", {"outputs": "float[1,3,4,2] q, float[1,3,1,4] k"}, id="sizes that differ"
    ),
    pytest.param(
        "1,3,4,2", "3,1,2,2", {"outputs": "float[1,3,4,2] q, float[3,1,2,2] k"}, id="axes that differ"
    ),
    pytest.param("3,4,2", "3,2,2", {"outputs": "float[3,4,2] q, float[3,2,2] k"}, id="three axes"),
    pytest.param(
        "1,2,6,2", "1,2,3,2", {"outputs": "float[1,2,6,2] q, float[1,2,3,2] k"}, id="heads across rows"
    ),
    pytest.param("0,-1,4,2", "-1,0,2,2", NAMED, id="each counts another axis"),
    pytest.param(
        "3,-1,4,2",
        "0,0,2,2",
        {**NAMED, "outputs": "float[3,m,4,2] q, float[d,n,2,2] k"},
        id="no axis in common",
    ),
]


@pytest.mark.parametrize(("first", "second", "options"), APART)
def test_as_before(first: str, second: str, options: dict[str, Any]) -> None:
    before = _heads(first, second, **options)
    after, report = apply(MergeProjections(), before)
    assert ops(after) == [*MERGED, "Reshape", "Reshape"]
    assert len(report.changes) == 1 and "heads" not in report.changes[0].what
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 3, 8)).astype(np.float32)}
    _holds(before, after, feeds if "float[b,l,8] x" in options.values() else None)


READERS = [
    pytest.param(
        "r = Relu(m)",
        "float[1,3,4,2] q, float[1,3,2,2] k, float[1,3,8] r",
        id="a result with other consumers",
    ),
    pytest.param("", "float[1,3,4,2] q, float[1,3,2,2] k, float[1,3,8] m", id="a result that is an output"),
    pytest.param(
        "r = MatMul(x, e)", "float[1,3,4,2] q, float[1,3,2,2] k, float[1,3,12] r", id="one without heads"
    ),
]


@pytest.mark.parametrize(("more", "outputs"), READERS)
def test_all_results_or_none(more: str, outputs: str) -> None:
    body = f"{{ m = MatMul(x, a) q = Reshape(m, s) n = MatMul(x, b) k = Reshape(n, t) {more} }}"
    before = _model(body, outputs, constants="int64[4] s = {1,3,4,2}, int64[4] t = {1,3,2,2}")
    after, _ = apply(MergeProjections(), before)
    assert ops(after)[:5] == [*MERGED, "Reshape", "Reshape"]
    _holds(before, after)


def test_with_allowzero_a_0_is_no_kept_axis() -> None:
    """What has an axis of 0 has no elements: nothing is to be gained."""
    body = """{
        m = MatMul(x, a)
        q = Reshape<allowzero = 1>(m, s)
        n = MatMul(x, a)
        k = Reshape<allowzero = 1>(n, s)
    }"""
    for target, behind in (("0,3,4,2", ["Reshape", "Reshape"]), ("1,3,4,2", [])):
        rows = target[0]
        before = _model(
            body,
            f"float[{rows},3,4,2] q, float[{rows},3,4,2] k",
            x=f"float[{rows},3,8] x",
            constants=f"int64[4] s = {{{target}}}",
        )
        after, _ = apply(MergeProjections(), before)
        assert ops(after) == [*(MERGED if behind else CUT), *behind]


COMPUTED = """{
    s = Shape(x)
    batch = Gather(s, zero)
    length = Gather(s, one)
    first = Concat<axis = 0>(batch, length, heads, size)
    m = MatMul(x, a)
    u = Reshape(m, first)
    q = Transpose<perm = [0, 2, 1, 3]>(u)
    n = MatMul(x, b)
    v = Reshape(n, first)
    k = Transpose<perm = [0, 2, 1, 3]>(v)
}"""
GATHERED = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] size = {2}, int64[1] heads = {-1}"


def test_a_computed_target_is_replaced_where_inference_knows_it() -> None:
    """As exporters write `view(batch, length, -1, size)`; the axes are known by their names."""
    before = _model(COMPUTED, "float[b,h,l,2] q, float[b,i,l,2] k", x="float[b,l,8] x", constants=GATHERED)
    after, _ = apply(MergeProjections(), before)
    assert ops(after) == [*CUT, "Transpose", "Transpose"]
    assert _target(after) == [0, 0, 6, 2]
    for shape in ((2, 3, 8), (1, 7, 8)):
        _holds(before, after, {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)})


def test_a_computed_target_stays_where_inference_does_not() -> None:
    body = COMPUTED.replace("(batch, length", "(length, batch")
    before = _model(body, "float[b,h,l,2] q, float[b,i,l,2] k", x="float[b,l,8] x", constants=GATHERED)
    after, _ = apply(MergeProjections(), before)
    assert ops(after).count("Reshape") == 2
    _holds(before, after, {"x": np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)})


def _scaled(factor: str, scale: str = "Mul(m, f)", outputs: str = "", **options: Any) -> Model:
    """Q times a factor before its Reshape, as Whisper and BART write it."""
    body = f"{{ m = MatMul(x, a) p = {scale} q = Reshape(p, s) n = MatMul(x, b) k = Reshape(n, t) }}"
    targets = f"int64[4] s = {{1,3,4,2}}, int64[4] t = {{1,3,2,2}}, {factor}"
    return _model(body, f"float[1,3,4,2] q, float[1,3,2,2] k{outputs}", constants=targets, **options)


SCALES = [
    pytest.param("float f = {0.3}", "Mul(m, f)", id="a number"),
    pytest.param("float[1] f = {0.3}", "Mul(f, m)", id="of one axis, written first"),
]


@pytest.mark.parametrize(("factor", "scale"), SCALES)
def test_a_scale_moves_after_the_reshape(factor: str, scale: str) -> None:
    before = _scaled(factor, scale)
    before.proto.graph.node[1].name = "/attention/Mul"
    after, _ = apply(MergeProjections(), before)
    assert ops(after) == [*CUT, "Mul"]
    mul = after.proto.graph.node[-1]
    assert (mul.name, list(mul.output)) == ("/attention/Mul", ["q"])
    _holds(before, after)


NO_SCALES = [
    pytest.param("float[8] f = {1,2,3,4,5,6,7,8}", "Mul(m, f)", "", id="a factor for each column"),
    pytest.param("float[1,1,1] f = {0.3}", "Mul(m, f)", "", id="of three axes"),
    pytest.param("float f = {0.3}", "Mul(m, m)", "", id="a square"),
    pytest.param("float f = {0.3}", "Div(m, f)", "", id="a quotient"),
    pytest.param("float f = {0.3}", "Mul(m, f)", ", float[1,3,8] p", id="scaled is an output"),
]


@pytest.mark.parametrize(("factor", "scale", "outputs"), NO_SCALES)
def test_other_factors_stay(factor: str, scale: str, outputs: str) -> None:
    before = _scaled(factor, scale, outputs)
    after, _ = apply(MergeProjections(), before)
    assert ops(after).count("Reshape") == 2
    _holds(before, after)


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(Kept(("/attention/Reshape",)), id="the Reshape"),
        pytest.param(Kept(("q",)), id="its result"),
        pytest.param(Kept(ops=("Mul",)), id="the scale, by operator"),
    ],
)
def test_nodes_that_the_user_names_stay(kept: Kept) -> None:
    before = _scaled("float f = {0.3}")
    before.proto.graph.node[2].name = "/attention/Reshape"
    after, _ = apply(MergeProjections(), before, Context(kept=kept))
    assert ops(after) == [*MERGED, "Mul", "Reshape", "Reshape"]


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


@settings(max_examples=80, deadline=None)
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
