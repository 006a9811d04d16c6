"""merge-projections: products that become one, products that stay apart, results and names that stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, ops, random_feeds, run, with_constants
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS

from rewriter.ir.model import Model, load
from rewriter.passes.merge_projections import MergeProjections


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


def test_large_weights_stay_outside_the_proto() -> None:
    before = _model(
        "{ q = MatMul(x, a) k = MatMul(x, b) }", "float[2,6,64] q, float[2,6,32] k", a=(8, 64), b=(8, 32)
    )
    after, _ = apply(MergeProjections(), before)
    assert after.weights.keys() == {"a/merged"}
    assert after.weights["a/merged"].shape == (8, 96)
    assert not after.weights["a/merged"].flags.writeable
    assert before.weights.keys() == {"a", "b"}


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
