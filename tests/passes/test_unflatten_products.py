"""unflatten-products: products that lose the Reshapes around them, and gain an FP32 epilogue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import apply, graph, keeps_results, ops, with_constants
from plans import kept, planned

import rewriter
from rewriter.base import Context, Kept
from rewriter.model import Model
from rewriter.passes.unflatten_products import UnflattenProducts
from rewriter.pipeline.presets import PRESETS
from rewriter.planning.planner import PlanRequest

SHAPES = {
    "w": (4, 5),
    "t": (5, 4),
    "b": (5,),
    "r": (1, 5),
    "s": (1,),
    "m": (12, 5),
    "u": (5, 5),
    "n": (12, 5),
    "cube": (1, 4, 5),
}


def _model(
    product: str,
    *,
    flat: str = "12, 4",
    back: str = "2, 6, 5",
    x: str = "float[2,6,4] x",
    y: str = "float[2,6,5] y",
    behind: str = "",
) -> Model:
    """Reshape, a product, Reshape; random weights where the product names them."""
    body = f"""{{
        flat = Constant<value_ints = [{flat}]>()
        back = Constant<value_ints = [{back}]>()
        f = Reshape(x, flat)
        p = {product}
        y = Reshape(p, back)
        {behind}
    }}"""
    return with_constants(body, SHAPES, x, y)


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        pytest.param("MatMul(f, w)", ["MatMul"], id="MatMul"),
        pytest.param("Gemm(f, w)", ["MatMul"], id="Gemm without C"),
        pytest.param("Gemm(f, w, b)", ["MatMul", "Add"], id="C is a row"),
        pytest.param("Gemm(f, w, r)", ["MatMul", "Add"], id="C is a row with a leading 1"),
        pytest.param("Gemm(f, w, s)", ["MatMul", "Add"], id="C is one number"),
        pytest.param("Gemm<transB = 1>(f, t, b)", ["MatMul", "Add"], id="a transposed weight"),
    ],
)
def test_both_reshapes_go(product: str, expected: list[str]) -> None:
    before = _model(product)
    after, report = apply(UnflattenProducts(), before)
    assert ops(after) == expected
    assert len(report.changes) == 1
    keeps_results(before, after, UnflattenProducts())


@pytest.mark.parametrize(
    ("x", "back"),
    [
        pytest.param("float[n,6,4] x", "-1, 6, 5", id="an unknown batch"),
        pytest.param("float[2,n,4] x", "2, -1, 5", id="an unknown length"),
    ],
)
def test_one_unknown_size_follows_from_the_others(x: str, back: str) -> None:
    before = _model("Gemm(f, w, b)", flat="-1, 4", back=back, x=x, y="float[i,j,5] y")
    after, _ = apply(UnflattenProducts(), before)
    assert ops(after) == ["MatMul", "Add"]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x": "float[2,3,8] x"}, id="heads are joined, too"),
        pytest.param({"back": "6, 2, 5", "y": "float[6,2,5] y"}, id="other axes after it"),
        pytest.param({"x": "float[12,4] x"}, id="there was nothing to join"),
        pytest.param(
            {"flat": "-1, 4", "x": "float[n,k,4] x", "back": "2, -1, 5", "y": "float[i,j,5] y"},
            id="an unknown size",
        ),
    ],
)
def test_a_reshape_that_did_more_joins_less(changed: dict[str, str]) -> None:
    before = _model("Gemm(f, w, b)", **changed)
    after, _ = apply(UnflattenProducts(), before)
    assert ops(after) == ["Reshape", "MatMul", "Add"]
    if "n" not in changed.get("x", ""):
        keeps_results(before, after, UnflattenProducts())


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"back": "2, 6, 5, 1", "y": "float[2,6,5,1] y"}, id="the last axis is split"),
        pytest.param({"back": "12, 5", "y": "float[12,5] y"}, id="no axis is split"),
        pytest.param(
            {"product": "MatMul(f, w)", "flat": "3, 4, 4", "back": "2, 6, 5"}, id="three axes between"
        ),
        pytest.param({"product": "MatMul(f, cube)"}, id="a weight of three axes"),
    ],
)
def test_other_reshapes_stay(changed: dict[str, str]) -> None:
    before = _model(**{"product": "Gemm(f, w, b)", **changed})
    after, report = apply(UnflattenProducts(), before)
    assert after is before
    assert not report.changes


def test_two_unknown_sizes_are_declined() -> None:
    text = """
        g (float[n,k,4] x, int64[3] back) => (float[i,j,5] y)
        <int64[2] flat = {-1, 4}, float[4,5] w = {W}> {
            f = Reshape(x, flat)
            p = MatMul(f, w)
            y = Reshape(p, back)
        }"""
    before = graph(text.replace("{W}", "{" + ", ".join(["0.5"] * 20) + "}"))
    after, report = apply(UnflattenProducts(), before)
    assert after is before
    assert "more than one size" in report.refusals[0].reason


def test_products_with_other_consumers_stay() -> None:
    before = _model("Gemm(f, w, b)", behind="z = Neg(p) v = Reshape(z, back)")
    after, report = apply(UnflattenProducts(), before)
    assert not report.changes
    assert ops(after).count("Reshape") == ops(before).count("Reshape")


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        pytest.param("Gemm<alpha = 2.0>(f, w, b)", "alpha", id="alpha"),
        pytest.param("Gemm<beta = 2.0>(f, w, b)", "beta", id="beta"),
        pytest.param("Gemm(f, w, m)", "no constant row", id="C differs from row to row"),
        pytest.param("Gemm<transA = 1>(f, n, b)", "transposes", id="its data is transposed"),
    ],
)
def test_gemm_that_a_matmul_and_an_add_are_not(product: str, reason: str) -> None:
    transposed = "transA" in product
    y = "float[2,2,5] y" if transposed else "float[2,6,5] y"
    after, report = apply(UnflattenProducts(), _model(product, back="2, -1, 5", y=y))
    assert reason in report.refusals[0].reason
    assert "Gemm" in ops(after)


def test_beta_means_nothing_without_c() -> None:
    after, _ = apply(UnflattenProducts(), _model("Gemm<beta = 2.0>(f, w)"))
    assert ops(after) == ["MatMul"]


@pytest.mark.parametrize("name", ["f", "p", "y"])
def test_nodes_that_the_user_names_stay(name: str) -> None:
    _, report = apply(UnflattenProducts(), _model("Gemm(f, w, b)"), Context(kept=Kept((name,), ())))
    assert f"your pattern {name!r}" in report.refusals[0].reason


def test_sizes_that_the_reshape_knows_stay_known() -> None:
    before = _model("Gemm(f, w, b)", flat="-1, 4", x="float[n,6,4] x", y="float[i,j,5] y")
    after, _ = apply(UnflattenProducts(), before)
    assert ops(after) == ["Reshape", "MatMul", "Add"]


def test_empty_tensors_are_skipped() -> None:
    text = """
        g (float[0,2,4] x) => (float[2,0,5] y)
        <int64[2] flat = {0, 4}, int64[3] back = {2, 0, 5}, float[4,5] w = {W}> {
            f = Reshape<allowzero = 1>(x, flat)
            p = MatMul(f, w)
            y = Reshape<allowzero = 1>(p, back)
        }"""
    before = graph(text.replace("{W}", "{" + ", ".join(["0.5"] * 20) + "}"))
    after, _ = apply(UnflattenProducts(), before)
    assert after is before


def test_a_tied_embedding_is_not_held_twice() -> None:
    body = """{
        flat = Constant<value_ints = [12, 4]>() back = Constant<value_ints = [2, 6, 5]>()
        f = Reshape(x, flat) p = Gemm<transB = 1>(f, t) y = Reshape(p, back)
        ids = Constant<value_ints = [0, 1]>() z = Gather(t, ids) }"""
    before = with_constants(body, SHAPES, "float[2,6,4] x", "float[2,6,5] y, float[2,4] z")
    after, report = apply(UnflattenProducts(), before)
    assert after is before
    assert "table of a Gather" in report.refusals[0].reason


def test_before_opset_7_add_does_not_broadcast() -> None:
    text = """
        g (float[2,2,1] x) => (float[2,2,1] y)
        <float[1,1] v = {0.5}, int64[2] flat = {4, 1}, int64[3] back = {2, 2, 1}> {
            f = Reshape(x, flat)
            p = MatMul(f, v)
            y = Reshape(p, back)
        }"""
    _, report = apply(UnflattenProducts(), graph(text, opset=6))
    assert "opset 7" in report.refusals[0].reason


def test_products_of_one_weight_share_its_transposed_one() -> None:
    body = """{
        flat = Constant<value_ints = [12, 5]>() back = Constant<value_ints = [2, 6, 5]>()
        f = Reshape(x, flat) p = Gemm<transB = 1>(f, u, b) h = Reshape(p, back)
        g = Reshape(h, flat) q = Gemm<transB = 1>(g, u, b) y = Reshape(q, back) }"""
    before = with_constants(body, SHAPES, "float[2,6,5] x", "float[2,6,5] y")
    after, _ = apply(UnflattenProducts(), before)
    assert ops(after) == ["MatMul", "Add", "MatMul", "Add"]
    assert [t.name for t in after.proto.graph.initializer] == ["b", "u/transposed"]
    keeps_results(before, after, UnflattenProducts())


def test_products_of_one_tensor_stay_products_of_one_tensor() -> None:
    body = """{
        flat = Constant<value_ints = [12, 4]>() back = Constant<value_ints = [2, 6, 5]>()
        f = Reshape(x, flat)
        p = Gemm(f, w, b) k = Reshape(p, back)
        q = Gemm<transB = 1>(f, t, b) v = Reshape(q, back)
        y = Add(k, v) }"""
    before = with_constants(body, SHAPES, "float[2,3,8] x", "float[2,6,5] y")
    after, _ = apply(UnflattenProducts(), before)
    assert ops(after) == ["Reshape", "MatMul", "Add", "MatMul", "Add", "Add"]
    keeps_results(before, after, UnflattenProducts())


def test_the_epilogue_is_fp32_then() -> None:
    before = _model("Gemm(f, w, b)")
    after, _ = apply(UnflattenProducts(), before)
    wish = PlanRequest(epilogues=True)
    assert not kept(planned(before, wish))
    assert set(kept(planned(after, wish)).values()) == {"epilogue"}


def test_fix_makes_a_flattened_mlp_more_accurate() -> None:
    body = """{
        flat = Constant<value_ints = [12, 256]>() back = Constant<value_ints = [2, 6, 256]>()
        f = Reshape(x, flat) p = Gemm(f, w, b) h = Reshape(p, back) a = Relu(h)
        g = Reshape(a, flat) q = Gemm(g, v, b) k = Reshape(q, back) y = Add(k, x) }"""
    shapes = {"w": (256, 256), "v": (256, 256), "b": (256,)}
    source = with_constants(body, shapes, "float[2,6,256] x", "float[2,6,256] y")
    inputs = [
        {"x": np.random.default_rng(i).standard_normal((2, 6, 256)).astype(np.float32)} for i in range(2)
    ]
    errors = []
    for skipped in (["unflatten-products"], []):
        result = rewriter.fix(source.whole(), inputs=inputs, skip=skipped, build=False, accumulation="fp16")
        assert result.verdict is not None
        (check,) = (check for check in result.verdict.checks if check.name == "emulation")
        errors.append(max(output.relative_l2 for output in check.outputs))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(
    ("product", "operator"),
    [pytest.param("Gemm(f, w, b)", "Add", id="C"), pytest.param("Gemm(f, w)", "MatMul", id="no C")],
)
def test_a_plan_with_a_node_that_took_over_a_name_fits_again(
    product: str, operator: str, tmp_path: Path
) -> None:
    source, plan = _model(product).whole(), tmp_path / "plan.json"
    first = rewriter.fix(source, keep_fp32_op=[operator], save_plan=plan, build=False)
    again = rewriter.fix(source, plan=plan, build=False)
    assert first.proto == again.proto
    assert again.plan is not None
    assert any(d.rule == "user" for d in again.plan.decisions)


def test_it_is_a_part_of_the_presets_that_have_epilogues() -> None:
    having = {name for name, preset in PRESETS.items() if "unflatten-products" in preset.pipeline}
    assert having == {"trt-fp16", "accurate"}


def test_a_transposed_weight_of_an_enclosing_graph_is_not_copied() -> None:
    weight = "{" + ", ".join(["0.5"] * 20) + "}"
    inner = "{ f = Reshape(x, flat) p = Gemm<transB = 1>(f, t) a = Reshape(p, back) }"
    before = graph(f"""
        g (bool c, float[2,6,4] x) => (float[2,6,5] y)
        <int64[2] flat = {{12, 4}}, int64[3] back = {{2, 6, 5}}, float[5,4] t = {weight}> {{
            y = If (c) <then_branch = one () => (float[2,6,5] a) {inner},
                        else_branch = two () => (float[2,6,5] a) {inner}>
        }}""")
    after, report = apply(UnflattenProducts(), before)
    assert after is before
    assert all("belongs to an enclosing graph" in refusal.reason for refusal in report.refusals)
    assert len(report.refusals) == 2
