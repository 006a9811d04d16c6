"""fuse-layer-norm: LayerNormalization with equal results, and refusals with their reasons."""

import numpy as np
import onnx
import pytest
from graphs import apply, graph, ops, random_feeds, run
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from written_norms import AFFINE, CORE, LAYER_NORMS, build

from rewriter.ir.graph import attribute
from rewriter.ir.model import Model, load
from rewriter.passes.fuse_layer_norm import FuseLayerNorm

SINGLE = 1e-6
"""Relative L2 error of one norm of normal data: 2^-24 = 6e-8 for each of some ten roundings."""


def norm_node(source: Model) -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = [n for n in source.proto.graph.node if n.op_type == "LayerNormalization"]
    (node,) = nodes
    return node


def assert_close(before: Model, after: Model, tolerance: float = SINGLE) -> None:
    feeds = random_feeds(before)
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        assert a.dtype == b.dtype
        assert np.linalg.norm(a.astype(np.float64) - b) <= tolerance * np.linalg.norm(a.astype(np.float64))


@pytest.mark.parametrize(("body", "opset"), LAYER_NORMS)
def test_every_way_to_write_it_becomes_the_operator(body: str, opset: int) -> None:
    before = build(body, opset=opset)
    result, report = apply(FuseLayerNorm(), before)
    assert [op for op in ops(result) if op != "Identity"] == ["LayerNormalization"]
    assert list(norm_node(result).input) == ["x", "s", "b"]
    assert attribute(norm_node(result), "epsilon") == float(np.float32(1e-5))
    assert not report.refusals
    assert_close(before, result)
    again, second = apply(FuseLayerNorm(), result)
    assert again.same_as(result)
    assert not second.changes


def test_an_fp16_epsilon_is_kept_exactly() -> None:
    epsilon = np.float16(1e-5)
    proto = build(f"{CORE} {AFFINE}").whole()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    result, _ = apply(FuseLayerNorm(), load(proto))
    assert attribute(norm_node(result), "epsilon") == float(epsilon) != float(np.float32(1e-5))
    assert result.signature.outputs[0].dtype == TensorProto.FLOAT16


@st.composite
def layer_norms(draw: st.DrawFn) -> Model:
    """A LayerNorm over the last axes of any small shape, with weights written in any way that broadcasts."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rank = len(shape)
    axes = list(range(draw(st.integers(0, rank - 1)), rank))
    written = [a - rank if draw(st.booleans()) else a for a in axes]
    full = [d if i in axes else 1 for i, d in enumerate(shape)]
    dims = full[draw(st.integers(0, axes[0])) :]
    values = ", ".join(str(i + 1) for i in range(int(np.prod(dims))))
    affine = draw(st.sampled_from(["y = Identity(n)", "y = Mul(k, n)", "w = Mul(n, k) y = Add(k, w)"]))
    return graph(f"""g (float{shape} x) => (float{shape} y)
        <float two = {{2.0}}, float eps = {{0.00001}}, float{dims} k = {{{values}}}> {{
            {CORE.replace("[-1]", str(written))} {affine} }}""")


@given(layer_norms())
def test_any_last_axes_and_any_weights(before: Model) -> None:
    result, report = apply(FuseLayerNorm(), before)
    assert "LayerNormalization" in ops(result)
    assert len(report.changes) == 1
    feeds = random_feeds(before)
    (a,), (b,) = run(before, feeds), run(result, feeds)
    # x is rounded at 2^-24 |x| before it is divided by sqrt(variance + eps), here at least 3e-3; |k| <= 625
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4 * max(1.0, float(np.abs(a).max())))
