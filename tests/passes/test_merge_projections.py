"""merge-projections: products that become one, products that stay apart, results and names that stay."""

import numpy as np
from graphs import apply, keeps_results, model_of, ops
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from rewriter.ir.model import Array, Model
from rewriter.passes.merge_projections import MergeProjections


@st.composite
def projections(draw: st.DrawFn) -> Model:
    """Up to five products of one tensor, each as MatMul or Gemm, with a bias, an Add of no row, or bare."""
    depth = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(1, 5))
    nodes, weights, outputs = [], dict[str, Array](), []

    def constant(name: str, *shape: int) -> str:
        weights[name] = rng.standard_normal(shape)
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
        outputs.append(f"y{i}")
    return model_of(nodes, {"x": [rows, depth]}, outputs, weights, opset=draw(st.sampled_from([13, 18])))


@given(projections())
def test_any_group_keeps_its_results(before: Model) -> None:
    after, report = apply(MergeProjections(), before)
    assert len(report.changes) == 1
    assert sum(op in {"MatMul", "Gemm"} for op in ops(after)) == 1
    keeps_results(before, after, MergeProjections())


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Model, dict[str, Array]]:
    """Products cut into 1 to 4 heads each, with targets that write, keep or count the axes before them."""
    batch, length, size = (draw(st.integers(1, 3)) for _ in range(3))
    named = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, held, outputs = [], dict[str, Array](), []
    for i in range(draw(st.integers(2, 4))):
        heads = draw(st.integers(1, 4))
        target = draw(
            st.sampled_from(
                [[batch, length], [0, 0], [0, -1], [-1, 0], [-1, length], [batch, -1], [length, batch]]
            )
        )
        target = [*target, -1 if -1 not in target and draw(st.booleans()) else heads, size]
        held |= {f"w{i}": rng.standard_normal((5, heads * size)), f"t{i}": np.asarray(target, np.int64)}
        nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Reshape", [f"m{i}", f"t{i}"], [f"y{i}"]))
        outputs.append(f"y{i}")
    shape: list[int | str] = ["b", "l", 5] if named else [batch, length, 5]
    return model_of(nodes, {"x": shape}, outputs, held), {
        "x": rng.standard_normal((batch, length, 5)).astype(np.float32)
    }


@given(attentions())
def test_any_heads_keep_their_results(case: tuple[Model, dict[str, Array]]) -> None:
    before, feeds = case
    after, report = apply(MergeProjections(), before)
    assert len(report.changes) == 1
    keeps_results(before, after, MergeProjections(), feeds)
