"""merge-projections: products that become one, products that stay apart, results and names that stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, random_feeds, run, with_constants
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS

from rewriter.base import Context, Kept
from rewriter.model import Model, load
from rewriter.passes.merge_projections import MergeProjections

MERGED = ["MatMul", "Add", "Split"]


def _model(
    body: str,
    outputs: str = "float[2,6,4] q, float[2,6,3] k",
    *,
    opset: int = 17,
    x: str = "float[2,6,8] x",
    **weights: tuple[int, ...],
) -> Model:
    """A graph with random FP32 weights of the given shapes beside those that `body` writes out."""
    return with_constants(body, {"a": (8, 4), "b": (8, 3)} | weights, x, outputs, opset=opset)


def _holds(before: Model, after: Model) -> None:
    """Same results but for the order of sums, same signature, and nothing left to do."""
    assert after.signature == before.signature
    onnx.checker.check_model(after.whole(), full_check=True)
    feeds = random_feeds(before)
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))
    again, report = apply(MergeProjections(), after)
    assert again is after
    assert not report.changes


MERGES = [
    pytest.param("{ q = MatMul(x, a) k = MatMul(x, b) }", [], id="no bias: zeros"),
    pytest.param(
        "{ m = MatMul(x, a) q = Add(m, c) n = MatMul(x, b) k = Add(n, d) }", [], id="a bias for each"
    ),
    pytest.param("{ m = MatMul(x, a) q = Add(c, m) k = MatMul(x, b) }", [], id="one bias, written first"),
    pytest.param("{ m = MatMul(x, a) q = Add(m, s) k = MatMul(x, b) }", [], id="a bias of one element"),
    pytest.param("{ m = MatMul(x, a) q = Add(m, r) k = MatMul(x, b) }", [], id="a bias with leading ones"),
    pytest.param("{ m = MatMul(x, a) q = Add(m, f) k = MatMul(x, b) }", ["Add"], id="an Add of no row stays"),
    pytest.param(
        "{ m = MatMul(x, a) p = Add(m, c) q = Mul(p, m) k = MatMul(x, b) }",
        ["Add", "Mul"],
        id="a product with other consumers keeps its Add",
    ),
    pytest.param("{ m = MatMul(x, a) q = Add(m, m) k = MatMul(x, b) }", ["Add"], id="an Add of itself"),
    pytest.param(
        "{ m = MatMul(x, a) n = MatMul(x, b) k = Relu(n) t = ReduceMean<axes = [1, 2]>(k) q = Add(m, t) }",
        ["Relu", "ReduceMean", "Add"],
        id="a computed bias stays",
    ),
]


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize(("body", "behind"), MERGES)
def test_merged(body: str, behind: list[str], opset: int) -> None:
    before = _model(body, opset=opset, c=(4,), d=(3,), s=(1,), r=(1, 1, 4), f=(6, 4))
    after, report = apply(MergeProjections(), before)
    assert ops(after) == MERGED + behind
    assert len(report.changes) == 1
    assert not report.refusals
    _holds(before, after)


def test_opset_18_needs_no_number_of_outputs() -> None:
    before = _model("{ q = MatMul(x, a) k = MatMul(x, b) }", opset=18)
    after, _ = apply(MergeProjections(), before)
    split = after.proto.graph.node[-1]
    assert (split.op_type, len(split.input), [a.name for a in split.attribute]) == ("Split", 2, ["axis"])
    _holds(before, after)


def test_before_opset_13_the_sizes_are_an_attribute() -> None:
    after, _ = apply(MergeProjections(), _model("{ q = MatMul(x, a) k = MatMul(x, b) }", opset=11))
    split = after.proto.graph.node[-1]
    assert len(split.input) == 1
    assert {a.name: list(a.ints) for a in split.attribute if a.name == "split"} == {"split": [4, 3]}


def test_new_nodes_are_named_after_the_first_member() -> None:
    before = _model("{ m = MatMul(x, a) q = Add(m, c) k = MatMul(x, b) }", c=(4,))
    before.proto.graph.node[0].name = "/q_proj/MatMul"
    after, report = apply(MergeProjections(), before)
    names = ["/q_proj/MatMul/merged", "/q_proj/MatMul/merged/Add", "/q_proj/MatMul/merged/Split"]
    assert [node.name for node in after.proto.graph.node] == names
    assert list(after.proto.graph.node[-1].output) == ["q", "k"]
    constants = {t.name: tuple(t.dims) for t in after.proto.graph.initializer}
    assert constants["a/merged"] == (8, 7)
    assert constants["a/merged/bias"] == (7,)
    assert not {"a", "b", "c"} & constants.keys()
    assert report.changes[0].node == "/q_proj/MatMul"


def test_large_weights_stay_outside_the_proto() -> None:
    before = _model(
        "{ q = MatMul(x, a) k = MatMul(x, b) }", "float[2,6,64] q, float[2,6,32] k", a=(8, 64), b=(8, 32)
    )
    after, _ = apply(MergeProjections(), before)
    assert after.weights.keys() == {"a/merged"}
    assert after.weights["a/merged"].shape == (8, 96)
    assert not after.weights["a/merged"].flags.writeable
    assert before.weights.keys() == {"a", "b"}


def test_a_weight_with_other_consumers_stays() -> None:
    before = _model(
        "{ q = MatMul(x, a) k = MatMul(x, b) t = Transpose(a) }",
        "float[2,6,4] q, float[2,6,3] k, float[4,8] t",
    )
    after, _ = apply(MergeProjections(), before)
    assert "a" in {t.name for t in after.proto.graph.initializer}
    _holds(before, after)


def test_layers_that_share_their_weights_share_the_merged_one() -> None:
    body = "{ q = MatMul(x, a) k = MatMul(x, b) y = Relu(x) r = MatMul(y, a) s = MatMul(y, b) }"
    before = _model(body, "float[2,6,4] q, float[2,6,3] k, float[2,6,4] r, float[2,6,3] s")
    after, report = apply(MergeProjections(), before)
    assert len(report.changes) == 2
    weights = [node.input[1] for node in after.proto.graph.node if node.op_type == "MatMul"]
    assert weights == ["a/merged"] * 2
    _holds(before, after)


def test_a_product_that_is_an_output_keeps_its_name_and_its_add() -> None:
    before = _model(
        "{ m = MatMul(x, a) q = Add(m, c) k = MatMul(x, b) }",
        "float[2,6,4] m, float[2,6,4] q, float[2,6,3] k",
        c=(4,),
    )
    after, _ = apply(MergeProjections(), before)
    assert ops(after) == [*MERGED, "Add"]
    assert list(after.proto.graph.node[2].output) == ["m", "k"]
    _holds(before, after)


def test_one_row_without_leading_axes() -> None:
    before = _model(
        "{ m = MatMul(x, a) q = Add(m, c) k = MatMul(x, b) }",
        "float[4] q, float[3] k",
        x="float[8] x",
        c=(4,),
    )
    after, _ = apply(MergeProjections(), before)
    assert ops(after) == MERGED
    _holds(before, after)


GEMMS = [
    pytest.param("{ q = Gemm(x, a) k = Gemm(x, b) }", MERGED, id="without C"),
    pytest.param("{ q = Gemm(x, a, c) k = Gemm(x, b, d) }", MERGED, id="with C"),
    pytest.param("{ q = Gemm(x, a, s) k = Gemm(x, b, r) }", MERGED, id="with C of one element, and of a row"),
    pytest.param("{ q = Gemm<transB = 1>(x, at, c) k = Gemm(x, b) }", MERGED, id="one transposed weight"),
    pytest.param("{ m = Gemm(x, a) q = Add(m, c) k = MatMul(x, b) }", MERGED, id="Gemm, Add and MatMul"),
]


@pytest.mark.parametrize(("body", "left"), GEMMS)
def test_gemm(body: str, left: list[str]) -> None:
    before = _model(
        body, "float[6,4] q, float[6,3] k", x="float[6,8] x", c=(4,), d=(3,), s=(1,), r=(1, 3), at=(4, 8)
    )
    after, report = apply(MergeProjections(), before)
    assert ops(after) == left
    assert len(report.changes) == 1
    _holds(before, after)


GEMMS_APART = [
    pytest.param("{ q = Gemm<alpha = 0.5>(x, a) k = Gemm(x, b) }", "its alpha or beta is not 1", id="alpha"),
    pytest.param("{ q = Gemm<beta = 2.0>(x, a, c) k = Gemm(x, b) }", "its alpha or beta is not 1", id="beta"),
    pytest.param("{ q = Gemm<transA = 1>(x, w) k = Gemm(x, b) }", "it transposes", id="transposed A"),
    pytest.param("{ q = Gemm(x, a, f) k = Gemm(x, b) }", "C, f, is no constant row", id="a C of no row"),
    pytest.param("{ n = Neg(c) q = Gemm(x, a, n) k = Gemm(x, b) }", "is no constant row", id="a computed C"),
]


@pytest.mark.parametrize(("body", "reason"), GEMMS_APART)
def test_gemm_that_does_more_stays_apart(body: str, reason: str) -> None:
    before = _model(body, "float[8,4] q, float[8,3] k", x="float[8,8] x", c=(4,), f=(8, 4), w=(8, 4))
    after, report = apply(MergeProjections(), before)
    assert after is before
    assert [reason in refusal.reason for refusal in report.refusals] == [True]


def test_those_beside_one_that_stays_are_merged() -> None:
    body = "{ p = Gemm<alpha = 0.5>(x, a) q = Gemm(x, a) k = Gemm(x, b) }"
    before = _model(body, "float[6,4] p, float[6,4] q, float[6,3] k", x="float[6,8] x")
    after, report = apply(MergeProjections(), before)
    assert sorted(ops(after)) == sorted(["Gemm", *MERGED])
    assert len(report.refusals) == 1
    _holds(before, after)


SILENT = [
    pytest.param("{ q = MatMul(x, a) y = Relu(x) k = MatMul(y, b) }", id="of different tensors"),
    pytest.param("{ q = MatMul(x, a) k = Relu(x) }", id="one alone"),
    pytest.param("{ q = MatMul(x, a) n = Neg(b) k = MatMul(x, n) }", id="a computed weight"),
    pytest.param("{ q = MatMul(x, a) k = MatMul(x, batch) }", id="a weight for each sample"),
    pytest.param("{ q = MatMul(x, a) k = MatMul(x, vector) }", id="a weight of one axis"),
]


@pytest.mark.parametrize("body", SILENT)
def test_skipped(body: str) -> None:
    before = _model(body, "float q, float k", batch=(2, 8, 3), vector=(8,))
    after, report = apply(MergeProjections(), before)
    assert after is before
    assert not report.refusals


def test_quantised_weights_stay_as_they_are() -> None:
    before = graph(
        """
        g (float[4,2] x) => (float[4,2] q, float[4,2] k)
        <int8[2,2] a = {1, 2, 3, 4}, int8[2,2] b = {4, 3, 2, 1}, float s = {0.5}> {
            wa = DequantizeLinear(a, s)
            q = MatMul(x, wa)
            wb = DequantizeLinear(b, s)
            k = MatMul(x, wb)
        }"""
    )
    after, report = apply(MergeProjections(), before)
    assert after is before
    assert ["quantised" in refusal.reason for refusal in report.refusals] == [True, True]


KEPT = [
    pytest.param(Kept(("*/k/*",)), id="a product by pattern"),
    pytest.param(Kept(("q",)), id="a bias by its output"),
    pytest.param(Kept(ops=("MatMul",)), id="an operator"),
]


@pytest.mark.parametrize("kept", KEPT)
def test_a_group_with_a_member_that_the_user_keeps_in_fp32_stays_apart(kept: Kept) -> None:
    before = _model("{ m = MatMul(x, a) q = Add(m, c) k = MatMul(x, b) }", c=(4,))
    before.proto.graph.node[2].name = "/k/MatMul"
    after, report = apply(MergeProjections(), before, Context(kept=kept))
    assert after is before
    assert ["stay apart" in refusal.reason for refusal in report.refusals] == [True]
    assert apply(MergeProjections(), before, Context(kept=Kept(("/v/*",))))[1].changes


def test_an_old_opset_is_declined() -> None:
    before = _model("{ q = MatMul(x, a) k = MatMul(x, b) }", opset=10)
    after, report = apply(MergeProjections(), before)
    assert after is before
    assert "run upgrade-opset" in report.refusals[0].reason


def test_a_branch_may_read_a_merged_product() -> None:
    before = graph(
        """
        g (float[3,2] x, bool c) => (float[3,2] y)
        <float[2,2] a = {1, 2, 3, 4}, float[2,2] b = {4, 3, 2, 1}, float[2] s = {0.5, 1}> {
            m = MatMul(x, a)
            q = Add(m, s)
            k = MatMul(x, b)
            y = If (c) <
                then_branch = t () => (float[3,2] u) { u = Add(m, k) },
                else_branch = e () => (float[3,2] v) { v = Neg(q) }
            >
        }"""
    )
    after, _ = apply(MergeProjections(), before)
    assert ops(after) == [*MERGED, "Add", "If"]
    assert list(after.proto.graph.node[2].output) == ["m", "k"]
    _holds(before, after)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_model_in_lower_precision_keeps_its_type(dtype: int) -> None:
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weights = [numpy_helper.from_array(np.ones((8, n)).astype(kind), f"w{n}") for n in (4, 3)]
    nodes = [helper.make_node("MatMul", ["x", f"w{n}"], [f"y{n}"]) for n in (4, 3)]
    ports = [helper.make_tensor_value_info(f"y{n}", dtype, [2, n]) for n in (4, 3)]
    x = helper.make_tensor_value_info("x", dtype, [2, 8])
    made = helper.make_graph(nodes, "g", [x], ports, weights)
    before = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    after, _ = apply(MergeProjections(), before)
    assert {t.name: t.data_type for t in after.proto.graph.initializer}["w4/merged/bias"] == dtype


@st.composite
def projections(draw: st.DrawFn) -> Model:
    """Up to five products of one tensor, each as MatMul or Gemm, with a bias, an Add of no row, or bare."""
    depth = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(1, 5))
    nodes, weights, outputs = [], [], []

    def constant(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
        return name

    for i in range(draw(st.integers(2, 5))):
        columns, kind = draw(st.integers(1, 20)), draw(st.sampled_from(["MatMul", "Gemm", "transB"]))
        bias = draw(st.sampled_from([None, (columns,), (1,), (1, columns), (rows, columns), ()]))
        shape = (columns, depth) if kind == "transB" else (depth, columns)
        product = f"y{i}" if bias is None else f"m{i}"
        node = helper.make_node(kind.replace("transB", "Gemm"), ["x", constant(f"w{i}", *shape)], [product])
        if kind == "transB":
            node.attribute.append(helper.make_attribute("transB", 1))
        nodes.append(node)
        if bias is not None:
            nodes.append(helper.make_node("Add", [product, constant(f"b{i}", *bias)], [f"y{i}"]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [rows, columns]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, depth])
    opset = draw(st.sampled_from([11, 13, 18]))
    made = helper.make_graph(nodes, "g", [x], outputs, weights)
    return load(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


@settings(max_examples=60, deadline=None)
@given(projections())
def test_any_group_keeps_its_results(before: Model) -> None:
    after, report = apply(MergeProjections(), before)
    assert len(report.changes) == 1
    assert sum(op in {"MatMul", "Gemm"} for op in ops(after)) == 1
    _holds(before, after)


PROJECTIONS = {"vit": 12, "bert": 2, "swin": 4, "t5_encoder": 2, "llama_block": 4}
"""Groups in the case models: Q, K and V of every block; of a Llama, gate and up, too."""


@pytest.mark.parametrize("name", PROJECTIONS)
def test_all_projections_of_a_case_are_merged(name: str) -> None:
    """That results stay is test_every_pass's; here, that none is missed."""
    _, report = apply(MergeProjections(), load(MODELS / f"{name}.onnx"))
    assert len(report.changes) == PROJECTIONS[name]
    assert not report.refusals
